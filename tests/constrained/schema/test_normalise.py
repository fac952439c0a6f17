"""Every keyword: what `normalise` makes of it takes exactly the valid values, and what it cannot do it refuses."""

import json
from decimal import Decimal

import pytest

from jsg.constrained.limits import Limits
from jsg.constrained.schema import formulas, nodes
from jsg.constrained.schema.normalise import normalise
from jsg.constrained.schema.shapes import ANY, NEVER, Array, Const, Number, Object, String
from jsg.errors import GrammarError
from tests.constrained.schema.shapes_oracle import is_valid, parse
from tests.constrained.work import work

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"

# (schema, valid values, invalid values), all as JSON
CASES = {
    "true": ("true", "1 null {}", ""),
    "type": ('{"type":"string"}', '"a"', "1 null true [] {}"),
    "types": ('{"type":["integer","null"]}', "1 1.0 null", '1.5 "a" true'),
    "enum": ('{"enum":[1,"a",[1],{"a":[]},true,null]}', '1 1.0 "a" [1] {"a":[]} true null', "0 false [1.5] {} []"),
    "const": ('{"const":{"a":[1,{"b":2}]}}', '{"a":[1.0,{"b":2}]}', '{"a":[1,{"b":3}]} {}'),
    "enum and type": ('{"type":"string","enum":["a",1,null]}', '"a"', "1 null"),
    "enum and range": ('{"enum":[1,5,9,"a"],"minimum":4,"maxLength":0}', "5 9", '1 "a"'),
    "enum and format": ('{"enum":["2020-02-29","2021-02-29"],"format":"date"}', '"2020-02-29"', '"2021-02-29"'),
    "range": ('{"minimum":-1,"exclusiveMaximum":2.5}', '-1 0 2.4 "a"', "-1.1 2.5 3"),
    "range of draft 4": (
        f'{{"$schema":"{DRAFT_4}","minimum":1,"exclusiveMinimum":true,"maximum":3,"exclusiveMaximum":false}}',
        "1.1 3",
        "1 3.1",
    ),
    "multipleOf": ('{"multipleOf":0.01}', "0.01 1 -2.5", "0.005"),
    "huge numbers": ('{"minimum":1e300,"maximum":1e308}', "1e305", "1 1e309"),
    "length": ('{"minLength":2,"maxLength":3}', '"ab" "a😀" 1', '"a" "abcd" "😀"'),
    "pattern": ('{"pattern":"^a.*z$","maxLength":3}', '"az" "abz"', '"a" "abcz"'),
    "prefixItems": (
        '{"prefixItems":[{"type":"string"}],"items":{"type":"integer"}}',
        '[] ["a"] ["a",1]',
        '[1] ["a","b"]',
    ),
    "items list": ('{"items":[{"type":"string"}],"additionalItems":false}', '[] ["a"]', '[1] ["a",1]'),
    "item counts": ('{"minItems":1,"maxItems":2}', "[1] [1,2] 1", "[] [1,2,3]"),
    "uniqueItems": ('{"uniqueItems":false,"items":{"uniqueItems":true,"maxItems":1}}', "[1,1] [[],[1]]", "[[1,2]]"),
    "properties": (
        '{"properties":{"a":{"type":"integer"}},"required":["a","b"]}',
        '{"a":1,"b":2} {"a":1,"b":2,"c":3} 1',
        '{"a":1} {"a":"x","b":1}',
    ),
    "additionalProperties": (
        '{"properties":{"a":{}},"patternProperties":{"^x":{"type":"integer"}},"additionalProperties":{"type":"string"}}',
        '{"a":1,"x1":2,"b":"c"}',
        '{"x1":"a"} {"b":1}',
    ),
    "declared name that a pattern matches": (
        '{"properties":{"xa":{"minimum":2}},"patternProperties":{"^x":{"type":"integer"}}}',
        '{"xa":2}',
        '{"xa":1} {"xa":"a"}',
    ),
    "patterns that overlap": (
        '{"patternProperties":{"^a":{"minimum":2},"b$":{"maximum":4},"^c":{"type":"null"}},"additionalProperties":false}',
        '{"ab":3,"a":9,"b":0,"c":null}',
        '{"ab":1} {"ab":5} {"x":1} {"c":1}',
    ),
    "additional of two schemas": (
        '{"allOf":[{"properties":{"a":{}},"additionalProperties":{"minimum":1}},'
        '{"properties":{"b":{}},"additionalProperties":{"maximum":3}}]}',
        '{"a":-9,"b":9,"c":2} {"a":3,"b":1}',
        '{"a":4} {"b":0} {"c":4} {"c":0}',
    ),
    "propertyNames": ('{"propertyNames":{"pattern":"^a","maxLength":2}}', '{"a":1,"ab":2}', '{"b":1} {"abc":1}'),
    "propertyNames of enum": ('{"propertyNames":{"enum":["a","b"]},"minProperties":1}', '{"a":1}', '{"c":1} {}'),
    "property counts": ('{"minProperties":1,"maxProperties":2}', '{"a":1} {"a":1,"b":1}', '{} {"a":1,"b":1,"c":1}'),
    "dependentRequired": (
        '{"dependentRequired":{"a":["b"],"b":["c"]}}',
        '{} {"c":1} {"a":1,"b":1,"c":1}',
        '{"a":1,"b":1}',
    ),
    "dependentSchemas": (
        '{"dependentSchemas":{"a":{"required":["b"],"properties":{"b":{"const":1}}}}}',
        '{} {"b":2} {"a":1,"b":1}',
        '{"a":1} {"a":1,"b":2}',
    ),
    "dependencies": (
        '{"dependencies":{"a":["b"],"c":{"maxProperties":1}}}',
        '{"a":1,"b":1} {"c":1}',
        '{"a":1} {"b":1,"c":1}',
    ),
    "anyOf": ('{"anyOf":[{"type":"string"},{"minimum":5}]}', '"a" 5 null', "4"),
    "allOf": ('{"allOf":[{"minimum":2},{"maximum":4},{"type":"integer"}]}', "2 4", '1 5 3.5 "a"'),
    "oneOf by type": ('{"oneOf":[{"type":"string"},{"type":"integer"}]}', '"a" 1', "1.5 null"),
    "oneOf by const": (
        '{"type":"object","oneOf":[{"properties":{"k":{"const":"a"},"v":{"type":"integer"}},"required":["k"]},'
        '{"properties":{"k":{"const":"b"},"v":{"type":"string"}},"required":["k"]}]}',
        '{"k":"a","v":1} {"k":"b","v":"x"}',
        '{"k":"a","v":"x"} {"k":"c"} {}',
    ),
    "oneOf that overlaps": ('{"oneOf":[{"minimum":2},{"maximum":4}]}', "1 5", '2 3 4 "a"'),
    "oneOf by required": (
        '{"type":"object","oneOf":[{"required":["a"]},{"required":["b"]}]}',
        '{"a":1} {"b":1}',
        '{} {"a":1,"b":1}',
    ),
    "oneOf of consts": ('{"oneOf":[{"const":1},{"const":2},{"enum":[2,3]}]}', "1 3", "2 4"),
    "oneOf of numbers": ('{"oneOf":[{"type":"integer"},{"type":"number"}]}', "1.5", '1 1.0 "a"'),
    "the same twice in oneOf": ('{"oneOf":[{"type":"string"},{"type":"string"},{"type":"null"}]}', "null", '"a"'),
    "not type": ('{"not":{"type":["string","integer"]}}', "1.5 null", '"a" 1'),
    "not enum": ('{"not":{"enum":["a",1,true,null]}}', '"b" 2 false []', '"a" 1 1.0 true null'),
    "not const of an array": ('{"not":{"const":[1,"a"]}}', '[1] [1,"b"] [2,"a"] [1,"a",2] {}', '[1,"a"]'),
    "not const of an object": ('{"not":{"const":{"a":1}}}', '{} {"a":2} {"a":1,"b":1} []', '{"a":1}'),
    "not required": ('{"not":{"required":["a"]}}', '{} {"b":1}', '{"a":1} 1'),
    "not required two": ('{"type":"object","not":{"required":["a","b"]}}', '{"a":1} {"b":1} {}', '{"a":1,"b":1}'),
    "not pattern": ('{"type":"string","not":{"pattern":"^a"}}', '"b" ""', '"a"'),
    "not anyOf": ('{"not":{"anyOf":[{"type":"string"},{"minimum":5}]}}', "4", '"a" 5 null'),
    "not properties": ('{"not":{"properties":{"a":{"type":"string"}}}}', '{"a":1}', '{} {"a":"x"} 1'),
    "not patternProperties": (
        '{"type":"object","properties":{"ab":{}},"not":{"patternProperties":{"^a":{"type":"string"}}}}',
        '{"ab":1} {"ac":1} {"ab":"x","ac":1}',
        '{} {"ab":"x"} {"b":1}',
    ),
    "not propertyNames": (
        '{"type":"object","not":{"propertyNames":{"maxLength":1}}}',
        '{"ab":1} {"a":1,"bc":1}',
        '{} {"a":1}',
    ),
    "not additionalProperties": (
        '{"type":"object","not":{"properties":{"a":{}},"additionalProperties":false}}',
        '{"b":1} {"a":1,"b":1}',
        '{} {"a":1}',
    ),
    "not items": ('{"type":"array","not":{"items":{"type":"string"}}}', '[1] ["a",1]', '[] ["a"]'),
    "not items after a prefix": (
        '{"prefixItems":[{"type":"string"},true],"minItems":1,"maxItems":3,"type":"array","not":{"items":{"const":"a"}}}',
        '["b"] ["a",1] ["a","a",2] ["b","a"]',
        '[] ["a"] ["a","a","a"] [1] ["a","a","a",1]',
    ),
    "not dependentRequired": (
        '{"type":"object","not":{"dependentRequired":{"a":["b"]},"dependentSchemas":{"c":{"maxProperties":1}}}}',
        '{"a":1} {"c":1,"d":1}',
        '{} {"a":1,"b":1} {"c":1} {"d":1}',
    ),
    "not oneOf": ('{"not":{"oneOf":[{"minimum":2},{"maximum":4}]}}', '3 "a"', "1 5"),
    "not not": ('{"not":{"not":{"type":"string"}}}', '"a"', "1"),
    "not multipleOf": ('{"type":"integer","not":{"multipleOf":3}}', "1 -2", "0 3 1.5"),
    "if then else": (
        '{"type":"object","properties":{"k":{"enum":["a","b"]}},"required":["k"],'
        '"if":{"properties":{"k":{"const":"a"}}},"then":{"required":["x"]},"else":{"required":["y"]}}',
        '{"k":"a","x":1} {"k":"b","y":1}',
        '{"k":"a","y":1} {"k":"b","x":1} {"k":"c"}',
    ),
    "if then": ('{"if":{"type":"string"},"then":{"minLength":2}}', '"ab" 1', '"a"'),
    "if else": ('{"if":{"type":"string"},"else":{"minimum":2}}', '"a" 2 null', "1"),
    "not if": ('{"not":{"if":{"type":"string"},"then":{"minLength":2},"else":{"type":"null"}}}', '"a" 1', '"ab" null'),
    "$ref with siblings": ('{"$ref":"#/$defs/a","minimum":2,"$defs":{"a":{"type":"integer"}}}', "2", "1 2.5"),
    "$ref with siblings, draft 7": (
        f'{{"$schema":"{DRAFT_7}","$ref":"#/definitions/a","minimum":2,"definitions":{{"a":{{"type":"integer"}}}}}}',
        "2 1",
        "2.5",
    ),
    "$ref escaped": ('{"$ref":"#/$defs/a~1b%25","$defs":{"a/b%":{"const":1}}}', "1", "2"),
    "$ref by $id": ('{"$id":"http://a.b/c","$ref":"d","$defs":{"x":{"$id":"d","const":1}}}', "1", "2"),
    "$anchor": ('{"$ref":"#x","$defs":{"a":{"$anchor":"x","const":1}}}', "1", "2"),
    "$dynamicRef": ('{"$dynamicRef":"#x","$defs":{"a":{"$dynamicAnchor":"x","const":1}}}', "1", "2"),
    "recursion": (
        '{"type":"object","properties":{"v":{"type":"integer"},"next":{"$ref":"#"}},"additionalProperties":false}',
        '{"v":1,"next":{"next":{}}}',
        '{"next":{"v":"a"}} {"next":1}',
    ),
    "recursion through oneOf": (
        '{"$ref":"#/$defs/e","$defs":{"e":{"oneOf":[{"type":"integer"},{"type":"array","items":{"$ref":"#/$defs/e"}}]}}}',
        "1 [1,[2,[]]]",
        '"a" [[""]]',
    ),
    "unevaluatedProperties": (
        '{"allOf":[{"properties":{"a":{}}}],"properties":{"b":{}},"unevaluatedProperties":false}',
        '{"a":1,"b":1}',
        '{"c":1}',
    ),
    "unevaluatedItems": ('{"prefixItems":[{}],"unevaluatedItems":{"type":"null"}}', "[1] [1,null]", "[1,2]"),
    "annotations": (
        '{"title":"a","default":1,"examples":[2],"$comment":"c","readOnly":true,"x-y":{"type":"z"}}',
        "1",
        "",
    ),
    "unknown format": ('{"type":"string","format":"colour"}', '"a"', "1"),
}


