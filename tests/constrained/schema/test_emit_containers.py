"""Arrays and objects as grammars."""

import itertools
import json
import random

import jsonschema
import pytest

from jsg.constrained.build.builder import build
from jsg.constrained.schema.front import schema_grammar
from jsg.errors import GrammarError
from tests.constrained import texts
from tests.constrained.schema.emitted import accepts, machine, verdicts, walks


def arrays(values: list[object], longest: int) -> list[str]:
    rows = itertools.chain.from_iterable(itertools.product(values, repeat=n) for n in range(longest + 1))
    return [json.dumps(row) for row in rows]


class TestArrays:
    @pytest.mark.parametrize(("least", "most"), [(0, None), (0, 0), (1, None), (2, 3), (0, 2), (3, 3)])
    def test_counts(self, least: int, most: int | None) -> None:
        schema = {"type": "array", "items": {"type": "null"}, "minItems": least}
        schema |= {} if most is None else {"maxItems": most}
        for count in range(6):
            expected = count >= least and (most is None or count <= most)
            assert accepts(schema, json.dumps([None] * count)) == expected

    def test_counts_far_away(self) -> None:
        schema = {"type": "array", "items": {"const": 1}, "minItems": 300, "maxItems": 400}
        for count, expected in ((299, False), (300, True), (400, True), (401, False)):
            assert accepts(schema, json.dumps([1] * count)) == expected

    @pytest.mark.parametrize("least", range(5))
    @pytest.mark.parametrize("most", [1, 2, 4, None])
    @pytest.mark.parametrize("rest", [True, False, {"type": "null"}])
    def test_prefix(self, least: int, most: int | None, rest: object) -> None:
        schema = {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": rest, "minItems": least}
        schema |= {} if most is None else {"maxItems": most}
        if (most is not None and most < least) or (rest is False and least > 2):
            with pytest.raises(GrammarError):
                machine(schema)
            return
        for text in arrays([1, True, None], 4):
            row = json.loads(text)
            expected = len(row) >= least and (most is None or len(row) <= most)
            expected = expected and all(type(a) is type(b) for a, b in zip(row, [1, True]))  # noqa: B905
            extra = row[2:]
            expected = expected and (not extra or rest is True or (rest is not False and all(x is None for x in extra)))
            assert accepts(schema, text) == expected, text

    @pytest.mark.parametrize("counts", [{}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 3, "maxItems": 3}])
    @pytest.mark.parametrize("prefix", [{}, {"prefixItems": [{"const": "x"}]}, {"prefixItems": [True, True]}])
    def test_some_item_is_no_string(self, counts: dict[str, int], prefix: dict[str, list[object]]) -> None:
        schema = {"type": "array", "not": {"items": {"type": "string"}}, **counts, **prefix}
        for text in arrays([1, "x"], 4):
            assert accepts(schema, text) == jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text

    def test_some_item_that_overlaps_the_others(self) -> None:
        schema = {"type": "array", "items": {"type": "string"}, "not": {"items": {"not": {"pattern": "^a"}}}}
        assert verdicts(schema, ['["b", "ab", "c"]', '["a"]', '["b"]', "[]", '["a", 1]']) == [
            '["b", "ab", "c"]',
            '["a"]',
        ]

    @pytest.mark.parametrize(
        "schema",
        [
            {"items": {"enum": [1, 1.0, "a", None, [1], {"a": 1, "b": 2}]}},
            {"items": {"enum": ["a", "b"]}, "minItems": 2},
            {"items": {"type": "boolean"}},
            {"items": {"type": ["null", "integer"], "minimum": 0, "maximum": 3}, "maxItems": 3},
            {"items": {"anyOf": [{"enum": [1, 2]}, {"type": "integer", "minimum": 0, "maximum": 2}]}},
            {"items": {"$ref": "#/$defs/e"}, "$defs": {"e": {"enum": ["a", "b", 1]}}, "minItems": 1},
            {"items": {"enum": [*range(100)]}, "maxItems": 2},
            {"items": {"enum": [*range(100)]}, "minItems": 2, "maxItems": 2},
            {"prefixItems": [{"type": "string"}, {"enum": [1, 2]}], "items": {"enum": [None, True, [1]]}},
            {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
            {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "maxItems": 2},
            {"allOf": [{"items": {"enum": ["a", 1, 2]}}, {"items": {"enum": [1, "a", "x"]}}]},
            {"enum": [[1, 1], [1, 2], [{"a": 1}, {"a": 1}], []]},
        ],
    )
    def test_unique_items(self, schema: dict[str, object]) -> None:
        schema = {"type": "array", "uniqueItems": True, **schema}
        validator = jsonschema.Draft202012Validator(schema)
        values = [1, 2, "a", "b", None, True, [1], {"b": 2, "a": 1}]
        taken = verdicts(schema, arrays(values, 3), order="free")
        assert taken == [text for text in arrays(values, 3) if validator.is_valid(json.loads(text))] and taken
        for text in walks(machine(schema, "flexible"), 20):
            assert validator.is_valid(json.loads(text)), text

    @pytest.mark.parametrize(
        "schema",
        [
            {},
            {"items": {"type": "string"}, "maxItems": 2},
            {"items": {"enum": [*range(65)]}},
            {"items": {"enum": [*range(129)]}, "maxItems": 2},
            {"items": {"type": "integer", "minimum": 0}},
            {"prefixItems": [{"enum": [1, 2]}, {"enum": [2, 3]}], "items": False},
            {"prefixItems": [{"type": "string"}], "items": {"enum": ["a"]}},
            {"items": {"enum": [1, 2]}, "not": {"items": {"const": 1}}},
        ],
    )
    def test_items_that_may_be_equal_are_refused(self, schema: dict[str, object]) -> None:
        with pytest.raises(GrammarError, match=r"uniqueItems at #/items .* values .* set maxItems to 1"):
            machine({"type": "array", "items": {"type": "array", "uniqueItems": True, **schema}})

    def test_more_unique_items_than_there_are_values(self) -> None:
        with pytest.raises(GrammarError, match="no value is valid"):
            machine({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3})

    def test_empty_array_with_white_space(self) -> None:
        assert verdicts({"type": "array"}, ["[]", "[ ]", "[\n]", "[  ]"], whitespace="flexible") == [
            "[]",
            "[ ]",
            "[\n]",
        ]


def objects(names: str, longest: int) -> list[str]:
    rows = itertools.chain.from_iterable(itertools.permutations(names, n) for n in range(longest + 1))
    return [json.dumps(dict.fromkeys(row, 1)) for row in rows]


NAMES = "abcx"


def in_order(names: list[str], declared: str) -> bool:
    places = [declared.index(name) if name in declared else len(declared) for name in names]
    return places == sorted(places)


class TestMembers:
    """Every order of every subset of four names, against what the schema says of them."""

    @pytest.mark.parametrize("order", ["declared", "free"])
    @pytest.mark.parametrize("additional", [True, False])
    @pytest.mark.parametrize("required", ["", "a", "b", "ac", "bx"])
    @pytest.mark.parametrize("counts", [(0, None), (1, None), (2, 3), (0, 1), (3, None), (0, 3)])
    def test_required_and_counts(
        self, order: str, additional: bool, required: str, counts: tuple[int, int | None]
    ) -> None:
        least, most = counts
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in "abc"},
            "required": list(required),
            "additionalProperties": additional,
            "minProperties": least,
        } | ({} if most is None else {"maxProperties": most})
        declared = "abc" + ("x" if "x" in required else "")
        takes = [text for text in objects(NAMES, 4) if self.is_valid(text, required, additional, least, most)]
        if not takes:
            with pytest.raises(GrammarError):
                machine(schema, order=order)
            return
        for text in objects(NAMES, 4):
            names = list(json.loads(text))
            if additional and least <= len(required) + 1:  # behind the last required name the order is free
                names = names[: 1 + max([names.index(name) for name in required if name in names], default=-1)]
            expected = text in takes and (order == "free" or in_order(names, declared))
            assert accepts(schema, text, order=order) == expected, text

    @staticmethod
    def is_valid(text: str, required: str, additional: bool, least: int, most: int | None) -> bool:
        names = set(json.loads(text))
        is_known = additional or names <= set("abc")
        return set(required) <= names and is_known and least <= len(names) <= (4 if most is None else most)

    @pytest.mark.parametrize("order", ["declared", "free"])
    def test_a_declared_name_stands_once(self, order: str) -> None:
        schema = {"type": "object", "properties": {"a": {}, "b": {}}}
        for text in ('{"a": 1, "a": 2}', '{"a": 1, "b": 2, "a": 1}', r'{"a": 1, "\u0061": 1}', r'{"\u0061": 1}'):
            assert not accepts(schema, text, order=order), text
        assert accepts(schema, '{"a": 1, "b": 2, "ab": 3, "": 4}', order=order)

    @pytest.mark.parametrize("seed", range(12))
    def test_names_that_begin_alike(self, seed: int) -> None:
        choice = random.Random(seed)
        names = choice.sample(["a", "ab", "abc", "b", "ba", "é", "\\"], 4)
        required = choice.sample(names, choice.choice([0, 0, 1, 2]))
        bounds = [{}, {"minProperties": 2}, {"maxProperties": 2}, {"minProperties": 1, "maxProperties": 3}]
        counts = choice.choice(bounds)
        properties = {name: {"type": "integer"} for name in names}
        closed = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        schema = {**closed, **counts}
        validator = jsonschema.Draft202012Validator(schema)
        rows = itertools.chain.from_iterable(itertools.permutations(names, n) for n in range(5))
        written = [(json.dumps(dict.fromkeys(row, 1), ensure_ascii=False), list(row)) for row in rows]
        expected = [text for text, row in written if row == sorted(row, key=names.index)]
        expected = [text for text in expected if validator.is_valid(json.loads(text))]
        assert verdicts(schema, [text for text, _ in written]) == expected

    def test_more_names_than_an_order_can_be_free_for(self) -> None:
        names = [f"n{i}" for i in range(70)]
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names[:2]}
        value = dict.fromkeys(reversed(names))
        assert accepts(schema, json.dumps(value), order="free")
        assert not accepts(schema, json.dumps(dict.fromkeys(names[1:])), order="free")
        assert not accepts(schema, json.dumps({**value, "n5": 1}), order="free")
        with pytest.raises(GrammarError, match="property_order"):
            machine({**schema, "required": names}, order="free")

    @pytest.mark.parametrize("order", ["declared", "free"])
    def test_dependents(self, order: str) -> None:
        schema = {
            "type": "object",
            "properties": {name: {} for name in "abc"},
            "dependentRequired": {"a": ["b"], "b": ["c"], "c": ["x"]},
            "additionalProperties": False,
            "patternProperties": {"^x$": {}},
        }
        wanted = {"a": "b", "b": "c", "c": "x"}
        for text in objects(NAMES, 4):
            names = list(json.loads(text))
            expected = all(wanted[name] in names for name in names if name in wanted)
            # x is declared by the schema's dependents only; it comes after the others.
            expected = expected and (order == "free" or in_order(names, "abcx"))
            assert accepts(schema, text, order=order) == expected, text

    @pytest.mark.parametrize("others", [{"additionalProperties": True}, {"patternProperties": {"e": {}}}])
    def test_a_name_that_was_left_out_may_come_later(self, others: dict[str, object]) -> None:
        schema = {"type": "object", "properties": {name: {} for name in ("age", "name", "nick")}, **others}
        for required in ([], ["age"], ["name"], ["nick"], ["age", "nick"]):
            automaton = machine(
                {**schema, "required": required, "additionalProperties": "additionalProperties" in others}
            )
            last = max(map(list(schema["properties"]).index, required), default=-1)
            for names in itertools.permutations(schema["properties"]):
                begin = names[: 1 + max(map(names.index, required), default=-1)]
                is_ordered = list(begin) == [name for name in list(schema["properties"])[: last + 1] if name in begin]
                text = json.dumps(dict.fromkeys(names, 1))
                assert texts.accepts(automaton, text) == is_ordered, (text, required)
                for twice in names:
                    assert not texts.accepts(automaton, f'{text[:-1]}, "{twice}": 2}}')

    def test_more_names_before_a_required_one_than_are_followed(self) -> None:
        names = [f"n{i}" for i in range(6)]
        schema = {"type": "object", "properties": {name: {} for name in names}, "required": names[-1:]}
        for name, may_be_late in zip(names, [True] * 4 + [False], strict=False):
            assert accepts(schema, json.dumps({"n5": 1, "x": 1, name: 1})) == may_be_late
            assert not accepts(schema, f'{{"{name}": 1, "n5": 1, "{name}": 1}}')
        counted = {**schema, "maxProperties": 3}
        assert verdicts(counted, ['{"n0": 1, "n5": 1, "x": 1}', '{"n0": 1, "n1": 1, "n2": 1, "n5": 1}']) == [
            '{"n0": 1, "n5": 1, "x": 1}'
        ]

    @pytest.mark.parametrize("order", ["declared", "free"])
    @pytest.mark.parametrize("names", [True, {"pattern": "^a"}, {"maxLength": 9}])
    def test_a_name_that_may_not_come_is_no_reason_to_escape(self, order: str, names: object) -> None:
        schema = {"type": "object", "properties": {"a/b": {}, "a": {}, "ab": False}, "required": ["a"]}
        automaton = machine({**schema, "propertyNames": names, "additionalProperties": {}}, order=order)
        for name in ("a", "ab"):
            config = automaton.advance(automaton.start(), b'{"a": 1, "' + name.encode())
            assert config is not None
            assert {ord("x"), ord("/"), ord("é".encode()[:1])} <= automaton.allowed_bytes(config)
            assert ord('"') not in automaton.allowed_bytes(config)
            for escape in (r"\"", r"\\", r"\n", r"\u0022", r"\u000a"):
                assert automaton.advance(config, escape.encode()) is None, escape
            for rest in (r'\u00e9": 1}', 'x": 1}', r'x\"": 1}'):
                assert automaton.advance(config, rest.encode()) is not None, rest

    def test_never_and_forbidden(self) -> None:
        schema = {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}}
        assert verdicts(schema, ["{}", '{"b": 1}', '{"a": 1}', '{"b": 1, "a": 1}', '{"c": 1}']) == [
            "{}",
            '{"b": 1}',
            '{"c": 1}',
        ]

    @pytest.mark.parametrize("order", ["declared", "free"])
    def test_many_closed_objects_of_which_one_must_be(self, order: str) -> None:
        closed = [{"properties": {name: {"type": "integer"}}, "additionalProperties": False} for name in "abcx"]
        closed.append({"properties": {"a": {"const": 1}, "c": {}}, "additionalProperties": False})
        for schema in ({"type": "object", "oneOf": closed}, {"type": "object", "not": {"anyOf": closed}}):
            validator = jsonschema.Draft202012Validator(schema)
            ordered = [text for text in objects(NAMES, 2) if in_order(list(json.loads(text)), NAMES)]
            written = [*ordered, '{"a": 2}', '{"c": null}', '{"a": 2, "c": 1}', '{"b": null}']
            valid = [text for text in written if validator.is_valid(json.loads(text))]
            if "not" in schema:
                with pytest.raises(GrammarError, match="requires more than 3 members without giving their names"):
                    machine(schema, order=order)
                continue
            assert verdicts(schema, written, order=order) == valid


