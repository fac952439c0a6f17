"""What `gen`, `select` and the other primitives make of their arguments."""

import ast
import base64
import inspect
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import jsg as sgl
from jsg.errors import ProgramError, RequestError
from jsg.lang.words import ir, patterns
from jsg.lang.words.ir import (
    ExprList,
    Gen,
    Image,
    MediaOf,
    RoleBegin,
    RoleEnd,
    SamplingArgs,
    Select,
    SeparateReasoning,
    Symbol,
    Text,
)
from jsg.lang.words.patterns import DTYPE_PATTERNS
from tests.lang.scripted import ScriptedBackend

PUBLISHED_GEN = """name max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p
frequency_penalty presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num
return_text_in_logprobs dtype choices choices_method regex json_schema""".split()
PNG = b"\x89PNG\r\n\x1a\n"


def test_gen_takes_the_published_arguments_in_their_order():
    positional = [p.name for p in inspect.signature(sgl.gen).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == PUBLISHED_GEN
    lacking = "min_tokens dtype regex choices choices_method json_schema".split()
    less = [name for name in PUBLISHED_GEN if name not in lacking]
    assert list(inspect.signature(sgl.gen_int).parameters) == less
    assert list(inspect.signature(sgl.gen_string).parameters) == less
    assert list(inspect.signature(sgl.select).parameters)[:4] == ["name", "choices", "temperature", "choices_method"]


def test_every_argument_arrives():
    given = {
        "max_tokens": 1,
        "min_tokens": 0,
        "n": 2,
        "stop": ["a"],
        "stop_token_ids": [3],
        "stop_regex": "b+",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": False,
        "seed": 7,
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 3,
        "return_text_in_logprobs": True,
    }
    gen = sgl.gen("x", **given, regex="[0-9]")
    expected = given | {"stop": ("a",), "stop_token_ids": (3,), "stop_regex": ("b+",), "regex": "[0-9]"}
    assert gen == Gen("x", SamplingArgs(**expected))
    without = {name: value for name, value in given.items() if name not in ("min_tokens", "repetition_penalty", "seed")}
    for make, dtype in ((sgl.gen_int, "int"), (sgl.gen_string, "str")):
        expected = SamplingArgs(
            **without | {"stop": ("a",), "stop_token_ids": (3,), "stop_regex": ("b+",)}, dtype=dtype
        )
        assert make("x", **without) == Gen("x", expected)


def test_f10_gen_with_choices_refuses_what_it_cannot_honour():
    assert sgl.gen("x", choices=["a", "b"], temperature=0.2) == Select("x", ("a", "b"), "token_trie", 0.2)
    for extra in ({"max_tokens": 3}, {"stop": "a"}, {"regex": "a"}, {"return_logprob": True}, {"dtype": int}):
        with pytest.raises(RequestError, match=next(iter(extra))):
            sgl.gen("x", choices=["a", "b"], **extra)
    with pytest.raises(RequestError, match="choices_method goes with choices"):
        sgl.gen("x", choices_method="token_trie")


def test_f11_gen_string_can_write_punctuation():
    pattern = DTYPE_PATTERNS["str"]
    assert pattern == sgl.REGEX_STR
    for text in ("", "a, b; c! (d) - e?", 'say "hi"', "back\\slash", "Ärger 東京 🙂", "tab\t"):
        assert re.fullmatch(pattern, json.dumps(text)) and re.fullmatch(pattern, json.dumps(text, ensure_ascii=False))
    for text in ('"open', '"a"b"', '"new\nline"', '"bad\\x"'):
        assert not re.fullmatch(pattern, text)


def test_the_patterns_of_the_other_types():
    for pattern, right, wrong in (
        (sgl.REGEX_INT, ["0", "-12", "+3 ", "4\n"], ["", "1.5", "a"]),
        (sgl.REGEX_FLOAT, ["1", "-1.5", ".5", "2.0\n"], ["", "1.", "e5"]),
        (sgl.REGEX_BOOL, ["True", "False"], ["true", "1"]),
    ):
        assert all(re.fullmatch(pattern, text) for text in right)
        assert not any(re.fullmatch(pattern, text) for text in wrong)


def test_f12_an_answer_has_one_form():
    for dtype in (int, float, bool, str, "int", "float", "bool", "str"):
        name = dtype if isinstance(dtype, str) else dtype.__name__
        assert sgl.gen("x", dtype=dtype).args.dtype == name
    forms = {"dtype": int, "regex": "a", "json_schema": "{}", "ebnf": "root ::= [a]"}
    for first in forms:
        for second in forms:
            if first != second:
                with pytest.raises(RequestError, match="an answer has one form"):
                    sgl.gen("x", **{first: forms[first], second: forms[second]})
    with pytest.raises(RequestError, match="dtype must be"):
        sgl.gen("x", dtype=list)
    assert json.loads(sgl.gen("x", json_schema={"type": "object"}).args.json_schema) == {"type": "object"}


def test_f14_the_callers_stop_list_is_left_alone():
    stop = ["a", "b"]
    gen = sgl.gen("x", stop=stop)
    stop.append("c")
    assert gen.args.stop == ("a", "b") and stop == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": "8"}, "max_tokens must be a whole number, but got '8'"),
        ({"n": True}, "n must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"stop": 3}, "stop must be a text or a list"),
        ({"stop": ["a", 3]}, "stop must be a text or a list"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
        ({"regex": 3}, "regex must be text"),
        ({"name": 3}, "the name of a variable must be text"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_where_they_are_given(given, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        sgl.gen(**given)


def test_numbers_of_numpy_are_numbers():
    args = sgl.gen(
        "x", max_tokens=np.int64(8), temperature=np.float32(0.5), top_p=np.float64(0.5), stop_token_ids=[np.int32(3)]
    ).args
    assert args == SamplingArgs(max_tokens=8, temperature=0.5, top_p=0.5, stop_token_ids=(3,))
    assert [type(value) for value in (args.max_tokens, args.temperature, args.top_p)] == [int, float, float]
    assert type(args.stop_token_ids[0]) is int
    chosen = sgl.select("x", ["a"], temperature=np.float32(0.5), seed=np.int64(4))
    assert (chosen.temperature, chosen.seed, type(chosen.seed)) == (0.5, 4, int)
    assert type(sgl.video(b"\0\0\0\x1cftypmp42", np.int64(2)).num_frames) is int
    for wrong in ({"max_tokens": np.float32(8)}, {"max_tokens": 8.0}, {"temperature": np.bool_(True)}, {"n": 1j}):
        with pytest.raises(RequestError, match="must be a"):
            sgl.gen("x", **wrong)


def test_the_patterns_are_where_published_programs_look():
    assert tuple(DTYPE_PATTERNS.values()) == (ir.REGEX_INT, ir.REGEX_FLOAT, ir.REGEX_BOOL, ir.REGEX_STR)
    assert ir.REGEX_INT is patterns.REGEX_INT is sgl.REGEX_INT


def test_select_checks_its_choices():
    assert sgl.select("x", ["a"]) == Select("x", ("a",), "token_trie")
    for wrong in (None, [], "ab", ["a", 1]):
        with pytest.raises(RequestError, match="choices must be a list of texts"):
            sgl.select("x", wrong)
    for method in ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"):
        assert sgl.select("x", ["a"], choices_method=getattr(sgl, method)).method == method
        assert sgl.select("x", ["a"], choices_method=method).method == method
    assert sgl.select("x", ["a"], choices_method=sgl.token_trie).method == "token_trie"
    with pytest.raises(RequestError):
        sgl.select("x", ["a"], choices_method="best")


def test_turns():
    assert sgl.user("a" + sgl.gen("x")).items == (RoleBegin("user"), Text("a"), sgl.gen("x"), RoleEnd("user"))
    assert sgl.system().items == (RoleBegin("system"), RoleEnd("system"))
    for role in ("system", "user", "assistant"):
        assert getattr(sgl, f"{role}_begin")() == RoleBegin(role)
        assert getattr(sgl, f"{role}_end")() == RoleEnd(role)
        assert getattr(sgl, role)("t").items == (RoleBegin(role), Text("t"), RoleEnd(role))


def test_separate_reasoning_knows_its_models():
    expr = sgl.separate_reasoning(sgl.gen("x"), model_type="deepseek-r1")
    assert expr == SeparateReasoning(ExprList((sgl.gen("x"),)), "deepseek-r1")
    with pytest.raises(RequestError, match=r"model_type must be one of .*qwen3"):
        sgl.separate_reasoning(sgl.gen("x"), "nobody")


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a..", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
        (b"BM......", "image/bmp"),
        (b"II*\x00....", "image/tiff"),
        (b"\0\0\0\x1cftypavif", "image/avif"),
    ],
)
def test_f8_a_pictures_type_is_what_its_bytes_say(data, media_type, tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(data)
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    for source in (data, str(path), path, url):
        assert sgl.image(source) == Image(data, media_type)


def test_a_picture_of_pil_becomes_a_png():
    from PIL import Image as PilImage

    picture = sgl.image(PilImage.new("RGB", (2, 3)))
    assert picture.media_type == "image/png" and picture.data.startswith(PNG)


def test_pictures_and_videos_that_are_none_are_refused(tmp_path):
    for wrong, message in (
        (b"", "empty"),
        (b"hello world", "PNG, JPEG"),
        ("http://example.com/a.png", "fetch it first"),
        ("data:image/png;base64,!!", "not base64"),
        ("data:image/png", "no comma"),
        (3, "but got int"),
    ):
        with pytest.raises(RequestError, match=message):
            sgl.image(wrong)
    with pytest.raises(FileNotFoundError):
        sgl.image(str(tmp_path / "none.png"))
    for frames in (0, True, 1.5):
        with pytest.raises(RequestError, match="num_frames"):
            sgl.video(b"\0\0\0\x18ftypmp42", frames)
    assert sgl.video(b"\0\0\0\x18ftypmp42", 4).media_type == "video/mp4"
    assert sgl.video(b"\x1a\x45\xdf\xa3....webm", 4).media_type == "video/webm"
    with pytest.raises(RequestError, match="video knows"):
        sgl.video(PNG, 4)
    with pytest.raises(RequestError, match="at least one frame"):
        sgl.video([], 4)
    with pytest.raises(RequestError, match="PNG, JPEG"):
        sgl.video([PNG, b"\0\0\0\x18ftypmp42"], 4)


def test_the_frames_of_a_video_may_be_pictures(tmp_path):
    path = tmp_path / "frame.png"
    path.write_bytes(PNG)
    video = sgl.video([PNG, str(path), path], 2)
    assert (video.data, video.num_frames, video.media_type) == ((PNG,) * 3, 2, "video/jpeg")


def test_a_traced_picture_stays_an_argument():
    assert sgl.image(Symbol("p")) == MediaOf(Symbol("p"))
    assert sgl.video(Symbol("p"), 4) == MediaOf(Symbol("p"), 4)


def test_every_public_name_is_there_and_the_core_is_light():
    names = """function gen gen_int gen_string select system user assistant system_begin system_end user_begin user_end
    assistant_begin assistant_end image video separate_reasoning set_default_backend flush_cache get_server_info Runtime
    Engine RuntimeEndpoint OpenAI Anthropic REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR token_length_normalized
    greedy_token_selection unconditional_likelihood_normalized token_trie""".split()
    assert set(names) <= set(dir(sgl))
    code = (
        "import sys, jsg\n"
        "for name in 'function gen select user image set_default_backend REGEX_INT'.split(): getattr(jsg, name)\n"
        "print([m for m in ('jax', 'numpy', 'httpx', 'openai', 'anthropic', 'rich', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_an_argument_under_its_other_name_is_an_error_that_names_the_right_one():
    @sgl.function
    def program(s, q):
        s += q + sgl.gen("x")

    for wrong, right in (
        (lambda: sgl.gen("x", max_new_tokens=4), "gen has no argument max_new_tokens; here it is called max_tokens"),
        (lambda: sgl.gen_int("x", max_output_tokens=4), "gen_int has no argument .*; here it is called max_tokens"),
        (lambda: sgl.gen("x", stop_sequences=["a"]), "here it is called stop$"),
        (lambda: sgl.gen("x", colour="red"), "gen has no argument colour; it takes name, max_tokens, .*, seed$"),
        (lambda: sgl.select("x", ["a"], max_tokens=4), "select has no argument max_tokens; it takes name, choices, "),
    ):
        with pytest.raises(RequestError, match=right):
            wrong()
    compiled = program.compile()
    runs = [program.run, compiled.run, lambda q, **others: program.run_batch([[q]], **others)]
    runs.append(lambda q, **others: compiled.run_batch([[q]], **others))
    for run in runs:
        with pytest.raises(ProgramError, match=r"max_tokens.*; here it is called max_new_tokens"):
            run("q", max_tokens=4, backend=ScriptedBackend())
        with pytest.raises(ProgramError, match=r"regex.*; give regex to the gens of the program"):
            run("q", regex="a", backend=ScriptedBackend())


def test_a_number_out_of_range_is_named_as_it_was_written():
    @sgl.function
    def program(s):
        s += sgl.gen("x")

    for name, write in (
        ("max_tokens", lambda value: sgl.gen("x", max_tokens=value)),
        ("seed", lambda value: sgl.select("x", ["a"], seed=value)),
        ("max_new_tokens", lambda value: program.run(max_new_tokens=value, backend=ScriptedBackend())),
    ):
        for wrong in (-(2**63) - 1, "many"):
            with pytest.raises(RequestError, match=f"^{name} must be ") as caught:
                write(wrong)
            assert caught.value.param == name


def test_a_model_of_pydantic_is_no_schema_but_has_one():
    class Person:
        @classmethod
        def model_json_schema(cls):
            return {"type": "object"}

    with pytest.raises(
        RequestError, match=r"a dict \(write json_schema=Person\.model_json_schema\(\)\), but got <class"
    ):
        sgl.gen("x", json_schema=Person)
    with pytest.raises(RequestError, match="json_schema must be text or a dict, but got 3"):
        sgl.gen("x", json_schema=3)
