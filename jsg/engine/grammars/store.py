"""The grammars that an engine knows or a live request has. Each is bound to the vocabulary when it is needed."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from typing import final

from jsg.constrained.grammar import CompiledGrammar, GrammarMasker
from jsg.constrained.tables import StaticTables
from jsg.engine.grammars.lexicon import Lexicon, LexiconLoader
from jsg.errors import QueueFullError, RequestError

TABLE_BYTES = 512 * 2**20
"""The most bytes of tables, those of waiting requests included, so that a queue cannot take all memory."""
MACHINE_BYTES = 256 * 2**20
"""The most bytes of all machines. Above it, machines without requests are dropped and the others are cut down."""
WORTH_BYTES = 2**18
"""A machine is not cut down for less than this. The states of its requests stay in any case."""
WEIGHED_EVERY = 8
"""A machine is weighed once in so many steps that use it. A mask is 16 KiB, and weighing takes 2 us."""


@dataclasses.dataclass(slots=True, eq=False)
class StoredGrammar:
    """A grammar, shared by all requests that name it. Only the store changes it.

    Attributes:
        key: Its name.
        tables: The compiled tables, as the front sent them.
        is_known: Later requests may name it.
        num_users: Live requests that have it.
        machine: The grammar bound to the vocabulary; None until a step needs it.
        num_bytes: Size of the machine when it was last weighed.
        least_bytes: Size of the machine when it was last cut down.
        num_uses: Steps that it was used in.
    """

    key: str
    tables: bytes
    is_known: bool = True
    num_users: int = 0
    machine: CompiledGrammar | None = None
    num_bytes: int = 0
    least_bytes: int = 0
    num_uses: int = 0


@final
class GrammarStore:
    """Grammars by key.

    Invariants: it has a grammar while the grammar is known or a live request has it; `num_bytes` is the sum of the last
    weights.
    """

    def __init__(self, loader: LexiconLoader):
        """Knows no grammar yet. `loader` loads the model's tokens."""
        self._loader = loader
        self._grammars: dict[str, StoredGrammar] = {}
        self._machines: OrderedDict[str, StoredGrammar] = OrderedDict()  # least recently used first
        self._table_bytes = 0
        self._machine_bytes = 0

    def __len__(self) -> int:
        return len(self._grammars)

    @property
    def num_bytes(self) -> int:
        """Memory of all tables, and of all machines when they were last weighed."""
        return self._table_bytes + self._machine_bytes

    @property
    def lexicon(self) -> Lexicon:
        """The model's tokens. Waits until they are loaded."""
        return self._loader.get()

    # What the front sends.

    def add(self, key: str, tables: bytes) -> None:
        """Makes a grammar known under this key."""
        grammar = self._grammars.get(key)
        if grammar is None:
            self._grammars[key] = StoredGrammar(key, tables)
            self._table_bytes += len(tables)
        else:
            grammar.is_known = True

    def forget(self, keys: Iterable[str]) -> None:
        """Forgets grammars that no later request will name. Requests keep theirs; unknown keys are ignored."""
        for key in keys:
            grammar = self._grammars.get(key)
            if grammar is not None:
                grammar.is_known = False
                self._drop_if_unneeded(grammar)

    # What requests have.

    def find(self, key: str) -> StoredGrammar:
        """The grammar with this key. It stays only if `hold` follows.

        Raises:
            RequestError: It is not known, or the model has no tokenizer.
            QueueFullError: The grammars of live requests take too much memory.
        """
        grammar = self._grammars.get(key)
        if grammar is None or not grammar.is_known:
            raise RequestError("the request names a grammar that the engine does not have; send it again", "grammar")
        if self._table_bytes > TABLE_BYTES and not grammar.num_users:
            raise QueueFullError(
                f"the grammars of all requests may take {TABLE_BYTES >> 20} MiB when compiled, and those that run and "
                "wait take more; try again later"
            )
        self._loader.get()
        return grammar

    def hold(self, grammar: StoredGrammar) -> None:
        """Notes that one more live request has the grammar."""
        grammar.num_users += 1

    def release(self, grammar: StoredGrammar) -> None:
        """Notes that a request that had the grammar has ended."""
        grammar.num_users -= 1
        if grammar.machine is not None:
            self._weigh(grammar)
        self._drop_if_unneeded(grammar)

    def new_masker(self, grammar: StoredGrammar) -> GrammarMasker:
        """Makes a masker at the beginning of a text. The grammar must be held."""
        assert grammar.num_users, "a request that is not live needs no masker"
        if grammar.machine is None:
            grammar.machine = CompiledGrammar(StaticTables.from_bytes(grammar.tables), self.lexicon.vocabulary)
            grammar.num_bytes = grammar.least_bytes = 0
            self._machines[grammar.key] = grammar
            self._weigh(grammar)
        self._machines.move_to_end(grammar.key)
        return grammar.machine.new_masker()

    def note_use(self, grammar: StoredGrammar) -> None:
        """Notes that a step has used a masker of the grammar."""
        grammar.num_uses += 1
        if not grammar.num_uses % WEIGHED_EVERY and grammar.machine is not None:
            self._weigh(grammar)

    # Memory.

    def _weigh(self, grammar: StoredGrammar) -> None:
        """Notes the size of a machine, and frees memory if all together are too large."""
        assert grammar.machine is not None, "there is something to weigh"
        num_bytes = grammar.machine.num_bytes
        self._machine_bytes += num_bytes - grammar.num_bytes
        grammar.num_bytes = num_bytes
        if self._machine_bytes > MACHINE_BYTES:
            self._drop_unused()
            self._cut_down()

    def _drop_unused(self) -> None:
        """Drops machines that no request has, the least recently used first, until the others fit."""
        for grammar in [each for each in self._machines.values() if not each.num_users]:
            if self._machine_bytes <= MACHINE_BYTES:
                break
            self._drop_machine(grammar)

    def _cut_down(self) -> None:
        """Drops states that no request is in, of the machines that give most, until all fit."""
        while self._machine_bytes > MACHINE_BYTES and self._machines:
            grammar = max(self._machines.values(), key=lambda each: each.num_bytes - each.least_bytes)
            if grammar.num_bytes - grammar.least_bytes < WORTH_BYTES:
                break
            assert grammar.machine is not None, "it is one of those that have a machine"
            grammar.machine.forget()
            num_bytes = grammar.machine.num_bytes
            self._machine_bytes += num_bytes - grammar.num_bytes
            grammar.num_bytes = grammar.least_bytes = num_bytes

    def _drop_if_unneeded(self, grammar: StoredGrammar) -> None:
        if grammar.is_known or grammar.num_users:
            return
        if grammar.machine is not None:
            self._drop_machine(grammar)
        del self._grammars[grammar.key]
        self._table_bytes -= len(grammar.tables)

    def _drop_machine(self, grammar: StoredGrammar) -> None:
        del self._machines[grammar.key]
        self._machine_bytes -= grammar.num_bytes
        assert grammar.machine is not None, "there is something to drop"
        grammar.machine.cut()
        grammar.machine, grammar.num_bytes, grammar.least_bytes = None, 0, 0
