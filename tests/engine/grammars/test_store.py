"""The grammars of an engine core: one of each, bound when needed, and bounded in what they take together."""

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from jsg.constrained.compiler import compile_grammar, compile_tables
from jsg.engine.grammars import store as grammar_store
from jsg.engine.grammars.begun import Begun
from jsg.engine.grammars.lexicon import Lexicon, LexiconLoader
from jsg.engine.grammars.store import GrammarStore, StoredGrammar
from jsg.errors import QueueFullError, RequestError
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import bits, odd_vocabulary
from tests.engine.integrity import check_store

VOCABULARY = odd_vocabulary()


def loader() -> LexiconLoader:
    """Has the vocabulary; there is no tokenizer."""
    lexicon = object.__new__(Lexicon)
    object.__setattr__(lexicon, "vocabulary", VOCABULARY)
    made = object.__new__(LexiconLoader)
    made._loading = Begun("lexicon", lambda: lexicon)
    return made


def spec(number: int) -> GrammarSpec:
    return GrammarSpec("regex", f"([a-z]{{1,40}} ){{3}}{number}")


@pytest.fixture
def store() -> Iterator[GrammarStore]:
    store = GrammarStore(loader())
    for number in range(6):
        store.add(str(number), compile_tables(spec(number)).to_bytes())
    yield store
    check_store(store)


def held(store: GrammarStore, number: int) -> StoredGrammar:
    grammar = store.find(str(number))
    store.hold(grammar)
    return grammar


def go_through(store: GrammarStore, number: int, grammar: StoredGrammar) -> None:
    """Reads a text, and compares what is allowed with a grammar of its own."""
    masker, other = store.new_masker(grammar), compile_grammar(spec(number), VOCABULARY).new_masker()
    ours, theirs = (np.zeros(VOCABULARY.num_words, np.uint32) for _ in range(2))
    for step in range(12):
        assert masker.fill_mask(ours) == other.fill_mask(theirs)
        assert bits(ours) == bits(theirs)
        token = sorted(bits(theirs) - set(VOCABULARY.eos_ids))[step]
        assert masker.accept(token) and other.accept(token)
        store.note_use(grammar)
        check_store(store)


def test_a_grammar_is_bound_when_it_is_first_needed_and_once(store: GrammarStore):
    grammars = [held(store, 0) for _ in range(3)]
    assert len(set(map(id, grammars))) == 1 and grammars[0].machine is None
    maskers = [store.new_masker(grammar) for grammar in grammars]
    assert len({id(masker.grammar) for masker in maskers}) == 1
    assert list(store._machines) == ["0"]


def test_a_grammar_that_is_dropped_does_not_wait_for_the_collector(store: GrammarStore):
    """Of a long answer these are a hundred thousand objects, and masks of megabytes."""
    grammar = held(store, 0)
    go_through(store, 0, grammar)
    machine = grammar.machine
    assert machine is not None
    machine.start.next[5] = machine.start  # as a loop in a text has it
    places, made = machine._by_config, weakref.ref(machine)
    assert len(places) > 10
    gc.disable()
    try:
        del machine
        store.release(grammar)
        store.forget(["0"])
        assert made() is None and not places
    finally:
        gc.enable()


def test_a_grammar_that_is_known_again_is_the_one_that_a_request_has(store: GrammarStore):
    first = held(store, 0)
    store.forget(["0", "unknown"])
    assert len(store) == 6
    with pytest.raises(RequestError, match="does not have"):
        store.find("0")
    store.add("0", first.tables)
    assert held(store, 0) is first
    store.release(first)
    store.forget(["0"])
    go_through(store, 0, first)
    before = store.num_bytes
    store.release(first)
    assert len(store) == 5 and not store._machines and store.num_bytes < before
    with pytest.raises(RequestError, match="does not have"):
        store.find("0")


def test_all_live_grammars_are_counted(store: GrammarStore):
    tables = store.num_bytes
    assert tables == sum(len(each.tables) for each in store._grammars.values())
    grammars = [held(store, number) for number in range(6)]
    for number, grammar in enumerate(grammars):
        go_through(store, number, grammar)
    store.forget(map(str, range(6)))
    for grammar in grammars:
        store._weigh(grammar)
    assert store.num_bytes == tables + sum(each.machine.num_bytes for each in grammars if each.machine)
    for grammar in grammars:
        store.release(grammar)
    assert store.num_bytes == 0


def test_above_the_bound_what_nobody_has_is_dropped_first(store: GrammarStore, monkeypatch: pytest.MonkeyPatch):
    grammars = [held(store, number) for number in range(6)]
    for number, grammar in enumerate(grammars):
        go_through(store, number, grammar)
    for grammar in grammars[:4]:
        store.release(grammar)
    assert len(store._machines) == 6
    monkeypatch.setattr(grammar_store, "MACHINE_BYTES", store._machine_bytes - 1)
    go_through(store, 1, held(store, 1))
    assert list(store._machines) == ["2", "3", "4", "5", "1"], "the least recently used"
    monkeypatch.setattr(grammar_store, "MACHINE_BYTES", 1)
    go_through(store, 5, grammars[5])
    assert sorted(store._machines) == ["1", "4", "5"], "those that a request has"
    assert len(store) == 6


def test_above_the_bound_live_grammars_are_cut_down_and_answer_as_before(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_store, "WEIGHED_EVERY", 1)
    monkeypatch.setattr(grammar_store, "WORTH_BYTES", 1)
    grammars = [held(store, number) for number in range(6)]
    maskers = [store.new_masker(grammar) for grammar in grammars]
    least = store._machine_bytes
    for number, grammar in enumerate(grammars):
        go_through(store, number, grammar)
    bound = (least + store._machine_bytes) // 2
    monkeypatch.setattr(grammar_store, "MACHINE_BYTES", bound)
    for _ in range(2):
        for number, grammar in enumerate(grammars):
            go_through(store, number, grammar)
            assert store._machine_bytes <= bound
    monkeypatch.setattr(grammar_store, "MACHINE_BYTES", 1)
    go_through(store, 0, grammars[0])
    assert len(maskers) == len(store._machines) == 6


def test_what_gives_little_is_not_cut_down_again_and_again(store: GrammarStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_store, "WEIGHED_EVERY", 1)
    monkeypatch.setattr(grammar_store, "MACHINE_BYTES", 1)
    monkeypatch.setattr(grammar_store, "WORTH_BYTES", 1 << 40)
    grammar = held(store, 0)
    store.new_masker(grammar)
    assert grammar.machine is not None

    def forget() -> None:
        raise AssertionError("it gives nothing")

    monkeypatch.setattr(grammar.machine, "forget", forget)
    go_through(store, 0, grammar)


def test_tables_of_requests_that_wait_are_bounded(store: GrammarStore, monkeypatch: pytest.MonkeyPatch):
    first = held(store, 0)
    monkeypatch.setattr(grammar_store, "TABLE_BYTES", store.num_bytes - 1)
    assert store.find("0") is first
    with pytest.raises(QueueFullError, match=r"may take 0 MiB when compiled.*; try again later"):
        store.find("1")
    store.forget(["5"])
    assert store.find("1").key == "1"
