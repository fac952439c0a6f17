"""The grammars of an engine in this process, which are compiled once each and sent to its core with their requests."""

import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import final

from jsg.byte_cache import ByteCache
from jsg.constrained.compiler import compile_tables
from jsg.engine.offline.driver import Driver, Sink
from jsg.types import GrammarSpec, Request

KEPT_BYTES = 64 * 2**20
"""The most bytes of tables that are kept for later calls. A running call has its own tables."""

Tables = dict[str, bytes]
"""Compiled grammars by key."""


@final
class OfflineGrammars:
    """Compiles grammars and keeps their tables in a bounded cache. For several threads.

    Invariant: the core knows only grammars that are kept here.
    """

    def __init__(self, driver: Driver, kept_bytes: int = KEPT_BYTES):
        """Keeps no grammar yet, and the driver's core must know none."""
        self._driver = driver
        self._kept = ByteCache[str, bytes](kept_bytes, len)
        self._compiling: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()

    def kept(self, specs: Iterable[GrammarSpec]) -> Tables | None:
        """As `tables`, but None where a grammar would have to be compiled. Takes no time."""
        with self._lock:
            found = {spec.key: self._kept.get(spec.key) for spec in specs}
        tables = {key: tables for key, tables in found.items() if tables is not None}
        return tables if len(tables) == len(found) else None

    def tables(self, specs: Iterable[GrammarSpec]) -> Tables:
        """The tables of these grammars, for `submit`. May take seconds.

        Raises:
            GrammarError: One is wrong or not supported.
        """
        return {spec.key: self._compiled(spec) for spec in specs}

    def submit(self, request: Request, tables: Tables, sink: Sink) -> None:
        """Runs a request as `Driver.submit` does. `tables` must have its grammar, if it has one."""
        key = request.sampling.grammar_key
        with self._lock:  # so that nothing comes between a grammar and its request
            forgotten = [] if key is None else self._keep(key, tables[key])
            self._driver.submit(request, sink)
            self._forget(forgotten)

    def _compiled(self, spec: GrammarSpec) -> bytes:
        key = spec.key
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                return kept
            under_way = self._compiling.get(key)
            future = self._compiling.setdefault(key, Future())
        if under_way is not None:
            try:
                return under_way.result()
            except CancelledError:  # the thread that compiled it was interrupted
                return self._compiled(spec)
        try:
            tables = compile_tables(spec).to_bytes()
            self._driver.wait_for_grammars()
        except Exception as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(tables)
        finally:
            with self._lock:
                del self._compiling[key]
                if not future.done():
                    future.cancel()
        with self._lock:
            self._forget(self._keep(key, tables))
        return tables

    def _keep(self, key: str, tables: bytes) -> list[str]:
        """Sends a grammar to the core unless it has it; returns the keys that the core should forget for it."""
        if self._kept.get(key) is not None:
            return []
        self._driver.tell(lambda core: core.grammars.add_grammar(key, tables))
        return self._kept.put(key, tables)

    def _forget(self, keys: list[str]) -> None:
        if keys:
            self._driver.tell(lambda core: core.grammars.forget_grammars(keys))
