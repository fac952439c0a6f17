"""Every supported keyword, from the text of a schema to the texts that its grammar accepts.

`test_normalise.CASES` has a schema for each keyword with values that are valid and values that are not. What a grammar
does not write although it is valid is listed here.
"""

import json
from collections.abc import Iterator

import pytest

from jsg.constrained.compiler import compile_tables
from jsg.constrained.schema.front import schema_grammar
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained.schema.emitted import accepts
from tests.constrained.schema.test_normalise import CASES

NOT_WRITTEN = {"1.0", "[1.0]", '{"a": [1.0, {"b": 2}]}', "1e+305"}
"""Spellings of integers with a point, and exponents from 300 on."""
REFUSED = {"contains": "prefixItems"}
"""Keywords that are not supported, and what the refusal names in their place."""

MORE = {
    "dependents that hold anyway": (
        '{"type":"object","required":["b"],"dependentRequired":{'
        + ",".join([f'"a{i}":["b"]' for i in range(6)] + [f'"c{i}":[]' for i in range(10)])
        + '},"additionalProperties":{"type":"null"}}',
        '{"b":null} {"a0":null,"b":null}',
        '{"a0":null} {}',
    ),
    "else without then": (
        '{"type":"object","if":{"properties":{"x":{"type":"string","format":"date"}},"required":["x"]},'
        '"else":{"required":["y"]},"properties":{"x":{"type":"string"},"y":{"type":"null"}},'
        '"additionalProperties":false}',
        '{"x":"2026-11-24"} {"y":null} {"x":"a","y":null}',
        '{"x":"a"} {}',
    ),
    "an if alone": ('{"type":"null","if":{"type":"string","format":"date"}}', "null", '"a" 1'),
    "recursion of two": (
        '{"$ref":"#/$defs/a","$defs":{"a":{"type":"object","properties":{"b":{"$ref":"#/$defs/b"}},'
        '"additionalProperties":false},"b":{"type":"array","items":{"$ref":"#/$defs/a"}}}}',
        '{} {"b":[]} {"b":[{},{"b":[{}]}]}',
        '{"b":{}} {"b":[[]]} []',
    ),
    "recursion with siblings": (
        '{"type":"object","properties":{"n":{"$ref":"#","maxProperties":1}},"additionalProperties":{"type":"null"}}',
        '{"n":{"n":{}},"a":null} {"n":{"a":null}}',
        '{"n":{"n":{},"a":null}} {"a":1}',
    ),
    "$anchor in a resource of its own": (
        '{"$id":"http://a.b/c","$ref":"d#x","$defs":{"r":{"$id":"d","$defs":{"s":{"$anchor":"x","type":"null"}}}}}',
        "null",
        "1 {}",
    ),
    "$recursiveRef": (
        '{"$schema":"https://json-schema.org/draft/2019-09/schema","type":"array","items":{"$recursiveRef":"#"}}',
        "[] [[],[[]]]",
        "[1] {}",
    ),
    "id of draft 4": (
        '{"$schema":"http://json-schema.org/draft-04/schema#","id":"http://a.b/c","$ref":"#/definitions/x",'
        '"definitions":{"x":{"type":"null"}}}',
        "null",
        "1",
    ),
    "dependentRequired of an unknown name": (
        '{"type":"object","properties":{"a":{}},"dependentRequired":{"x":["a"]}}',
        '{} {"a":1} {"a":1,"x":2} {"y":1}',
        '{"x":1}',
    ),
    "propertyNames beside patternProperties": (
        '{"type":"object","propertyNames":{"maxLength":2},"patternProperties":{"^a":{"type":"null"}},'
        '"additionalProperties":{"type":"boolean"}}',
        '{"a":null,"ab":null,"b":true}',
        '{"abc":null} {"a":true} {"b":null}',
    ),
    "propertyNames and required": (
        '{"type":"object","propertyNames":{"pattern":"^a"},"required":["ab"]}',
        '{"ab":1}',
        '{} {"a":1}',
    ),
    "if over an enum": (
        '{"type":"object","properties":{"k":{"enum":["a","b","c"]},"v":{}},"required":["k"],'
        '"if":{"properties":{"k":{"enum":["a","b"]}}},"then":{"required":["v"]}}',
        '{"k":"a","v":1} {"k":"c"} {"k":"c","v":1}',
        '{"k":"a"} {"k":"b"} {"v":1}',
    ),
    "if in allOf": (
        '{"type":"object","properties":{"k":{"enum":["a","b"]}},"required":["k"],"allOf":['
        '{"if":{"properties":{"k":{"const":"a"}}},"then":{"required":["x"]}},'
        '{"if":{"properties":{"k":{"const":"b"}}},"then":{"required":["y"]}}]}',
        '{"k":"a","x":1} {"k":"b","y":1} {"k":"b","x":1,"y":2}',
        '{"k":"a"} {"k":"b","x":1}',
    ),
    "allOf of objects": (
        '{"allOf":[{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]},'
        '{"properties":{"a":{"minimum":3},"b":{"type":"null"}},"required":["b"]}]}',
        '{"a":3,"b":null} {"b":null,"a":4,"c":1}',
        '{"a":2,"b":null} {"a":3} {"a":3,"b":1}',
    ),
    "oneOf that is told apart by a required name": (
        '{"oneOf":[{"type":"object","properties":{"a":{"type":"null"}},"required":["a"],"additionalProperties":false},'
        '{"type":"object","properties":{"b":{"type":"null"}},"required":["b"],"additionalProperties":false}]}',
        '{"a":null} {"b":null}',
        '{"a":null,"b":null} {}',
    ),
    "not required beside properties": (
        '{"type":"object","properties":{"a":{},"b":{}},"not":{"required":["a","b"]}}',
        '{} {"a":1} {"b":1} {"c":1,"a":1}',
        '{"a":1,"b":1}',
    ),
    "boolean schemas": (
        '{"type":"object","properties":{"a":true,"b":false},"additionalProperties":true}',
        '{} {"a":1} {"c":[]}',
        '{"b":1}',
    ),
    "minProperties": (
        '{"type":"object","minProperties":2,"maxProperties":3}',
        '{"a":1,"b":2} {"a":1,"b":2,"c":3}',
        '{} {"a":1}',
    ),
    "multipleOf of decimals": ('{"type":"number","multipleOf":0.25}', "0 0.25 -1.5 3", "0.1 0.3"),
    "format beside other types": ('{"format":"date"}', '"2024-02-29" 1 null', '"2023-02-29" "x"'),
}


