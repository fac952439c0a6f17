"""Grammars that are written to be expensive, and the result of each: an answer, or a refusal with its reason.

`python -m tests.constrained.pathologies` works through all of them in one process and says how much memory that took.
"""

import functools
import json
import resource
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jsg.constrained.compiler import compile_tables
from jsg.constrained.grammar import CompiledGrammar
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from jsg.types import GrammarKind, GrammarSpec, PropertyOrder
from tests.constrained.vocabularies import bits, tekken, tekken_tokens
from tests.constrained.work import work

STEPS = 24
"""Tokens that are read of every grammar that compiles."""


class Pathology(NamedTuple):
    """One grammar.

    Attributes:
        kind, order: As a client would send it.
        content: The text that a client would send, or the value whose JSON that is.
        refusal: A part of the message with which it is refused; None: it is answered.
        is_long: It takes more than a third of a second.
        may_run_dry: Its text may be ended for want of steps, in which case it was answered up to there.
    """

    kind: GrammarKind
    content: Any
    refusal: str | None
    is_long: bool = False
    may_run_dry: bool = False
    order: PropertyOrder = "declared"

    def spec(self) -> GrammarSpec:
        """The specification to compile. Raises GrammarError if reading it is refused."""
        text = self.content if isinstance(self.content, str) else json.dumps(self.content)
        return GrammarSpec(self.kind, text, property_order=self.order)


class Cost(NamedTuple):
    """The cost of a grammar.

    Attributes:
        compile_work: To make its tables, as `work` counts; None where that was not counted.
        refusal: The message, where it was refused.
        num_steps: The most that a mask, a token or forced bytes took, as `Limits.mask_steps` counts.
        num_bytes: Of the machine, at last.
        ran_dry: The message, where the text was ended because it took too much.
    """

    compile_work: int | None
    refusal: str | None
    num_steps: int = 0
    num_bytes: int = 0
    ran_dry: str | None = None


def cost(pathology: Pathology, *, is_counted: bool = True, num_tokens: int = STEPS) -> Cost:
    """Compiles a grammar, and reads tokens that it allows with the real vocabulary.

    Without `is_counted` the work of compiling is not counted, which takes as long as compiling once more.
    """
    made: list[StaticTables | str] = []

    def compile_it() -> None:
        try:
            made.append(compile_tables(pathology.spec()))
        except GrammarError as error:
            made.append(str(error))

    compile_work = work(compile_it) if is_counted else compile_it()
    tables = made[0]
    if isinstance(tables, str):
        return Cost(compile_work, tables)
    grammar = CompiledGrammar(tables, tekken())
    num_steps, ran_dry = _read(grammar, num_tokens)
    num_bytes = grammar.num_bytes - tables.num_bytes
    return Cost(compile_work, None, num_steps, num_bytes, ran_dry)


def _read(grammar: CompiledGrammar, num_tokens: int) -> tuple[int, str | None]:
    """Steps that the dearest question took, and why it came to an end before so many tokens, if it did."""
    masker, vocabulary = grammar.new_masker(), grammar.vocabulary
    mask = np.zeros(vocabulary.num_words, np.uint32)
    steps = [0]

    def ask[T](question: Callable[[], T]) -> T:
        before = masker.num_steps
        try:
            return question()
        finally:
            steps.append(masker.num_steps - before)

    for number in range(num_tokens):
        try:
            is_limited = ask(lambda: masker.fill_mask(mask))
            ask(masker.forced_bytes)
            allowed = sorted(bits(mask) - set(vocabulary.eos_ids)) if is_limited else list(range(2_000, 120_000))
            if not allowed:
                break
            token = allowed[number * 7919 % len(allowed)]
            assert ask(functools.partial(masker.accept, token))
        except GrammarError as error:
            return max(steps), str(error)
    return max(steps), None


def _regex(text: str, refusal: str | None = None, *, is_long: bool = False, may_run_dry: bool = False) -> Pathology:
    return Pathology("regex", text, refusal, is_long, may_run_dry)


def _ebnf(text: str, refusal: str | None = None, *, is_long: bool = False, may_run_dry: bool = False) -> Pathology:
    return Pathology("ebnf", text, refusal, is_long, may_run_dry)