class TestNames:
    @pytest.mark.parametrize("order", ["declared", "free"])
    def test_patterns(self, order: str) -> None:
        schema = {
            "type": "object",
            "properties": {"ab": {"type": "null"}},
            "patternProperties": {"^a": {"type": ["integer", "null"]}, "b$": {"type": ["string", "null"]}},
            "additionalProperties": {"type": "boolean"},
        }
        good = ['{"ab": null}', '{"a": 1}', '{"b": "x"}', '{"axb": null}', '{"c": true}', '{"": false}']
        bad = ['{"ab": 1}', '{"a": "x"}', '{"b": 1}', '{"axb": 1}', '{"axb": "x"}', '{"c": 1}', r'{"\u0061": "x"}']
        assert verdicts(schema, [*good, *bad], order=order) == good

    def test_names_that_are_limited(self) -> None:
        schema = {
            "type": "object",
            "propertyNames": {"maxLength": 2, "pattern": "^[a-c]"},
            "properties": {"ab": {"const": 1}},
        }
        values = ['{"ab": 1, "a": 2}', '{"ab": 2}', '{"abc": 1}', '{"x": 1}', '{"cx": [], "b": 1}', "{}"]
        assert verdicts(schema, values) == ['{"ab": 1, "a": 2}', '{"cx": [], "b": 1}', "{}"]

    def test_names_out_of_an_enum(self) -> None:
        schema = {"type": "object", "propertyNames": {"enum": ["a", "bé"]}, "additionalProperties": {"type": "null"}}
        values = ['{"a": null}', '{"bé": null}', r'{"b\u00e9": null}', '{"c": null}', '{"a": 1}']
        assert verdicts(schema, values) == values[:2]

    def test_many_names_are_excluded_without_much_ado(self) -> None:
        names = [f"property number {i}" for i in range(50)]
        grammar = schema_grammar(json.dumps({"type": "object", "properties": {name: {} for name in names}}), "compact")
        assert len(grammar.rules) < 10
        automaton = texts.machine_of(grammar)
        assert texts.accepts(automaton, '{"property number 3":1,"property number 30":2,"property number":0}')
        assert not texts.accepts(automaton, '{"property number 3":1,"property number 30":2,"property number 3":0}')