def values(text: str):
    """The JSON values in a row of them."""
    decoder = json.JSONDecoder(parse_float=Decimal)
    at = 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        at += 1


def test_takes_exactly_the_valid_values():
    for name in CASES:
        schema, valid, invalid = CASES[name]
        document = normalise(parse(schema))
        for value in values(valid):
            assert is_valid(document, value), (name, value)
        for value in values(invalid):
            assert not is_valid(document, value), (name, value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"$ref":"#"}', "# refers to itself"),
        ('{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}', "refers to itself"),
        ('{"anyOf":[{"$ref":"#"},{"type":"null"}]}', "# refers to itself"),
        ('{"properties":{"a":{"$ref":"http://a.b/c"}}}', r"\$ref 'http://a.b/c' at #/properties/a leads out"),
        ('{"$ref":"#/$defs/a"}', r"#/\$defs leads|there is no #/\$defs"),
        ('{"$ref":"#a"}', "no such anchor"),
        ('{"$ref":1}', r"\$ref at # must be a string"),
        ('{"items":5}', "#/items is a number"),
        ('{"properties":{"a":{"type":"text"}}}', "type at #/properties/a must be"),
        ('{"minLength":-1}', "minLength at # must be"),
        ('{"maximum":"5"}', "maximum at # must be a number"),
        ('{"maximum":1e999}', "maximum at # has more"),
        ('{"multipleOf":0}', "multipleOf at # must be above 0"),
        ('{"required":true}', "required at # must be"),
        ('{"anyOf":[]}', "anyOf at # must be"),
        ('{"pattern":"a(?!b)"}', "pattern at #: .*look-ahead"),
        ('{"patternProperties":{"a(?!b)":{}}}', "patternProperties at #: .*look-ahead"),
        ('{"type":"string","not":{"format":"uri-template"}}', "format at #/not stands under `not`"),
        ('{"extends":{"type":"null"}}', "extends at # is a keyword of draft 3"),
        ('{"items":{"divisibleBy":2}}', "divisibleBy at #/items is a keyword of draft 3"),
        (
            '{"anyOf":[{"properties":{"a":{}}}],"unevaluatedProperties":false}',
            "unevaluatedProperties at # .*anyOf at #",
        ),
        ('{"type":"array","allOf":[{"not":{"items":{"const":1}}},{"not":{"items":{"const":2}}}]}', "items at"),
        ('{"type":"string","minLength":3,"maxLength":2}', "no value is valid"),
        ('{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}', "no value is valid"),
        ('{"allOf":[{"type":"string","pattern":"^a"},{"pattern":"^b"}]}', "no value is valid"),
        ('{"enum":["\\ud800"]}', "enum at # has a lone surrogate"),
        ("false", "no value is valid"),
        ('"a"', "must be an object or a boolean, but # is a string"),
    ],
)
def test_refuses_by_name(schema, words):
    with pytest.raises(GrammarError, match=words):
        normalise(parse(schema))


