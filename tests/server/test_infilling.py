"""`suffix` of `/v1/completions`: an answer between two texts, in the form of each family of code models."""

from pathlib import Path

import pytest

from jsg.processing.infilling import Infilling
from jsg.processing.tokenizer import load_tokenizer
from tests.server.byte_tokenizer import SPECIAL_TOKENS, write_byte_tokenizer
from tests.server.scripted import END, ScriptedServer

FORMS = {
    "qwen": ("<|fim_prefix|>a<|fim_suffix|>é<|fim_middle|>", ["<|file_sep|>"]),
    "starcoder": ("<fim_prefix>a<fim_suffix>é<fim_middle>", ["<|endoftext|>"]),
    "santacoder": ("<fim-prefix>a<fim-suffix>é<fim-middle>", []),
    "codellama": ("▁<PRE>a▁<SUF>é▁<MID>", ["▁<EOT>"]),
    "deepseek": ("<｜fim▁begin｜>a<｜fim▁hole｜>é<｜fim▁end｜>", ["<｜end▁of▁sentence｜>"]),
    "seed": ("<[fim-suffix]>é<[fim-prefix]>a<[fim-middle]>", []),
    "codestral": ("[SUFFIX]é[PREFIX]a", ["[MIDDLE]"]),
}


def server_of(directory: Path, words: list[str]) -> ScriptedServer:
    write_byte_tokenizer(directory, None, [*SPECIAL_TOKENS, *words])
    scripted = ScriptedServer(directory)
    scripted.engine.answer = "mid"
    return scripted


@pytest.mark.parametrize("family", FORMS)
def test_each_family_gets_its_form(tmp_path, family):
    written, ends = FORMS[family]
    marks = [mark for mark in written.replace("é", "a").split("a") if mark]
    scripted = server_of(tmp_path, [*marks, *ends])
    made = scripted.openai().completions.create(
        model="fake", prompt="a", suffix="é", max_tokens=9, extra_body={"stop_token_ids": [5]}
    )
    assert made.choices[0].text == "mid"
    assert scripted.prompt == written
    ids = [scripted.tokenizer.token_id(mark) for mark in [*marks, *ends]]
    assert {*ids} == {token for token in scripted.request.input_ids if token >= 259} | {*ids[len(marks) :]}
    assert {*scripted.sampling.stop_token_ids} == {5, *ids}
    plain = scripted.http.post("/v1/completions", json={"prompt": "a", "suffix": ""}).json()
    assert (plain["choices"][0]["text"], scripted.prompt) == ("mid", "a")
    assert scripted.sampling.stop_token_ids == ()


def test_several_prompts_and_a_stream(tmp_path):
    scripted = server_of(tmp_path, ["[PREFIX]", "[SUFFIX]"])
    body = {"prompt": ["a", "b"], "suffix": "c", "n": 2}
    made = scripted.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in made["choices"]] == ["mid"] * 4
    prompts = {scripted.tokenizer.decode(r.input_ids, skip_special_tokens=False) for r in scripted.engine.requests}
    assert prompts == {"[SUFFIX]c[PREFIX]a", "[SUFFIX]c[PREFIX]b"}
    response = scripted.http.post("/v1/completions", json=body | {"stream": True})
    assert response.text.count('"finish_reason":"stop"') == 4


@pytest.mark.parametrize(
    "others",
    [{"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"prompt": "a", "echo": True}, {"prompt": ["a", "b"], "echo": True}],
)
def test_what_does_not_go_with_a_suffix(tmp_path, others):
    scripted = server_of(tmp_path, ["[PREFIX]", "[SUFFIX]"])
    response = scripted.http.post("/v1/completions", json={"suffix": "c", **others})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


def test_a_tokenizer_without_all_marks_has_no_form(tmp_path):
    write_byte_tokenizer(tmp_path, None, ["<fim_prefix>", "<fim_suffix>", "[PREFIX]", "<|fim_middle|>"])
    assert Infilling.of(load_tokenizer(tmp_path)) is None


def test_the_beginning_of_a_text_stands_before_all(tmp_path):
    write_byte_tokenizer(tmp_path, None, [*SPECIAL_TOKENS, "▁<PRE>", "▁<SUF>", "▁<MID>"])
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"add_bos_token": false', '"add_bos_token": true'))
    tokenizer = load_tokenizer(tmp_path)
    infilling = Infilling.of(tokenizer)
    assert infilling is not None
    ids = infilling.encode("a", "b", 100)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>▁<PRE>a▁<SUF>b▁<MID>"
    assert END not in infilling.end_ids
