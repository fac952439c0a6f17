"""JSON that is read strictly: what is plain is read as `json` reads it, and the rest is refused at its place."""

import contextlib
import itertools
import json
import math
import signal
import time
from typing import Annotated, Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from jsg.errors import RequestError
from jsg.server.http.body import MAX_ITEMS, Body, Checked, Prompts, TokenIds
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import MAX_DEPTH, MAX_PARTS, MAX_TEXTS, _num_parts, _validate, parse_json
from jsg.server.http.validation import describe_invalid
from jsg.server.native.generate import GenerateBody

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


def nested(depth: int) -> bytes:
    """An object with this number of nested lists."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_json(raw)
    return caught.value


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.dictionaries(texts, plain), st.booleans())
def test_plain_json_is_read_as_json_reads_it(value, is_ascii):
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse_json(raw) == json.loads(raw)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.dictionaries(texts, plain), texts, st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999"]))
def test_a_number_that_is_not_finite_is_found_anywhere(value, name, number):
    raw = json.dumps({**value, name: {"deep": [1, "@"]}}).replace('"@"]}}', f"{number}]}}}}")
    hypothesis.assume(number in raw)
    error = refusal(raw.encode())
    assert f"deep[1] must be a finite number, but got {number}" in str(error)
    assert error.param == name


def test_a_name_given_twice_is_named():
    error = refusal(b'{"x": [{"a": 1}, {"a": 1, "b": 2, "a": 1}]}')
    assert str(error) == "x[1].a must be given once in its object, but got it twice; correct it"
    assert error.param == "x"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (rb'{"a": ["b\udc00"]}', "a"),
        (rb'{"a": {"\ud800": 1}}', "a"),
    ],
)
def test_text_that_is_none_is_refused_at_its_place(raw, param):
    assert refusal(raw).param == param


def test_nesting_has_a_limit():
    assert parse_json(nested(MAX_DEPTH))
    assert "at most 64 levels of lists and objects" in str(refusal(nested(MAX_DEPTH + 1)))
    assert "at most 64 levels of lists and objects" in str(refusal(nested(60_000)))


def test_parts_have_a_limit_and_are_not_counted_in_texts():
    assert parse_json(json.dumps({"a": [[]] * (MAX_PARTS - 3)}).encode())
    assert f"at most {MAX_PARTS} lists, objects and names" in str(refusal(json.dumps({"a": [[]] * MAX_PARTS}).encode()))
    code = '{"key": ["\\"[[[" + \'{\\\\\'], x: {}} ' * MAX_PARTS
    assert parse_json(json.dumps({"text": code}).encode()) == {"text": code}


def test_texts_have_a_limit_and_quotes_in_texts_are_none():
    assert parse_json(json.dumps({"a": [""] * (MAX_TEXTS - 1)}).encode())
    assert f"at most {MAX_TEXTS} texts" in str(refusal(json.dumps({"a": [""] * MAX_TEXTS}).encode()))
    quoted = '"' * 3 * MAX_TEXTS
    assert parse_json(json.dumps({"text": quoted}).encode()) == {"text": quoted}


@hypothesis.settings(max_examples=30)  # each counts 32768 lists
@hypothesis.given(st.dictionaries(st.text('[]{}:\\"a', max_size=6), st.text('[]{}:\\"a', max_size=9)))
def test_parts_are_counted_exactly_where_there_are_many(texts):
    raw = json.dumps({"many": [[]] * MAX_PARTS, "few": texts}).encode()
    assert _num_parts(raw) == MAX_PARTS + 5 + len(texts)


class Inner(Body):
    count: int = Field(ge=1)


class Outer(Body):
    prompt: Prompts | None = None
    inner: Inner | None = None
    inners: Checked[Inner] | None = None
    kind: Annotated[str, Field(max_length=3)] | None = None
    number: float | None = None
    flag: bool | None = None
    must: int


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "must is required, but it is missing; add it"),
        ({"must": "1"}, "must is not valid: it must be an integer, but got '1'; correct it"),
        ({"must": True}, "must is not valid: it must be an integer, but got true; correct it"),
        ({"must": 1, "flag": 1}, "flag is not valid: it must be true or false, but got 1; correct it"),
        ({"must": 1, "number": math.inf}, "number is not valid: it must be a finite number, but got inf; correct it"),
        ({"must": 1, "number": "x"}, "number is not valid: it must be a number, but got 'x'; correct it"),
        ({"must": 1, "kind": "long"}, "kind is not valid: it must be text of at most 3 characters, but got 'long'"),
        ({"must": 1, "inner": {"count": 0}}, "inner is not valid: inner.count must be at least 1, but got 0"),
        ({"must": 1, "inner": 3}, "inner is not valid: it must be an object, but got 3"),
        ({"must": 1, "inners": [{"count": 1}, {"count": None}]}, "inners[1].count must be an integer, but got null"),
        ({"must": 1, "inners": [{"count": 1}, {}]}, "inners[1].count is required, but it is missing"),
        ({"must": 1, "prompt": 3}, "prompt is not valid: it must be a string or a list, but got 3"),
        ({"must": 1, "prompt": [1, "a"]}, "prompt is not valid: prompt[1] must be an integer, but got 'a'"),
        ({"must": 1, "prompt": ["a", 1]}, "prompt is not valid: prompt[1] must be a string, but got 1"),
        ({"must": 1, "prompt": [1, -1]}, "it must be made of integers in [0, 2^31), and not -1, but got [1, -1]"),
        ({"must": 1, "prompt": [[1], [2.5]]}, "prompt is not valid: prompt[1][0] must be an integer, but got 2.5"),
        ({"must": 1, "prompt": ["a"] * 2049}, "a list of at most 2048 items, but got a list of 2049 items"),
    ],
)
def test_what_pydantic_finds_is_told_in_our_words(data, said):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    message, field = describe_invalid(caught.value.errors(), data)
    assert said in message
    assert field == said.split()[0].split("[")[0] or field in data


def test_a_long_list_of_token_ids_is_checked_to_its_end():
    adapter: TypeAdapter[Any] = TypeAdapter(TokenIds)
    ids = [7] * 200_000
    assert adapter.validate_python(ids, strict=True) == ids
    assert len(ids) > MAX_ITEMS
    for wrong in (-1, 2**31):
        with pytest.raises(ValidationError, match=str(wrong)):
            adapter.validate_python([*ids, wrong], strict=True)


def filled(begin: str, unit: str, end: str) -> bytes:
    """4 MB of one kind. A unit may have its number in it."""
    count = (4 * 2**20 - len(begin) - len(end)) // len(unit)
    units = (unit % number for number in range(count * 2 // 3)) if "%d" in unit else (unit for _ in range(count))
    return (begin + "".join(units) + end).encode()


@pytest.mark.parametrize(
    ("begin", "unit", "end"),
    [
        pytest.param('{"input_ids": [', "1,", "1]}", id="ids"),
        pytest.param('{"text": "', r"\u00e9", '"}', marks=pytest.mark.slow, id="text"),
        pytest.param('{"text": [', '"",', '""]}', marks=pytest.mark.slow, id="texts"),
        pytest.param('{"sampling_params": [', "{},", "{}]}", id="objects"),
        pytest.param('{"input_ids": [', "1.5,", "1]}", marks=pytest.mark.slow, id="floats"),
        pytest.param("{", '"k%d":1,', '"k":1}', marks=pytest.mark.slow, id="names"),
    ],
)
def test_a_large_body_does_not_stop_the_others(begin: str, unit: str, end: str):
    """Parsing and checking 4 MB of each kind gives the event loop a turn every 50 ms."""
    raw, adapter = filled(begin, unit, end), TypeAdapter(GenerateBody)
    held = []
    while not held or min(held) >= 0.05:  # whoever shares this core's caches makes it slower
        held.append(longest_hold(raw, adapter))
        assert len(held) < 10, held


def longest_hold(raw: bytes, adapter: TypeAdapter[Any]) -> float:
    """Seconds of computing at most, in which no other thread could have had its turn.

    A timer that runs while this process computes asks for a turn; a signal is heeded where another thread would get
    one. So neither other processes nor when a thread is woken count.
    """
    turns = [time.thread_time()]
    before = signal.signal(signal.SIGPROF, lambda *_: turns.append(time.thread_time()))
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        with contextlib.suppress(RequestError):
            _validate(raw, adapter, len(raw), FieldRules())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        turns.append(time.thread_time())
        signal.signal(signal.SIGPROF, before)
    return max(after - turn for turn, after in itertools.pairwise(turns))