@pytest.mark.parametrize(
    ("module", "limit", "value", "schema", "words"),
    [
        (
            formulas,
            "MAX_MEETINGS",
            3,
            {
                "allOf": [
                    {"anyOf": [{"minLength": 1}, {"maxLength": 9}]},
                    {"anyOf": [{"pattern": "a"}, {"pattern": "b"}]},
                ]
            },
            "anyOf, oneOf, allOf and not .* too many combinations",
        ),
        (
            nodes,
            "MAX_SETS",
            3,
            {"allOf": [{"properties": {"b": {"minimum": 1}}}, {"minimum": 2}]},
            "after allOf, anyOf and the like are worked out",
        ),
    ],
)
def test_what_is_too_much_to_work_out_has_a_pointer(monkeypatch, module, limit, value, schema, words):
    monkeypatch.setattr(module, limit, value)
    with pytest.raises(GrammarError, match=rf"{words}.* \(at #/properties/a\)"):
        normalise({"properties": {"a": schema}})


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
def test_a_pattern_that_is_too_much_to_work_out_has_a_pointer(keyword):
    schema = {
        "pattern": {"enum": ["ab"], "pattern": "a.{9}b"},
        "patternProperties": {"properties": {"ab": {}}, "patternProperties": {"a.{9}b": {}}},
    }[keyword]
    with pytest.raises(GrammarError, match=rf"{keyword} at #/properties/a: .* 5 states of the pattern"):
        normalise({"properties": {"a": schema}}, Limits(char_states=5))


