"""A grammar as a client writes it: its key, its bounds, and what may stand beside it."""

import dataclasses

import msgspec
import pytest

from jsg.constrained.limits import LIMITS
from jsg.errors import GrammarError, RequestError
from jsg.types import MAX_GRAMMAR_BYTES, GrammarSpec, SamplingParams

SCHEMA = GrammarSpec("json_schema", "{}", "compact")


def test_equal_grammars_have_one_key_and_others_another():
    same = [GrammarSpec("json_schema", "{}", "compact"), dataclasses.replace(SCHEMA)]
    others = [
        GrammarSpec("json_schema", "{}"),
        GrammarSpec("json_schema", "{ }", "compact"),
        GrammarSpec("json_schema", "{}", "compact", "free"),
        GrammarSpec("json_schema", "{}", "compact", additional_properties="open"),
        GrammarSpec("structural_tag", "{}", "compact"),
        dataclasses.replace(SCHEMA, text="true"),
    ]
    assert {grammar.key for grammar in same} == {SCHEMA.key} and same == [SCHEMA, SCHEMA]
    assert len({grammar.key for grammar in [SCHEMA, *others]}) == 7


def test_the_key_is_worked_out_once_and_is_right_behind_the_wire():
    assert SCHEMA.key is SCHEMA.key
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SCHEMA), type=GrammarSpec).key == SCHEMA.key
    forged = msgspec.to_builtins(SCHEMA) | {"key": "of another"}
    assert msgspec.convert(forged, GrammarSpec).key == SCHEMA.key


def test_a_request_may_name_its_grammar_by_the_key():
    sampling = SamplingParams(grammar=SCHEMA, return_constraint=True)
    named = dataclasses.replace(sampling, grammar=SCHEMA.key)
    assert sampling.grammar_key == named.grammar_key == SCHEMA.key
    assert SamplingParams().grammar_key is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(named), type=SamplingParams) == named


def test_a_text_above_the_limit_is_refused():
    assert LIMITS.text_bytes == MAX_GRAMMAR_BYTES
    assert GrammarSpec("regex", "a" * MAX_GRAMMAR_BYTES).key
    for text in ("a" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1)):
        with pytest.raises(GrammarError, match=r"at most 1048576 bytes of text, but this one has 104857[78]") as error:
            GrammarSpec("regex", text)
        assert error.value.param == "regex"


@pytest.mark.parametrize(
    "option", [{"whitespace": "flexible"}, {"property_order": "free"}, {"additional_properties": "open"}]
)
@pytest.mark.parametrize("kind", ["regex", "ebnf", "choices", "json_schema", "structural_tag"])
def test_options_stand_beside_json_only(kind, option: dict):
    (name,) = option
    if kind in ("json_schema", "structural_tag"):
        assert GrammarSpec(kind, "{}", **option) == SamplingParams.from_dict({kind: {}, **option}).grammar
        return
    for made in (lambda: GrammarSpec(kind, "[]", **option), lambda: SamplingParams.from_dict({kind: "[]", **option})):
        with pytest.raises(
            RequestError, match=f"{name} needs a json_schema or a structural_tag, but .* {kind}"
        ) as error:
            made()
        assert error.value.param == name


def test_an_option_that_says_the_default_is_refused_too():
    with pytest.raises(RequestError, match="whitespace needs a json_schema or a structural_tag"):
        SamplingParams.from_dict({"regex": "a", "whitespace": "fixed"})


@pytest.mark.parametrize("fields", [{"jump_forward": "off"}, {"return_constraint": True}])
def test_what_is_said_of_a_grammar_needs_one(fields: dict):
    (name,) = fields
    for made in (SamplingParams.from_dict, lambda fields: SamplingParams(**fields)):
        with pytest.raises(RequestError, match=f"{name} needs a grammar, but there is none; leave it out") as error:
            made(fields)
        assert error.value.param == name
        assert made(fields | {"grammar": SCHEMA}).grammar is SCHEMA
    assert SamplingParams.from_dict({"return_constraint": False, "jump_forward": None}) == SamplingParams()


@pytest.mark.parametrize("grammar", ["root", {"kind": "regex", "text": "a"}, 5, ["a"]])
def test_what_is_no_grammar_is_refused(grammar: object):
    with pytest.raises(RequestError, match=r"grammar must be a GrammarSpec, but got .*regex, json_schema") as error:
        SamplingParams.from_dict({"grammar": grammar})
    assert error.value.param == "grammar"