def texts(row: str) -> Iterator[str]:
    """The JSON values in a row of them, as they are written by `json.dumps`."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(row):
        value, at = decoder.raw_decode(row, at)
        yield json.dumps(value)
        at += 1


def test_the_grammar_takes_exactly_the_valid_values():
    for name in [*CASES, *(f"more: {name}" for name in MORE)]:
        text, valid, invalid = MORE[name[6:]] if name.startswith("more: ") else CASES[name]
        schema = json.loads(text)
        for found in texts(valid):
            if found not in NOT_WRITTEN:
                assert accepts(schema, found, order="free"), (name, found)
        for found in texts(invalid):
            for order in ("declared", "free"):
                assert not accepts(schema, found, order=order), (name, found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"items":{"properties":{"a":{"$ref":"http://a.b/c.json#/d"}}}}',
            r"\$ref .* at #/items/properties/a leads out",
        ),
        ('{"$ref":"other.json"}', r"\$ref 'other.json' at # leads out"),
        ('{"$dynamicRef":"http://a.b/c#x"}', r"\$dynamicRef .* at # leads out"),
        ('{"items":{"items":{"uniqueItems":true}}}', "uniqueItems at #/items/items is supported if .* enum"),
        ('{"items":{"not":{"uniqueItems":true}}}', "uniqueItems at #/items/not stands under `not`"),
        ('{"items":{"uniqueItems":"yes","maxItems":1}}', "uniqueItems at #/items must be true or false"),
        ('{"properties":{"a/b":{"pattern":"x(?!y)"}}}', "pattern at #/properties/a~1b: .*look-ahead"),
        ('{"properties":{"a":{"not":{"format":"uri-template"}}}}', "format at #/properties/a/not stands under `not`"),
        (
            '{"type":"object","dependentRequired":{"a":["x"],"b":["x"],"c":["x"],"d":["x"],"e":["x"],"f":["x"]}}',
            "dependentRequired at # can be enforced for at most 5 optional names, but there are 6",
        ),
        (
            '{"type":"object","allOf":[{"dependentRequired":{"a":["x"],"b":["x"],"c":["x"]}},'
            '{"dependencies":{"d":["x"],"e":["x"],"f":["x"]}}]}',
            "dependen.* and dependen.* at # can be enforced for at most 5 optional names, but there are 6",
        ),
        ('{"properties":{"a":{"type":"number","multipleOf":1e-7}}}', None),
        ('{"properties":{"a":{"type":"integer","multipleOf":10007}}}', "multipleOf .* 10007 .*#/properties/a"),
        (
            '{"type":"object","allOf":[{"not":{"patternProperties":{"a":{"type":"null"}}}},{"minProperties":3}]}',
            r"minProperties is not supported beside .* \(in #\)",
        ),
        (
            f'{{"properties":{{"a":{{"type":"number","exclusiveMinimum":1{"0" * 310}}}}}}}',
            r"exclusiveMinimum, .* 1.00e\+310 leaves none; lower it .*#/properties/a",
        ),
        (
            f'{{"properties":{{"a":{{"type":"number","exclusiveMaximum":-1{"0" * 310}}}}}}}',
            r"exclusiveMaximum, .* -1.00e\+310 leaves none; raise it .*#/properties/a",
        ),
        (
            '{"properties":{"a":{"type":"string","pattern":"^[a-z]+( [a-z]+)*$","maxLength":100000}}}',
            r"states of the pattern.*\(in pattern at #/properties/a\)",
        ),
        (
            '{"properties":{"a":{"type":"string","anyOf":[{"pattern":"^[a-z]+( [a-z]+)*$","maxLength":100000},'
            '{"pattern":"^A"}]}}}',
            r"pattern at #/properties/a: .* states of the pattern.*\(in #/properties/a\)",
        ),
        (
            '{"properties":{"a":{"type":"string","format":"uri","minLength":200000}}}',
            r"states of the pattern.*\(in format at #/properties/a\)",
        ),
        (
            '{"properties":{"a":{"type":"object","patternProperties":{"^[a-z]+( [a-z]+)*$":{}},'
            '"propertyNames":{"maxLength":100000}}}}',
            r"patternProperties or propertyNames: .*states of the pattern.*\(in #/properties/a\)",
        ),
    ],
)
def test_what_is_refused_is_named(text: str, words: str | None) -> None:
    if words is None:
        assert schema_grammar(text)
        return
    with pytest.raises(GrammarError, match=words) as refusal:
        compile_tables(GrammarSpec("json_schema", text))
    assert refusal.value.param == "json_schema"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "# is false"),
        ({"not": {}}, r"# contradicts itself \(not\)"),
        ({"type": "string", "enum": [1]}, r"# contradicts itself \(type, enum\)"),
        ({"type": "string", "format": "date", "maxLength": 9}, r"# contradicts itself \(type, format, maxLength\)"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "string", "enum": [1]}, "minItems": 2}},
                "required": ["a"],
                "description": "no keyword of the contradiction",
            },
            r"#/properties/a/items contradicts itself \(type, enum\)",
        ),
        (
            {"type": "object", "required": ["a"], "additionalProperties": False},
            r"# contradicts itself \(type, required, additionalProperties\)",
        ),
    ],
)
def test_a_contradiction_is_named(schema: object, words: str) -> None:
    with pytest.raises(GrammarError, match=f"no value is valid for the schema: {words}; correct it") as refusal:
        compile_tables(GrammarSpec("json_schema", json.dumps(schema)))
    assert refusal.value.param == "json_schema"


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_not_supported_is_refused_where_it_matters(keyword: str) -> None:
    schema = {keyword: True}
    for text in (schema, {"not": schema}, {"anyOf": [schema, {"type": "null"}]}, {"const": [1], **schema}):
        with pytest.raises(
            GrammarError, match=rf"{keyword} at #\S* is not supported; leave it out, or .*{REFUSED[keyword]}"
        ):
            schema_grammar(json.dumps(text))
    assert accepts({"type": "object", **schema}, "{}")
    assert accepts({"const": [1], "type": "array", "if": {"type": "string"}, "then": schema}, "[1]")


def test_annotations_are_told() -> None:
    text = json.dumps(
        {
            "$schema": "http://example.com/mine",
            "title": "t",
            "default": 1,
            "properties": {"a": {"format": "colour", "readOnly": True}, "b": {"contentMediaType": "text/html"}},
            "$defs": {"unused": {"format": "shade"}},
        }
    )
    assert schema_grammar(text).annotations == (
        "$schema 'http://example.com/mine' is not known; read as draft 2020-12",
        "format 'colour' at #/properties/a/format",
        "contentMediaType at #/properties/b/contentMediaType",
    )
    assert schema_grammar('{"format": "date", "description": "d", "examples": [1], "$comment": "c"}').annotations == ()