def test_two_dynamic_anchors_are_refused():
    schema = '{"$dynamicRef":"#x","$defs":{"a":{"$dynamicAnchor":"x"},"b":{"$id":"http://b.c/d","$dynamicAnchor":"x","const":1}}}'
    with pytest.raises(GrammarError, match=r"\$dynamicRef '#x' at # may lead to"):
        normalise(parse(schema))


def test_what_is_not_used_is_not_refused():
    assert normalise(parse('{"$defs":{"a":{"$ref":"http://a.b/c"}},"type":"null"}')).root == "#"


def test_an_unknown_format_is_reported():
    document = normalise(parse('{"properties":{"a":{"format":"colour"},"b":{"contentEncoding":"base64"}}}'))
    assert document.annotations == (
        "format 'colour' at #/properties/a/format",
        "contentEncoding at #/properties/b/contentEncoding",
    )


def test_shapes_are_as_simple_as_they_can_be():
    document = normalise(
        parse('{"type":"object","properties":{"b":{"type":"string"},"a":{"const":1.0}},"required":["z"]}')
    )
    assert document.nodes["#"] == (
        Object(properties={"b": "#/properties/b", "a": "#/properties/a", "z": ANY}, required=frozenset("z")),
    )
    assert document.nodes["#/properties/b"] == (String(),)
    assert document.nodes["#/properties/a"] == (Const("1"),) and document.nodes[NEVER] == ()
    assert len(document.nodes[ANY]) == 6


