"""Which grammars an engine has: as many as fit into its memory for them, and those that waiting requests name."""

from typing import final

from jsg.byte_cache import ByteCache


@final
class SentGrammars:
    """The keys of the grammars that were sent and not forgotten."""

    def __init__(self, max_bytes: int) -> None:
        """The engine has none, and keeps tables of so many bytes."""
        self._sizes = ByteCache[str, int](max_bytes, int)
        self._unused: set[str] = set()  # to be forgotten as soon as no waiting request names them

    def __contains__(self, key: str) -> bool:
        """Whether a request that names it may be sent now or later."""
        return key in self._sizes

    def use(self, key: str) -> None:
        """Counts a grammar as used."""
        self._sizes.get(key)

    def add(self, key: str, num_bytes: int, named: set[str]) -> list[str]:
        """A grammar is sent. Gives those that the engine is to forget, which are none of `named`."""
        self._unused.update(self._sizes.put(key, num_bytes))
        self._unused.discard(key)
        gone = self._unused - named
        self._unused -= gone
        return sorted(gone)