def _schema(schema: Any, refusal: str | None = None, *, is_long: bool = False, order: Any = "declared") -> Pathology:
    return Pathology("json_schema", schema, refusal, is_long, order=order)


def _choices(texts: list[str], refusal: str | None = None, *, is_long: bool = False) -> Pathology:
    return Pathology("choices", texts, refusal, is_long)


_NESTED = "nesting"
_STATES = "states of the pattern"
_SIGNS = "names, texts, classes and signs"
_ALTERNATIVES = "512 alternatives"
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}


def _names(count: int) -> dict[str, Any]:
    return {f"p{i}": _INTEGER for i in range(count)}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema, "additionalProperties": False}


def _references(count: int) -> dict[str, Any]:
    chain = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(count)}
    return {"$defs": chain | {f"r{count}": _INTEGER}, "$ref": "#/$defs/r0"}


def _tree(depth: int, leaf: Any, name: str = "x") -> Any:
    if depth == 0:
        return leaf(name)
    return {"anyOf": [_tree(depth - 1, leaf, name + "0"), _tree(depth - 1, leaf, name + "1")]}


def _shared(depth: int) -> dict[str, Any]:
    both = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": both | {f"n{depth}": _STRING}, "$ref": "#/$defs/n0"}


def _patterns(*patterns: str) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def _one_property(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: _STRING}, "required": [name]}


