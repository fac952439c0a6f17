"""The grammars of an engine in this process: compiled here, once each, and handed to its core with their requests."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import final

from jsg.constrained.compiler import compile_tables
from jsg.engine.offline.driver import Driver, Sink
from jsg.types import GrammarSpec, Request

KEPT_BYTES = 64 * 2**20
"""Of tables, for calls to come. Those of a call that runs are its own."""

Tables = dict[str, bytes]
"""Compiled grammars by key."""


@final
class OfflineGrammars:
    """Remembers tables, least recently used out. For several threads.

    Invariant: the core knows no grammar but those that are remembered here.
    """

    def __init__(self, driver: Driver, kept_bytes: int = KEPT_BYTES):
        """Remembers none yet; the driver's core knows none."""
        self._driver = driver
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._compiling: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()

    def kept(self, specs: Iterable[GrammarSpec]) -> Tables | None:
        """What `tables` gives, if none of them has to be compiled; None otherwise. Takes no time."""
        with self._lock:
            found = {spec.key: self._kept.get(spec.key) for spec in specs}
        tables = {key: tables for key, tables in found.items() if tables is not None}
        return tables if len(tables) == len(found) else None

    def tables(self, specs: Iterable[GrammarSpec]) -> Tables:
        """What `submit` needs for requests with these grammars; may take seconds.

        Raises:
            GrammarError: One is wrong or not supported.
        """
        return {spec.key: self._compiled(spec) for spec in specs}

    def submit(self, request: Request, tables: Tables, sink: Sink) -> None:
        """Runs a request: see `Driver.submit`. `tables` has its grammar, if it has one."""
        key = request.sampling.grammar_key
        with self._lock:  # what the core is told comes in one order, with nothing between a grammar and its request
            if key is not None and key not in self._kept:
                self._keep(key, tables[key])
            elif key is not None:
                self._kept.move_to_end(key)
            self._driver.submit(request, sink)
            self._forget_some()

    def _compiled(self, spec: GrammarSpec) -> bytes:
        key = spec.key
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            under_way = self._compiling.get(key)
            future = self._compiling.setdefault(key, Future())
        if under_way is not None:
            try:
                return under_way.result()
            except CancelledError:  # who compiled it was interrupted
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
            self._keep(key, tables)
            self._forget_some()
        return tables

    def _keep(self, key: str, tables: bytes) -> None:
        if key in self._kept:  # another thread was quicker
            return
        self._driver.tell(lambda core: core.grammars.add_grammar(key, tables))
        self._kept[key] = tables
        self._num_bytes += len(tables)

    def _forget_some(self) -> None:
        forgotten = []
        while self._num_bytes > self._kept_bytes and len(self._kept) > 1:
            key, tables = self._kept.popitem(last=False)
            self._num_bytes -= len(tables)
            forgotten.append(key)
        if forgotten:
            self._driver.tell(lambda core: core.grammars.forget_grammars(forgotten))
