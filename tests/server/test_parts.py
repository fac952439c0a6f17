"""Prompts in parts, of `/generate`: what reaches the engine, and what a client needs to go on from the answer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.processing.parts import JoinedPart, OffsetPart, Part, TextPart, TokenPart
from tests.server.running import check_discreet, events_of
from tests.server.scripted import END, ScriptedServer

TURN = 256  # <|im_start|>


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


def generate(server: ScriptedServer, prompt: list, **body) -> dict:
    response = server.http.post("/generate", json={"prompt": prompt} | body)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(server: ScriptedServer, text: str) -> list[int]:
    return server.tokenizer.encode(text, add_special_tokens=False)


def test_parts_become_one_prompt(server: ScriptedServer):
    answer = generate(server, ["ab", [1, 2], "cd"])
    ab, cd = ids_of(server, "ab"), ids_of(server, "cd")
    assert list(server.request.input_ids) == [*ab, 1, 2, *cd]
    assert answer["meta_info"]["part_ids"] == [ab, cd] and answer["text"] == "hello"


def test_special_tokens_count_in_markup_only(server: ScriptedServer):
    answer = generate(server, [[1], "<|im_start|>", [2], {"markup": "<|im_start|>"}, [3], {"template": "<|im_end|>"}])
    plain = ids_of(server, "<")[0]
    assert TURN not in server.request.input_ids[1:-3]
    assert server.request.input_ids[1] == plain and list(server.request.input_ids[-4:]) == [2, TURN, 3, END]
    assert answer["meta_info"]["part_ids"][1:] == [[TURN], [END]]


def test_a_run_of_texts_is_one_text(server: ScriptedServer):
    answer = generate(server, ["a", {"markup": "b"}, "c", [5], "d"])
    assert answer["meta_info"]["part_ids"] == [ids_of(server, "abc"), [], [], ids_of(server, "d")]


def test_an_offset_at_the_end_is_of_what_the_model_writes(server: ScriptedServer):
    generate(server, ["a", {"offset": 4}])
    assert server.request.position_jumps == ((len(server.request.input_ids), 4),)


def test_offsets_and_branches(server: ScriptedServer):
    branches = [["a", [7]], [{"offset": 3}, "bc"], []]
    answer = generate(server, ["so", {"offset": 10}, "x", {"branches": branches}, "end"])
    request = server.request
    so, x, a, bc, end = (ids_of(server, text) for text in ("so", "x", "a", "bc", "end"))
    assert list(request.input_ids) == [*so, *x, *a, 7, *bc, *end]
    assert request.position_jumps == ((2, 10), (5, 3)) and request.joined == (3, 5, 7, 7)
    assert answer["meta_info"]["part_ids"] == [so, x, a, bc, end]
    assert answer["meta_info"]["prompt_tokens"] == len(request.input_ids)


def test_the_answer_is_there_as_tokens_and_what_a_stop_string_cut(server: ScriptedServer):
    answer = generate(server, ["ab"])
    assert answer["meta_info"]["kept_ids"] == ids_of(server, "hello")  # not the token that ended it
    assert answer["meta_info"]["tail"] == ""
    server.engine.answer = "hä llo"
    answer = generate(server, ["ab"], sampling_params={"stop": " "})
    assert answer["text"] == "hä" and answer["meta_info"]["kept_ids"] == ids_of(server, "hä")


def test_only_the_last_event_tells_them(server: ScriptedServer):
    with server.http.stream("POST", "/generate", json={"prompt": ["ab"], "stream": True}) as response:
        *first, last = events_of(response)
    assert first
    assert not any({"part_ids", "kept_ids", "tail"} & event["meta_info"].keys() for event in first)
    assert last["meta_info"]["part_ids"] == [ids_of(server, "ab")]
    assert last["meta_info"]["kept_ids"] == ids_of(server, "hello")


def test_of_several_answers_the_first_tells_the_prompt(server: ScriptedServer):
    first, second = generate(server, ["ab"], sampling_params={"n": 2})
    assert first["meta_info"]["part_ids"] == [ids_of(server, "ab")]
    assert "part_ids" not in second["meta_info"]
    assert first["meta_info"]["kept_ids"] == second["meta_info"]["kept_ids"] == ids_of(server, "hello")


def test_other_fields_are_as_for_a_text(server: ScriptedServer):
    body = {"rid": "mine", "cache_salt": "s", "priority": 3, "return_logprob": True, "logprob_start_len": 1}
    answer = generate(server, ["ab"], sampling_params={"max_new_tokens": 2}, **body)
    assert answer["meta_info"]["id"] == "mine"
    assert server.request.namespace != "" and server.request.priority == 3
    assert [entry[:2] for entry in answer["meta_info"]["input_token_logprobs"]] == [[-0.5, ids_of(server, "b")[0]]]
    assert server.sampling.max_new_tokens == 2


def test_a_text_tells_nothing_more_than_before(server: ScriptedServer):
    answer = server.http.post("/generate", json={"text": "ab"}).json()
    assert not {"part_ids", "kept_ids", "tail"} & answer["meta_info"].keys()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "at least one token"),
        ([""], "at least one token"),
        ([5], "prompt[0] must be a string or a list or an object"),
        ([[-1]], "prompt[0]"),
        ([[2**31]], "[0, 2^31)"),
        ([{}], "prompt[0] must have exactly one of markup"),
        (["a", {"markup": "a", "offset": 1}], "prompt[1] must have exactly one of"),
        ([{"text": "a"}], "unknown field 'text'"),
        ([{"offset": -1}], "prompt[0].offset"),
        ([{"branches": [["a"]]}, "b", {"branches": [["c"]]}, "d"], "at most one part with branches"),
        ([{"branches": [[{"branches": [["a"]]}]]}, "b"], "branches"),
        ([{"branches": []}, "b"], "at least one branch"),
        (["a", {"branches": [["b"]]}], "side by side must have a text behind"),
        ([{"branches": [["a", {"markup": "b", "offset": 1}]]}, "c"], "prompt[0].branches[0][1]"),
        ([{"image": "aGk=", "media_type": "image/png"}], "cannot see"),
        ([{"video": "aGk=", "media_type": "video/mp4", "num_frames": 2}], "cannot see"),
        ([{"branches": [[{"image": "aGk=", "media_type": "image/png"}]]}, "a"], "cannot see"),
        ([{"image": "no base64!", "media_type": "image/png"}], "base64"),
        ([{"image": "aGk="}], "media_type"),
        ([{"markup": "a", "media_type": "x"}], "media_type"),
        (["a"] * 2049, "2048"),
        (["a" * 9000], "8192"),
        ([[1] * 9000], "8192"),
    ],
)
def test_what_is_wrong_is_named(server: ScriptedServer, prompt: list, said: str):
    response = server.http.post("/generate", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    check_discreet(response.text)


@pytest.mark.parametrize("other", [{"text": "a"}, {"input_ids": [1]}])
def test_a_prompt_is_given_once(server: ScriptedServer, other: dict):
    response = server.http.post("/generate", json={"prompt": ["a"]} | other)
    assert response.status_code == 400 and "exactly one" in response.json()["error"]["message"]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
LEAF: st.SearchStrategy[Part] = st.one_of(
    st.builds(TextPart, TEXT),
    st.builds(TextPart, TEXT, st.just(True), st.booleans()),
    st.builds(TokenPart, st.lists(st.integers(0, 300), max_size=4).map(tuple)),
    st.builds(OffsetPart, st.integers(0, 50)),
)
PARTS = st.lists(
    st.one_of(LEAF, st.builds(JoinedPart, st.lists(st.lists(LEAF, max_size=3).map(tuple), max_size=3).map(tuple))),
    max_size=6,
)


@settings(max_examples=30)
@given(parts=PARTS)
def test_what_a_client_of_ours_sends_is_what_is_encoded(tokenizer_dir: Path, parts: list[Part]):
    """JSON and back loses nothing; and no combination of parts is a failure inside."""
    from pydantic import TypeAdapter

    from jsg.lang.http.parts import parts_to_json
    from jsg.server.native.parts import PromptParts, to_parts

    given = parts_to_json(parts)
    if sum(isinstance(part, JoinedPart) for part in parts) <= 1:
        assert to_parts(TypeAdapter(PromptParts).validate_python(given)) == tuple(parts)
    server = _shared(tokenizer_dir)
    response = server.http.post("/generate", json={"prompt": given, "sampling_params": {"max_new_tokens": 1}})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        ids = [token for part in response.json()["meta_info"]["part_ids"] for token in part]
        given_ids = sum(len(part.ids) for part in _flat(parts) if isinstance(part, TokenPart))
        assert len(ids) + given_ids == len(server.request.input_ids)


def _flat(parts: list[Part]) -> list[Part]:
    inner = [leaf for part in parts if isinstance(part, JoinedPart) for branch in part.branches for leaf in branch]
    return [part for part in parts if not isinstance(part, JoinedPart)] + inner


_SERVERS: dict[Path, ScriptedServer] = {}


def _shared(tokenizer_dir: Path) -> ScriptedServer:
    return _SERVERS.setdefault(tokenizer_dir, ScriptedServer(tokenizer_dir))


def test_the_template_for_clients_that_write_turns(server: ScriptedServer, plain_tokenizer_dir: Path):
    template = server.http.get("/get_chat_template").json()
    assert template == {
        "chat_template": server.tokenizer.chat_template,
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "placeholders": {},
        "keeps_files": False,
        "sends_increments": True,
    }
    assert ScriptedServer(plain_tokenizer_dir).http.get("/get_chat_template").json()["chat_template"] is None
