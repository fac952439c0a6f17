"""What was evicted lately, when and for what. The log explains misses; no decision depends on it."""

import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from jsg.cache.node import Node, Root
from jsg.cache_report import EvictionCause

CAPACITY = 4096
"""The leaves that are remembered. A thousand of them take a quarter of a megabyte."""
DIGEST_BYTES = 16
MAX_STATES = 1024
"""The unfinished hashes that are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Eviction:
    """One evicted leaf.

    Attributes:
        at_s: The time of the eviction, in seconds since the epoch.
        num_tokens: How many tokens its edge had.
        cause: For what it was evicted.
        namespace: For a request of which namespace; None if it was for no single request.
    """

    at_s: float
    num_tokens: int
    cause: EvictionCause = EvictionCause.PROMPT
    namespace: str | None = None

    def is_for(self, namespace: str) -> bool | None:
        """Whether that was one of this namespace, or of what follows joined branches in it; None if it is not known."""
        return None if self.namespace is None else f"{namespace}/".startswith(f"{self.namespace}/")


class EvictionLog:
    """The leaves that were evicted last, by the place where each began.

    A key is a digest of the namespace and of all tokens up to the end of the leaf's first page. A prompt that would go
    on in this leaf misses that page first. So the log has no tokens, and long prompts cost as much as short ones. The
    hashes of paths are kept unfinished and are extended edge by edge, so that the cost of an eviction does not grow
    with its depth.

    Attributes:
        num_pages: Pages that were evicted so far. The cache counts them.

    Invariant: `_states` has the hash of the path to the end of a node, by the serial of the node. A split does not
    change the path, since the lower half stays the same node.
    """

    def __init__(self, page_bytes: int, clock: Callable[[], float] = time.time, capacity: int = CAPACITY):
        """Makes an empty log of at most `capacity` leaves. `clock` returns seconds since the epoch."""
        self.num_pages = 0
        self._page_bytes = page_bytes
        self._clock = clock
        self._capacity = capacity
        self._entries: OrderedDict[bytes, Eviction] = OrderedDict()
        self._states: OrderedDict[int, hashlib.blake2b] = OrderedDict()

    def record(
        self, leaves: Sequence[Node], cause: EvictionCause = EvictionCause.PROMPT, namespace: str | None = None
    ) -> None:
        """Notes the eviction of leaves, which still know their parents. Only the last of very many are remembered."""
        at_s = self._clock()
        for leaf in leaves[-self._capacity :]:
            assert leaf.parent is not None, "a root is not evicted"
            state = self._state(leaf.parent).copy()
            state.update(leaf.tokens[: self._page_bytes])
            key = state.digest()
            self._entries[key] = Eviction(at_s, leaf.num_tokens, cause, namespace)
            self._entries.move_to_end(key)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def find(self, namespace: str, tokens: bytes) -> Eviction | None:
        """The last eviction of a leaf whose first page was the last page of `tokens`; None if none is known.

        Args:
            namespace: The namespace of the prompt.
            tokens: Whole pages from the beginning of the prompt, as bytes of int32.
        """
        state = _begin(namespace)
        state.update(tokens)
        return self._entries.get(state.digest())

    def __len__(self) -> int:
        return len(self._entries)

    def _state(self, node: Node) -> hashlib.blake2b:
        """The hash of the path to the end of `node`."""
        missing: list[Node] = []
        above = node
        while (state := self._states.get(above.serial)) is None and above.parent is not None:
            missing.append(above)
            above = above.parent
        if state is None:
            assert isinstance(above, Root)
            state = _begin(above.namespace)
        for below in reversed(missing):
            state = state.copy()
            state.update(below.tokens)
            self._states[below.serial] = state
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        return state


def _begin(namespace: str) -> hashlib.blake2b:
    """The hash of a namespace without tokens. Its length comes first, so that no name runs into tokens."""
    name = namespace.encode(errors="surrogatepass")
    return hashlib.blake2b(len(name).to_bytes(8, "little") + name, digest_size=DIGEST_BYTES)