def test_equal_nodes_are_one():
    document = normalise(parse('{"prefixItems":[{"minimum":1},{"allOf":[{"minimum":1.0}]},{"items":true}],"items":{}}'))
    (array,) = [shape for shape in document.nodes["#"] if isinstance(shape, Array)]
    assert array.prefix[0] == array.prefix[1] and array.prefix[2] == array.items == ANY


def test_alternatives_that_say_no_more_are_dropped():
    document = normalise(parse('{"anyOf":[{"type":"integer","minimum":3},{"type":"number"},{"enum":[1,2]}]}'))
    assert document.nodes[document.root] == (Number(),)


def test_patterns_of_names_are_disjoint():
    document = normalise(
        parse('{"type":"object","patternProperties":{"^a":{"minimum":1},"b$":{"maximum":2},"^c":{"const":1}}}')
    )
    (shape,) = document.nodes["#"]
    assert isinstance(shape, Object)
    assert {(cell.matches, cell.excludes) for cell in shape.patterns} == {
        (("^a", "b$"), ()),
        (("^a",), ("b$",)),
        (("b$",), ("^a", "^c")),
        (("b$", "^c"), ()),
        (("^c",), ("b$",)),
    }
    assert shape.additional_excludes == ("^a", "b$", "^c")


LARGE = {
    "enum": lambda n: {"enum": [f"value {i}" for i in range(n)]},
    "enum beside a length": lambda n: {"type": "string", "enum": [f"value {i}" for i in range(n)], "minLength": 3},
    "anyOf": lambda n: {"anyOf": [{"const": i} for i in range(n)]},
    "oneOf": lambda n: {"oneOf": [{"const": str(i)} for i in range(n)]},
    "properties": lambda n: {"properties": {f"name {i}": {"type": "string", "maxLength": i} for i in range(n)}},
    "$ref": lambda n: {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)} | {str(n): {}},
    },
    "minItems": lambda n: {"type": "array", "maxItems": 10**n, "minItems": 10**n},
    "maxLength": lambda n: {"maxLength": 10**n},
}