REGEXES = {
    "a subset construction of 2^20": _regex("(a|b)*a(a|b){20}"),
    "a window of 14": _regex(".*a.{14}"),
    "a window of 2 000": _regex(".*a.{2000}", "read in several ways"),
    "a million by two counts": _regex("(x{1000}){1000}"),
    "counts of what may be empty": _regex("((a?){200}){200}"),
    "counts in counts": _regex("((((a{9}){9}){9}){9}){9}"),
    "optional counts in counts": _regex("(((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}"),
    "stars of stars": _regex("((a*)*)*b"),
    "counted alternatives": _regex("(a|aa|aaa){1000}"),
    "a count of a thousand million": _regex("a{1000000000}"),
    "3 000 that may be left out": _regex("a?" * 3000 + "a" * 3000, is_long=True),
    "10 000 words that may be left out": _regex("".join(f"(w{i})?" for i in range(10_000)), is_long=True),
    "3 000 stars": _regex("a*" * 3000),
    "60 000 parentheses": _regex("(" * 60_000 + "a" + ")" * 60_000, _NESTED),
    "60 000 that nobody closes": _regex("(" * 60_000, _NESTED),
    "150 groups, each repeated": _regex("(" * 150 + "a" + ")*" * 150),
    "60 000 brackets": _regex("[" * 60_000, "no end"),
    "200 000 characters": _regex("a" * 200_000, is_long=True),
    "a megabyte": _regex("abcdefgh" * (1 << 17), "positions", is_long=True),
    "30 000 alternatives": _regex("|".join(f"w{i}" for i in range(30_000)), is_long=True),
    "100 000 alternatives": _regex("|".join(f"w{i}" for i in range(100_000)), "alternatives", is_long=True),
    "100 000 dots": _regex("." * 100_000, "parts", is_long=True),
    "20 000 letters": _regex(r"\p{L}" * 20_000, "intervals"),
    "a window of 3 000 dots": _regex(".*a" + "." * 3_000, is_long=True, may_run_dry=True),
    "counts that overlap": _regex("(?:[a-z]{1,40}[a-m ]{1,40}){1,40}", is_long=True, may_run_dry=True),
    "counts of counts that overlap": _regex("(?:(?:[a-z]{1,90} ?){1,90}[a-m ]?){1,90}", "read in several ways"),
    "a sum of powers": _regex("(x+x+)+y"),
    "words in any number of ways": _regex("(?:[a-z]+ ?[a-m]*)*[0-9]"),
    "3 000 letters that one of two may be": _regex("(?:a|[a-z]b)*" + "[a-z]" * 3_000, is_long=True, may_run_dry=True),
}
EBNF = {
    "a rule that is itself": _ebnf("root ::= root", "a way to end"),
    "rules that are each other": _ebnf('root ::= a\na ::= b "x"\nb ::= a "y"', "a way to end"),
    "mutual left recursion": _ebnf('root ::= a "x"\na ::= b | "q"\nb ::= root "y"'),
    "hidden left recursion": _ebnf('root ::= e root "x" | "y"\ne ::= "z"?'),
    "60 000 parentheses": _ebnf("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, _NESTED),
    "20 000 rules": _ebnf(
        "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(20_000)) + '\nr20000 ::= "c"', _SIGNS
    ),
    "5 000 rules that may be empty": _ebnf(
        "root ::= r0\n" + "\n".join(f'r{i} ::= ("a" r{i + 1})? r{i + 1}' for i in range(5_000)) + '\nr5000 ::= "c"?',
        is_long=True,
        may_run_dry=True,  # one token of many letters goes through thousands of rules at each
    ),
    "a million characters": _ebnf('root ::= "' + "a" * 1_000_000 + '"', "positions"),
    "100 000 that may be left out": _ebnf("root ::= " + '"a"? ' * 100_000, _SIGNS),
    "a sum in as many ways as it has terms": _ebnf('root ::= s\ns ::= "a" | "a" s | "a" s s'),
    "brackets without end": _ebnf('root ::= "[" root* "]"'),
    "letters in every order of rules": _ebnf(
        'root ::= s\ns ::= "a" s s | [a-z] s "b" | [^"\\\\] s | "x" | u\nu ::= [a-zA-Z]+ u "c" | "d"', may_run_dry=True
    ),
    "letters between letters": _ebnf(
        'root ::= s\ns ::= [a-z ] s s | [a-z] s "b" | [a-z A-Z] s [a-z] | "x" | "d"', is_long=True, may_run_dry=True
    ),
    "all but one letter, three times over": _ebnf(
        "root ::= s\ns ::= t s u | u s t | [^x]\nt ::= [^y] t | [^z]\nu ::= [^z] u | [^y]", may_run_dry=True
    ),
    "stacks that end in different ways": _ebnf(
        'root ::= s\ns ::= "(" s ")" | "(" s ")" "." | "(" s "]" | [a-z]+', may_run_dry=True
    ),
}
SCHEMAS = {
    "60 000 schemas in each other": _schema('{"items":' * 60_000 + "true" + "}" * 60_000, _NESTED),
    "190 schemas in each other": _schema('{"items":' * 190 + "true" + "}" * 190),
    "60 000 lists in an enum": _schema('{"enum":[' + "[" * 60_000 + "]" * 60_000 + "]}", _NESTED),
    "150 times not": _schema('{"not":' * 150 + '{"type":"string"}' + "}" * 150),
    "a reference to itself": _schema({"$ref": "#"}, "refers to itself"),
    "references to each other": _schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself"
    ),
    "20 000 references in a row": _schema(_references(20_000), is_long=True),
    "50 000 references in a row": _schema(_references(50_000), "bytes of text"),
    "maxItems": _schema({"type": "array", "maxItems": 10**9}),
    "minItems": _schema({"type": "array", "minItems": 10**9}),
    "maxLength": _schema({"type": "string", "maxLength": 10**18}),
    "minLength": _schema({"type": "string", "minLength": 10**18}),
    "minProperties": _schema({"type": "object", "minProperties": 10**9}, "told apart"),
    "100 000 texts": _schema({"enum": [f"v{i}" for i in range(100_000)]}, is_long=True),
    "100 000 integers": _schema({"enum": list(range(100_000))}, is_long=True),
    "100 001 integers": _schema({"enum": list(range(100_001))}, "100000"),
    "20 000 objects": _schema({"enum": [{"a": i, "b": [i]} for i in range(20_000)]}, "positions", is_long=True),
    "10 000 properties": _schema(_closed({"properties": _names(10_000)}), is_long=True),
    "10 000 counted properties": _schema(
        _closed({"properties": _names(10_000), "maxProperties": 5}), "times the number of properties", is_long=True
    ),
    "10 000 required properties": _schema(
        _closed({"properties": _names(10_000), "required": list(_names(10_000))}), is_long=True
    ),
    "60 properties in any order": _schema(
        _closed({"properties": _names(60), "required": list(_names(60))}), order="free"
    ),
    "10 000 properties in any order": _schema(_closed({"properties": _names(10_000)}), is_long=True, order="free"),
    "anyOf of 2^12 shared": _schema(_shared(12)),
    "anyOf of 2^12 values": _schema(_tree(12, lambda name: {"const": name}), is_long=True),
    "anyOf of 2^12 objects": _schema(_tree(12, _one_property), _ALTERNATIVES, is_long=True),
    "allOf of 2 000 lengths": _schema({"allOf": [{"type": "string", "minLength": i} for i in range(2_000)]}),
    "allOf of 20 alternatives": _schema(
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}, _ALTERNATIVES
    ),
    "allOf of 12 alternatives of patterns": _schema(
        {"type": "string", "allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(12)]},
        _ALTERNATIVES,
        is_long=True,
    ),
    "oneOf of 2 000 values": _schema({"oneOf": [{"const": i} for i in range(2_000)]}),
    "oneOf of 300 that overlap": _schema(
        {"oneOf": [{"type": "object", "properties": {f"k{i}": _INTEGER}} for i in range(300)]},
        "too many combinations",
        is_long=True,
    ),
    "a pattern with a long maxLength": _schema(
        {"type": "string", "pattern": "^[a-z]+( [a-z]+)*$", "maxLength": 100_000}, _STATES
    ),
    "windows that must all fit": _schema(_patterns("a.{14}b", "c.{13}d", "e.{12}f"), _STATES, is_long=True),
    "lengths that must all divide": _schema(_patterns(*(f"^(.{{{n}}})*$" for n in (7, 11, 13, 17, 19, 23))), _STATES),
    "a window that must not fit": _schema({"type": "string", "not": {"pattern": "a.{14}b"}}, _STATES),
    "a window": _schema({"type": "string", "pattern": "a.{14}b"}),
    "windows as names": _schema(
        {"type": "object", "patternProperties": {f"a.{{{i}}}b": {"minimum": i} for i in range(1, 15)}},
        "64 combinations",
        is_long=True,
    ),
    "multiples of 7919": _schema({"type": "integer", "multipleOf": 7919}, is_long=True),
    "multiples in a range": _schema(
        {"type": "integer", "multipleOf": 7919, "minimum": 5, "maximum": 10**30}, "states of the digits"
    ),
    "multiples of a large prime": _schema({"type": "integer", "multipleOf": 10**9 + 7}, "at most 10000"),
    "numbers of 4 000 digits": _schema(f'{{"type":"integer","minimum":-1{"0" * 4000}}}', "at most 400"),
    "a prefix of 5 000": _schema({"type": "array", "prefixItems": [{"const": i} for i in range(5_000)]}, is_long=True),
}
CHOICES = {
    "70 000 choices": _choices([f"v{i}" for i in range(70_000)], is_long=True),
    "100 001 choices": _choices([f"{i}" for i in range(100_001)], "100000 choices"),
    "25 000 with a long beginning": _choices([f"abcdefghijklmnopqrstuvwxyz{i}" for i in range(25_000)]),
}
ALL = {
    f"{kind}: {name}": pathology
    for kind, table in (("regex", REGEXES), ("EBNF", EBNF), ("schema", SCHEMAS), ("choices", CHOICES))
    for name, pathology in table.items()
}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    """The most that this program has held. `ru_maxrss` would begin with what its parent held when it started it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    """Prints for each its cost, and how much memory the process has then, and had at most, above the beginning.

    The work is counted of all grammars, or with the argument "quick" of those that are not long.
    """
    is_quick = sys.argv[1:] == ["quick"]
    tekken_tokens()
    cost(_regex("[a-z]+"))
    cost(_schema({"type": "object"}))
    begin = _resident_bytes()
    for name, pathology in ALL.items():
        found = cost(pathology, is_counted=not (is_quick and pathology.is_long))
        memory = {"now_bytes": _resident_bytes() - begin, "peak_bytes": _peak_bytes() - begin}
        line = {"name": name, **found._asdict(), **memory}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
