"""Whole schemas as grammars: which texts are accepted, in which spellings, and which bytes are forced."""

import json

import pytest

from jsg.constrained import ir
from jsg.constrained.build.builder import build
from jsg.constrained.compiler import compile_tables
from jsg.constrained.limits import LIMITS
from jsg.constrained.schema.front import schema_grammar
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained import texts
from tests.constrained.schema.emitted import accepts, forced, machine, verdicts
from tests.constrained.work import work

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "house": {"enum": ["Gryffindor", "Slytherin"]},
    },
    "required": ["name", "age", "house"],
    "additionalProperties": False,
}
HARRY = {"name": "Harry", "age": 15, "house": "Gryffindor"}


class TestWhitespace:
    @pytest.mark.parametrize(
        ("whitespace", "taken"), [("fixed", [True, False, False]), ("compact", [False, True, False])]
    )
    def test_one_spelling(self, whitespace: str, taken: list[bool]) -> None:
        spellings = [json.dumps(HARRY), json.dumps(HARRY, separators=(",", ":")), json.dumps(HARRY, indent=2)]
        assert [accepts(PERSON, text, whitespace) for text in spellings] == taken

    def test_flexible_takes_what_json_writes(self) -> None:
        value = {"a": [1, {"b": [{"c": []}]}], "d": {}, "e": [[]]}
        for text in (
            json.dumps(value),
            json.dumps(value, separators=(",", ":")),
            json.dumps({"a": [1, {"b": [2]}]}, indent=2),
            json.dumps({"a": [1]}, indent=4),
            json.dumps(value, indent="\t"),
            '{ "a": 1 }',
        ):
            assert accepts(True, text, "flexible"), text

    @pytest.mark.parametrize("text", ["{  }", '{"a":  1}', '{"a":\n\n1}', '{"a":\n' + " " * 9 + "1}", " {}", "{} "])
    def test_flexible_is_bounded(self, text: str) -> None:
        assert not accepts(True, text, "flexible")
        assert json.loads(text) is not None


class TestForced:
    """Forced text, which jump-forward needs."""

    def test_keys_and_separators(self) -> None:
        assert forced(PERSON, "") == '{"name": "' and forced(PERSON, '{"name": "x"') == ', "age": '
        assert forced(PERSON, '{"name": "x", "age": 1, ') == '"house": "'
        assert forced(PERSON, '{"name": "x", "age": 1, "house": "S') == 'lytherin"}'

    def test_constants(self) -> None:
        schema = {"const": {"a": [1, "x\n/", None], "b": {}}}
        assert forced(schema, "") == r'{"a": [1, "x\n/", null], "b": {}}'
        assert forced(schema, "", whitespace="compact") == r'{"a":[1,"x\n/",null],"b":{}}'


class TestConstants:
    def test_numbers_in_their_spellings(self) -> None:
        assert verdicts({"enum": [1, 0.00001, 1e22]}, ["1", "1.0", "0.00001", "1e-05", "1e+22", "10"]) == [
            "1",
            "0.00001",
            "1e-05",
            "1e+22",
        ]

    def test_strings_as_json_writes_them(self) -> None:
        schema = {"enum": ["é😀", 'q"\\', "\x01\x7f", "plain"]}
        for value in schema["enum"]:
            assert accepts(schema, json.dumps(value, ensure_ascii=False))
        assert not accepts(schema, r'"\u00e9\ud83d\ude00"') and not accepts(schema, r'"\u0070lain"')
        assert not accepts(schema, r'"\u00e9\ud83d"')

    def test_members_in_any_order_where_order_is_free(self) -> None:
        schema = {"const": {"a": 1, "b": 2}}
        assert verdicts(schema, ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', '{"a": 1}']) == ['{"a": 1, "b": 2}']
        assert len(verdicts(schema, ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', '{"a": 1}'], order="free")) == 2

    def test_one_spelling_of_what_is_known(self) -> None:
        schema = {"type": "object", "properties": {"größe": {"const": ["名", "\x7f/"]}}, "required": ["größe"]}
        assert forced(schema, "") == '{"größe": ["名", "\x7f/"]'
        assert forced({"enum": ['é"\\1', 'é"\\2']}, "") == r'"é\"\\'

    def test_mixed_types(self) -> None:
        schema = {"enum": [None, True, "x", [], {}, [1]]}
        values = ["null", "true", '"x"', "[]", "{}", "[1]", "false", "[1, 1]", "0"]
        assert verdicts(schema, values) == values[:6]


class TestGenericJson:
    @pytest.mark.parametrize("value", [{}, {"a": [None, True, -1.5e-3, "é"]}, {"": {"": [[], {}]}}])
    def test_objects(self, value: object) -> None:
        assert accepts({"type": "object"}, json.dumps(value))

    @pytest.mark.parametrize("text", ["[]", "1", '{"a": 01}', '{"a": .5}', "{'a': 1}", '{"a": 1,}', '{"a": "\n"}'])
    def test_nothing_else(self, text: str) -> None:
        assert not accepts({"type": "object"}, text)

    def test_true_is_any_value(self) -> None:
        assert verdicts(True, ["1", '"x"', "null", "[]", "{}", "nul"]) == ["1", '"x"', "null", "[]", "{}"]

    def test_no_lone_surrogates_and_no_invalid_utf8(self) -> None:
        automaton = machine(True)
        for text in (rb'"\ud800"', rb'"\udc00\ud800"', rb'"\ud800x"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'):
            assert not texts.accepts(automaton, text)
        for text in (r'"\ud83d\ude00"', r'"\uD7FF\uE000"', '"😀"', r'"\u0061\/\b"'):
            assert texts.accepts(automaton, text)


class TestAlternatives:
    def test_objects_told_apart_late(self) -> None:
        schema = {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "v": {"type": "integer"}},
                    "required": ["k", "v"],
                },
                {
                    "type": "object",
                    "properties": {"k": {"const": "b"}, "v": {"type": "string"}},
                    "required": ["k", "v"],
                },
            ]
        }
        values = ['{"k": "a", "v": 1}', '{"k": "b", "v": "x"}', '{"k": "a", "v": "x"}', '{"k": "b", "v": 1}']
        assert verdicts(schema, values) == values[:2]

    def test_alternatives_that_others_cover_are_no_ways_of_their_own(self) -> None:
        branch = [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": [f"r{i}"]} for i in range(150)
        ]
        schema = {"anyOf": [*branch, {"type": "object", "properties": {"a": {"type": "integer"}}}]}
        assert texts.most_heads(machine(schema, order="free"), '{"a": 1, "b": 2}') <= 3

    def test_recursion(self) -> None:
        schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
        assert verdicts(schema, ["{}", '{"next": {"next": {}}}', '{"next": 1}']) == ["{}", '{"next": {"next": {}}}']


