"""The five kinds of grammar, from their text to masks, and the refusals on the way."""

import logging
import subprocess
import sys

import numpy as np
import pytest

from jsg.constrained import choices
from jsg.constrained.compiler import compile_grammar, compile_tables
from jsg.constrained.grammar import CompiledGrammar
from jsg.constrained.ir import Call, Grammar
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import odd_vocabulary

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}'
)
TAGS = (
    '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], '
    '"triggers": ["<f"]}'
)


def is_match(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text, one byte a token, is complete."""
    masker, tokens = grammar.new_masker(), grammar.vocabulary.tokens
    ids = [tokens.index(bytes([byte]), 5) for byte in text.encode()]
    return all(masker.accept(token) for token in ids) and masker.is_complete()


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("regex", "[a-c]{2}é?"), ["ab", "cbé"], ["a", "abd", "abc"]),
        (GrammarSpec("json_schema", SCHEMA), ['{"a": 12, "b": true}'], ['{"a":12,"b":true}', '{"b": true, "a": 12}']),
        (GrammarSpec("json_schema", SCHEMA, "compact"), ['{"a":12,"b":true}'], ['{"a": 12, "b": true}']),
        (
            GrammarSpec("json_schema", SCHEMA, "flexible", "free"),
            ['{"a":12,"b":true}', '{"b": true, "a": 12}'],
            ['{"a":12}'],
        ),
        (GrammarSpec("ebnf", 'root ::= "(" root ")" | "x"'), ["x", "((x))"], ["(x", "()", ""]),
        (GrammarSpec("choices", '["yes", "no", "yesterday"]'), ["yes", "no", "yesterday"], ["yest", "n", "yesno"]),
        (GrammarSpec("structural_tag", TAGS), ["free text", "so <f>-12</f> it is"], ["<f>x</f>", "<f>1"]),
    ],
)
def test_each_kind_of_grammar_compiles_to_what_it_matches(spec: GrammarSpec, good: list[str], bad: list[str]):
    grammar = compile_grammar(spec, odd_vocabulary())
    assert [text for text in good if not is_match(grammar, text)] == []
    assert [text for text in bad if is_match(grammar, text)] == []


def test_tables_that_were_sent_make_the_same_masks():
    vocabulary = odd_vocabulary()
    static = compile_tables(GrammarSpec("regex", '"[a-d]{2,40}":? '))
    here, there = (
        CompiledGrammar(tables, vocabulary).new_masker()
        for tables in (static, StaticTables.from_bytes(static.to_bytes()))
    )
    out = np.zeros((2, vocabulary.num_words), np.uint32)
    for byte in b'"abcabcd": ':
        assert here.fill_mask(out[0]) and there.fill_mask(out[1])
        assert (out[0] == out[1]).all() and here.mask_key() == there.mask_key()
        token = vocabulary.tokens.index(bytes([byte]), 5)
        assert here.accept(token) and there.accept(token)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("regex", "(a"), None),
        (GrammarSpec("json_schema", '{"type": "strange"}'), None),
        (GrammarSpec("json_schema", "{"), None),
        (GrammarSpec("ebnf", "root ::= missing"), "missing"),
        (GrammarSpec("ebnf", "root ::= root"), "root"),
        (GrammarSpec("choices", "[]"), None),
        (GrammarSpec("structural_tag", "{}"), None),
    ],
)
def test_a_wrong_grammar_is_refused_and_names_its_field(spec: GrammarSpec, words: str | None):
    with pytest.raises(GrammarError, match=words) as error:
        compile_tables(spec)
    assert error.value.param is not None


def test_a_text_above_the_limit_is_refused():
    with pytest.raises(GrammarError, match="at most 10 bytes") as error:
        compile_tables(GrammarSpec("regex", "ééééé+"), Limits(text_bytes=10))
    assert error.value.param == "regex"


@pytest.mark.parametrize(("raised", "words"), [(RecursionError, "nest less"), (MemoryError, "simplify")])
def test_running_out_of_stack_or_memory_is_an_error_of_the_request(monkeypatch, raised: type[Exception], words: str):
    def fail(text: str, limits: Limits = LIMITS) -> Grammar:
        raise raised

    monkeypatch.setattr(choices, "choices_grammar", fail)
    with pytest.raises(GrammarError, match=words) as error:
        compile_tables(GrammarSpec("choices", '["a"]'))
    assert error.value.param == "choices"


FORGED = '{"format": "colour\\nforged"}'
FORGED_TAG = f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {FORGED}}}}}'


@pytest.mark.parametrize(("kind", "text"), [("json_schema", FORGED), ("structural_tag", FORGED_TAG)])
def test_what_is_not_enforced_is_logged_in_one_line(caplog, kind, text):
    with caplog.at_level(logging.DEBUG, logger="jsg.constrained.compiler"):
        compile_tables(GrammarSpec("json_schema", '{"format": "date"}'))
        assert caplog.messages == []
        compile_tables(GrammarSpec(kind, text))
    (message,) = caplog.messages
    assert message.startswith(f"{kind}: not enforced") and "at #/format" in message and "\n" not in message


def test_a_defect_of_a_front_end_is_not_hidden(monkeypatch):
    monkeypatch.setattr(choices, "choices_grammar", lambda text, limits: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compile_tables(GrammarSpec("choices", '["a"]'))


def test_an_error_of_the_builder_names_the_field(monkeypatch):
    monkeypatch.setattr(choices, "choices_grammar", lambda text, limits: Grammar("a", {"a": Call("a")}))
    with pytest.raises(GrammarError) as error:
        compile_tables(GrammarSpec("choices", '["a"]'))
    assert error.value.param == "choices"


def test_compiling_needs_neither_jax_nor_numba_nor_a_library_that_is_not_used():
    code = (
        "import sys\n"
        "from jsg.constrained import compiler\n"
        "from jsg.constrained import grammar\n"
        "from jsg.types import GrammarSpec\n"
        "compiler.compile_tables(GrammarSpec('choices', '[\"a\"]'))\n"
        "print(sorted({'jax', 'numba', 'interegular'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
