"""What the router of fronts reads from a body."""

import json

from jsg.ray.prompt import PromptUnits, read_prompt


def prompt_of(**body) -> PromptUnits:
    return read_prompt(json.dumps(body).encode())


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_longer_conversation_begins_with_a_shorter_one_and_is_the_same_conversation():
    first = [said("system", "Be brief. " * 20), said("user", "What is the capital of France?")]
    short = prompt_of(messages=first)
    long = prompt_of(messages=[*first, said("assistant", "Paris."), said("user", "And of Spain?")])
    whole = len(short.units) - 1  # the last unit may be padded
    assert long.units[:whole] == short.units[:whole] and len(long.units) > len(short.units)
    assert long.conversation == short.conversation
    other = prompt_of(messages=[first[0], said("user", "Who are you?")])
    assert other.conversation != short.conversation


def test_token_ids_stay_what_they_are():
    assert prompt_of(prompt=[5, 6, 7]).units == (5, 6, 7)
    assert prompt_of(input_ids=[5, 6, 7]).units == (5, 6, 7)


def test_units_are_as_long_as_tokens():
    content = json.dumps({"prompt": "abcdefgh"}).encode()
    assert [len(read_prompt(content, size).units) for size in (1, 2, 3, 4)] == [8, 4, 3, 2]
    assert read_prompt(content, 2).units[0] == ord("a") + 256 * ord("b")


def test_salts_and_limits():
    prompt = prompt_of(prompt="a" * 100, cache_salt="mine", max_tokens=7)
    assert (prompt.namespace, prompt.max_new_tokens, len(prompt.units)) == ("mine", 7, 25)
    assert prompt_of(text="a", sampling_params={"max_new_tokens": 9}).max_new_tokens == 9
    assert prompt_of(text="a").max_new_tokens is None


def test_a_picture_is_as_short_as_its_digest():
    url = "data:image/png;base64," + "A" * 100_000
    part = {"type": "image_url", "image_url": {"url": url}}
    assert len(prompt_of(messages=[{"role": "user", "content": [part]}]).units) < 50


def test_a_body_that_a_replica_will_refuse_has_no_prompt():
    for content in (b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"model": "tiny"}'):
        assert read_prompt(content).units == ()
    assert prompt_of(messages=3, prompt=[None, {"a": 1}], max_tokens="x").max_new_tokens is None
