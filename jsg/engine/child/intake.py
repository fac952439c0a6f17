"""What the front has sent and the engine has not taken yet. Each turn of the step loop takes a part of it.

A list of a thousand prompts, or a thousand answers to one, come in one message or a few. To take them all at once would
take longer than many steps, in which requests that run get no token. Requests, grammars and the end of grammars stay
in the order in which they came. Aborts pass them.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol, final

from jsg.engine.child.protocol import Failure, GrammarTables, Refusal
from jsg.engine.child.wire import Arrived, SentRequest
from jsg.errors import JsgError
from jsg.types import Request

logger = logging.getLogger(__name__)

UNITS = 64
"""The work that begins in one turn. A unit is what a short request takes: about 0.1 ms."""
TOKENS_PER_UNIT = 2**15
"""Tokens of a prompt that take as long: they are looked up in the cache."""
PLACED_PER_UNIT = 2**11
"""The same where the prompt has branches, position jumps or pictures, so that each token gets a position and a word."""
NOT_ADDED = "the engine could not take this request; the server's log has the cause"


class Grammars(Protocol):
    """The grammars of a core.

    Attributes:
        are_loaded: Whether the tokenizer and the kernels are loaded. Requests may have grammars from then on.
    """

    are_loaded: bool

    def add_grammar(self, key: str, tables: bytes) -> None:
        """Stores a grammar for the requests that name this key."""
        ...

    def forget_grammars(self, keys: Sequence[str]) -> None:
        """Forgets grammars that no later request will name; running requests keep theirs."""
        ...


class Taker(Protocol):
    """Who takes requests.

    Attributes:
        grammars: The grammars that requests may name.
    """

    grammars: Grammars

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError or QueueFullError."""
        ...

    def abort(self, rid: str) -> None:
        """Ends a request. An unknown `rid` is ignored."""
        ...


@final
class Intake:
    """The requests and grammars that wait until they are taken.

    Attributes:
        most_units: The most units that one turn has taken so far.
    """

    def __init__(self) -> None:
        self.most_units = 0.0
        self._waiting: deque[SentRequest | GrammarTables | Sequence[str]] = deque()
        self._rids: set[str] = set()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._rids)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, arrived: Arrived, core: Taker) -> None:
        """Lets the content of a message wait, except that its aborts apply at once."""
        message = arrived.message
        for rid in message.aborts:
            if rid in self._rids:
                self._rids.discard(rid)
            else:
                core.abort(rid)
        self._waiting += message.grammars
        self._waiting += arrived.requests
        self._rids.update(request.rid for request in arrived.requests)
        if message.forgotten_grammars:
            self._waiting.append(message.forgotten_grammars)

    def take(self, core: Taker) -> list[Refusal]:
        """Gives the core what has waited longest, until that is the work of a turn. Returns what it refuses."""
        units, refusals = 0.0, list[Refusal]()
        while self._waiting and units < UNITS:
            units += 1
            match self._waiting.popleft():
                case GrammarTables() as grammar:
                    core.grammars.add_grammar(grammar.key, grammar.tables)
                case SentRequest() as sent:
                    if sent.rid in self._rids:  # else it was aborted
                        self._rids.discard(sent.rid)
                        try:
                            request = sent.make()
                            units += _extra_units(request)
                            core.add(request)
                        except JsgError as error:
                            refusals.append(Refusal(sent.rid, Failure.of(error)))
                        except Exception:  # the core keeps no state of a request that it could not add
                            logger.exception("a request could not be added")
                            refusals.append(Refusal(sent.rid, Failure(JsgError.__name__, NOT_ADDED)))
                case keys:
                    core.grammars.forget_grammars(keys)
        self.most_units = max(self.most_units, units)
        return refusals


def _extra_units(request: Request) -> float:
    is_placed = request.joined or request.position_jumps or request.media
    return len(request.input_ids) / (PLACED_PER_UNIT if is_placed else TOKENS_PER_UNIT)
