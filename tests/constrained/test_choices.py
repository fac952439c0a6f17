"""Choices: exactly the listed texts."""

import json

import pytest

from jsg.constrained.choices import choices_grammar
from jsg.constrained.limits import LIMITS
from jsg.errors import GrammarError
from tests.constrained.texts import accepts, can_begin, machine_of
from tests.constrained.work import work


def test_exactly_the_choices_match() -> None:
    choices = ["yes", "yesterday", "no", "né", "😀", "y", 'a"b', "no"]
    machine = machine_of(choices_grammar(json.dumps(choices)))
    for choice in choices:
        assert accepts(machine, choice)
        assert can_begin(machine, choice.encode()[:-1])
    for other in ["", "ye", "yesterdays", "No", "n", "noyes", "😁"]:
        assert not accepts(machine, other)


def test_as_many_choices_as_may_be() -> None:
    machine = machine_of(choices_grammar(_choices(LIMITS.choices)))
    assert accepts(machine, "1869f") and not accepts(machine, "186a0")


def test_the_work_is_linear_in_the_number_of_choices() -> None:
    few, many = (work(lambda count=count: machine_of(choices_grammar(_choices(count)))) for count in (500, 5_000))
    assert many < 15 * few


def _choices(count: int) -> str:
    return json.dumps([f"{i:x}" for i in range(count)], separators=(",", ":"))


def test_choices_longer_than_the_limit_on_text_are_refused() -> None:
    text = json.dumps([f"a much longer choice {i}" for i in range(LIMITS.choices)])
    with pytest.raises(GrammarError, match="bytes of text"):
        choices_grammar(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON"),
        ("[", "must be JSON, but at line 1 column 2"),
        ("[]", "must be a JSON list of one or more texts, none empty, but got an empty list"),
        ("{}", "but got an empty object"),
        ('"a"', "but got a text"),
        ("null", "but got null"),
        ('["a", 1]', "number 1 is a number"),
        ('["a", ""]', "number 1 is an empty text"),
        ('["a", ["b"]]', "number 1 is a list"),
        (r'["\ud800"]', "lone surrogate"),
        ("[NaN]", "no NaN"),
        ("[1e999]", "numbers below 1e308"),
        ('[{"a": 1, "a": 2}]', "'a' is there twice"),
        ("[" * 100_000, "levels of nesting"),
        (json.dumps(["x"] * (LIMITS.choices + 1)), "at most 100000 choices"),
        ("[" + "1" * 5000 + "]", "too many digits"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=r"choices|a grammar may have") as error:
        choices_grammar(text)
    assert message in str(error.value)
    assert error.value.param == "choices"