@pytest.mark.parametrize("name", LARGE)
def test_the_work_is_linear_in_the_size_of_a_schema(name):
    few, many = (10, 100) if name in ("minItems", "maxLength") else (80, 800)
    first, second = (work(lambda n=n: normalise(LARGE[name](n))) for n in (few, many))
    assert second < 12 * first


def test_alternatives_that_are_told_apart_are_compared_in_pairs_only():
    def schema(n):
        return {"oneOf": [{"properties": {"k": {"const": i}, "v": {"$ref": "#"}}, "required": ["k"]} for i in range(n)]}

    few, many = (work(lambda n=n: normalise(schema(n))) for n in (10, 40))
    assert many < 20 * few


def nested(depth: int, schema: dict, *path: str) -> dict:
    if path == ("else",):
        return nested(depth - 1, {"if": {"minLength": depth}, "else": schema}, *path) if depth else schema
    for _ in range(depth):
        for key in reversed(path):
            schema = [schema] if key == "0" else {key: schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(12)]},
        {"oneOf": [{"properties": {f"a{i}": {"type": "string"}, f"b{i}": {"type": "null"}}} for i in range(40)]},
        {"type": "object", "dependentSchemas": {f"a{i}": {"required": [f"b{i}"]} for i in range(40)}},
        {"type": "object", "patternProperties": {f"[{a}].*[{b}]": {"const": a + b} for a in "abcdef" for b in "ghijk"}},
        nested(150, {"type": "null"}, "not", "allOf", "0"),
        nested(120, {"type": "null"}, "else"),
        nested(400, {}, "properties", "a"),
    ],
)
def test_what_grows_too_large_is_refused_soon(schema):
    def refuse():
        with pytest.raises(GrammarError):
            normalise(schema)

    assert work(refuse) < 4_000_000