def tagged(**tags: object) -> dict[str, object]:
    """A union as pydantic emits it for models whose tags have a default, with a member of its own for each model."""
    return {
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {**tag, "default": name}, name: {"type": "integer"}},  # pyright: ignore[reportGeneralTypeIssues]
            }
            for name, tag in tags.items()
        },
        "discriminator": {"propertyName": "kind", "mapping": {name: f"#/$defs/{name}" for name in tags}},
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in tags],
    }


class TestDiscriminators:
    @pytest.mark.parametrize("order", ["declared", "free"])
    @pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
    def test_the_tag_decides(self, order: str, keyword: str) -> None:
        schema = tagged(cat={"const": "cat"}, dog={"enum": ["dog", "wolf", 1]}, bird={"const": "bird"})
        schema[keyword] = schema.pop("oneOf")
        good = ['{"kind": "cat"}', '{"kind": "wolf", "dog": 3}', '{"kind": 1}', '{"kind": "bird", "bird": 1, "x": 2}']
        bad = ["{}", '{"cat": 1}', '{"kind": "cow"}', '{"kind": "cat", "cat": "x"}']
        assert verdicts(schema, [*good, *bad], order=order) == good
        validator = jsonschema.Draft202012Validator(schema)
        for text in walks(machine(schema, order=order), 30):
            assert validator.is_valid(json.loads(text)), text

    def test_many_of_them(self) -> None:
        schema = tagged(**{f"k{i}": {"const": f"k{i}"} for i in range(30)})
        tables = build(schema_grammar(json.dumps(schema), additional_properties="closed"))
        assert tables.num_positions < 2_000
        assert accepts(schema, '{"kind": "k29", "k29": 3}')

    def test_one_inside_another(self) -> None:
        schema = tagged(a={"const": "a"}, b={"const": "b"})
        schema["oneOf"].append({**tagged(c={"const": "c"}, d={"const": "d"}), "$id": "http://a.b/inner"})  # pyright: ignore[reportAttributeAccessIssue]
        assert verdicts(schema, ['{"kind": "d", "d": 1}', '{"kind": "a"}', '{"d": 1}']) == [
            '{"kind": "d", "d": 1}',
            '{"kind": "a"}',
        ]

    @pytest.mark.parametrize("tag", [{"type": "string"}, {"const": "a"}, {"enum": ["a", "c"]}])
    def test_a_tag_that_does_not_decide_is_an_annotation(self, tag: object) -> None:
        schema = tagged(a={"const": "a"}, b=tag)
        validator = jsonschema.Draft202012Validator(schema)
        values = [{}, {"kind": "a"}, {"kind": "c"}, {"a": "x"}, {"b": "x"}, {"kind": "a", "a": "x"}]
        written = [json.dumps(value) for value in values]
        assert verdicts(schema, written) == [text for text in written if validator.is_valid(json.loads(text))]