class TestRefusals:
    @pytest.mark.parametrize(
        ("schema", "words"),
        [
            ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, ["uniqueItems", "/a"]),
            ({"type": "integer", "multipleOf": 123456789}, ["multipleOf", "123456789"]),
            (False, ["no value"]),
            (
                {"type": "object", "properties": {"a": {"pattern": "^(a{1,9}b){1,99}c*$", "maxLength": 900}}},
                ["pattern", "#/properties/a"],
            ),
        ],
    )
    def test_names_keyword_and_place(self, schema: object, words: list[str]) -> None:
        with pytest.raises(GrammarError) as refusal:
            compile_tables(GrammarSpec("json_schema", json.dumps(schema)))
        assert all(word in str(refusal.value) for word in words), str(refusal.value)
        assert refusal.value.param == "json_schema"

    @pytest.mark.parametrize("text", ['{"type": "string", "type": "null"}', "{", "NaN", "[" * 60_000])
    def test_what_is_no_json(self, text: str) -> None:
        with pytest.raises(GrammarError):
            schema_grammar(text)


class TestSize:
    def test_large_bounds_cost_nothing(self) -> None:
        small = build(schema_grammar('{"type": "array", "items": {"type": "string", "maxLength": 100}, "maxItems": 9}'))
        large = schema_grammar(
            '{"type": "array", "items": {"type": "string", "maxLength": 100000}, "maxItems": 1000000000}'
        )
        assert len(build(large).to_bytes()) <= len(small.to_bytes()) * 2

    def test_a_large_length_of_several_patterns_of_one_set_costs_nothing(self) -> None:
        def size(most: int) -> int:
            patterns = [{"pattern": "^[a-z]+$"}, {"pattern": "^[a-z0-9]+$"}]
            text = json.dumps({"type": "string", "allOf": patterns, "maxLength": most})
            return len(build(schema_grammar(text)).to_bytes())

        assert size(100_000) <= size(100) * 2

    def test_many_optional_properties_stay_nearly_linear(self) -> None:
        def size(count: int) -> int:
            properties = {f"p{i}": {"type": "boolean"} for i in range(count)}
            text = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
            return _positions(schema_grammar(text, "compact"))

        assert size(200) < 5 * 1.6 * size(40)

    def test_the_work_is_linear_in_the_length_of_an_enum(self) -> None:
        grammars: list[ir.Grammar] = []

        def make(count: int) -> None:
            values = [f"value {i} {i * 7919 % 1000}" for i in range(count)]
            grammars.append(schema_grammar(json.dumps({"enum": values}), limits=LIMITS))

        few, many = (work(lambda count=count: make(count)) for count in (300, 3_000))
        assert many < 12 * few
        assert isinstance(grammars[1].rules[grammars[1].start], ir.Words)


def _positions(grammar: ir.Grammar) -> int:
    def size(expr: ir.Expr) -> int:
        match expr:
            case ir.Literal(value):
                return len(value)
            case ir.Seq(parts) | ir.Alt(parts):
                return sum(map(size, parts))
            case ir.Words(words):
                return sum(map(len, words))
            case _:
                return 1

    return sum(map(size, grammar.rules.values()))
