"""A server whose engine costs nothing, so that the cost of the front can be measured.

    python -m bench.null_engine --steps-per-second N [--front-core CORE] [--front-processes N] [--port PORT] [...]

Each step gives every request one token. The tokens are words of the embedded tokenizer, each of which becomes text at
once. The front is the real one.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child.protocol import Call, ModelInfo, Progress, Refusal
from jsg.engine.front.children import EngineChild
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from jsg.types import FinishReason, FinishType, Request, RequestOutput

CONTEXT_LENGTH = 1_000_000
MAX_RUNNING = 4096


def words_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of plain letters, each of which becomes text without waiting for the next token."""
    return tuple(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).strip().isalpha())


class NullGrammars:
    """Takes the grammars that the front sends. They constrain no answer."""

    are_loaded = True

    def add_grammar(self, key: str, tables: bytes) -> None:
        """Does nothing, because grammars are not stored."""

    def forget_grammars(self, keys: Sequence[str]) -> None:
        """Does nothing, because grammars are not stored."""


class NullCore:
    """Implements `jsg.engine.child.process.Core`. Token i of every answer is word i, modulo the number of words."""

    is_settled = True

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None]) -> None:
        # The option for a step's token budget carries the pace, because an engine that computes nothing has no budget.
        self._step_s = 1 / (config.chunked_prefill_size or 1)
        self._words = words_of(load_tokenizer(resolve_model("tiny")))
        self._left: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._next_s = 0.0
        self.grammars = NullGrammars()
        self.info = ModelInfo(
            model_path="null",
            context_length=CONTEXT_LENGTH,
            vocab_size=max(self._words) + 1,
            eos_token_ids=(),
            dtype="none",
            kv_dtype="none",
            device="none",
            max_running_requests=MAX_RUNNING,
            max_total_tokens=CONTEXT_LENGTH,
            max_request_tokens=CONTEXT_LENGTH,
            page_size=1,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: Request) -> None:
        if not self._left:
            self._next_s = time.monotonic()
        self._left[request.rid] = request.sampling.max_new_tokens
        self._made[request.rid] = 0

    def abort(self, rid: str) -> None:
        self._left.pop(rid, None)
        self._made.pop(rid, None)

    def step(self) -> list[RequestOutput]:
        """Waits for the time of the next step. After a late step the next ones come sooner, to keep the pace."""
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s += self._step_s
        return [self._advance(rid) for rid in list(self._left)]

    def _advance(self, rid: str) -> RequestOutput:
        number = self._made[rid]
        self._made[rid] = number + 1
        self._left[rid] -= 1
        finish = None
        if self._left[rid] <= 0:
            finish = FinishReason(FinishType.LENGTH)
            self.abort(rid)
        token_ids = (self._words[number % len(self._words)],)
        return RequestOutput(rid=rid, token_ids=token_ids, finish=finish, prompt_tokens=1)

    def refuse_overdue(self) -> list[Refusal]:
        return []

    def answer(self, call: Call) -> bool | dict[str, Any]:
        return self.stats() if call.name == "stats" else True

    def stats(self) -> dict[str, Any]:
        return {"num_running": len(self._left), "num_waiting": 0}

    def close(self, *, waits: bool = True) -> None:
        self._left.clear()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.null_engine", description=__doc__)
    parser.add_argument("--steps-per-second", type=int, required=True, help="tokens per second of each request")
    parser.add_argument("--front-core", type=int, help="CPU core for the front; the engine runs on others")
    parser.add_argument("--port", type=int, default=0, help="port of the server; default: any free port")
    parser.add_argument("--tokenizer", type=Path, default=None, help="directory of the tokenizer; default: tiny's")
    parser.add_argument("--front-processes", type=int, default=1, help="processes that answer; above 1 there is a hub")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    engine = EngineConfig(model_path="null", chunked_prefill_size=options.steps_per_second)
    child = EngineChild.spawn(engine, core="bench.null_engine:NullCore")
    if options.front_core is not None:
        os.sched_setaffinity(0, {options.front_core})  # before a second thread exists
    from jsg.server.run import serve

    server, tokenizer_dir = (
        ServerConfig(port=options.port, front_processes=options.front_processes),
        options.tokenizer or resolve_model("tiny"),
    )
    asyncio.run(serve(engine, server, [child], tokenizer_dir=tokenizer_dir, started_at=started))


if __name__ == "__main__":
    main(sys.argv[1:])
