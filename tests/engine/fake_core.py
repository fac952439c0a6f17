"""An engine core that repeats the prompt: what the process and the server are tested against, without a model.

Output token i is prompt token i modulo the prompt's length, one per step and request. What it does besides is chosen
by the configuration and by special prompts, see the constants.
"""

import os
import sys
import time
from collections.abc import Callable

from jsg.config import EngineConfig
from jsg.engine.protocol import ModelInfo, Progress
from jsg.errors import MemoryPlanError, QueueFullError, RequestError, check_length
from jsg.types import FinishReason, FinishType, Request, RequestOutput, TokenLogprob

VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024
POOL_TOKENS = 10_000
MAX_RUNNING = 128
STEP_S = 0.002
FAILING_TOKEN = 511  # a request that begins with it fails
CRASHING_TOKEN = 510  # a request that begins with it ends the engine
TOO_LARGE = "too-large"  # a model that does not fit
CRASHING = "crashing"  # a model whose load ends the process
UNCOUNTED = "uncounted"  # a model whose counters cannot be given


class FakeCore:
    """Repeats prompts."""

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None]) -> None:
        if config.model_path == TOO_LARGE:
            raise MemoryPlanError("weights must fit in 1 GB, but need 2 GB; raise --mem-fraction-static")
        if config.model_path == CRASHING:
            sys.exit(7)
        report(Progress("plan", 1, 1, "weights 1 MB, KV pool 2 MB"))
        report(Progress("load", 1, 1))
        while config.tokenizer_path and not os.path.exists(config.tokenizer_path):
            time.sleep(0.02)  # a start that lasts until the test makes this file
        pool_tokens = config.max_total_tokens or POOL_TOKENS
        self.info = ModelInfo(
            model_path=config.model_path,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(257,),
            dtype="float32",
            device="fake",
            max_running_requests=MAX_RUNNING,
            max_total_tokens=pool_tokens,
            max_request_tokens=min(CONTEXT_LENGTH, pool_tokens),
            page_size=1,
        )
        self._max_queued = config.max_queued_requests
        self._running: dict[str, Request] = {}
        self._counts: dict[str, int] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._num_aborted = 0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, request: Request) -> None:
        if any(token >= VOCAB_SIZE for token in request.input_ids):
            raise RequestError(f"input_ids must be below {VOCAB_SIZE}", param="input_ids")
        check_length(len(request.input_ids), request.sampling.max_new_tokens, self.info.max_request_tokens)
        if len(self._running) >= self._max_queued:
            raise QueueFullError(f"at most {self._max_queued} requests may wait")
        self._running[request.rid] = request
        self._counts[request.rid] = 0
        self._num_added += 1

    def abort(self, rid: str) -> None:
        if self._running.pop(rid, None) is not None:
            self._num_aborted += 1

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_S)
        outputs = [self._advance(request) for request in list(self._running.values())]
        for output in outputs:
            if output.finish is not None:
                del self._running[output.rid]
        return outputs

    def _advance(self, request: Request) -> RequestOutput:
        prompt, index = request.input_ids, self._counts[request.rid]
        if prompt[0] == CRASHING_TOKEN:
            os._exit(9)
        if prompt[0] == FAILING_TOKEN:
            finish = FinishReason(FinishType.ERROR, message="this row failed")
            return RequestOutput(rid=request.rid, finish=finish, prompt_tokens=len(prompt))
        cached = len(prompt) - 1 if prompt in self._seen else 0
        limit = request.sampling.max_new_tokens
        self._counts[request.rid] = index + 1
        finish = FinishReason(FinishType.LENGTH) if index + 1 >= limit else None
        if finish is not None:
            self._seen.add(prompt)
        token_ids = (prompt[index % len(prompt)],) if limit else ()
        return RequestOutput(
            rid=request.rid,
            token_ids=token_ids,
            finish=finish,
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            logprobs=tuple(self._score(request, t) for t in token_ids) if request.return_logprob else (),
            prompt_logprobs=self._score_prompt(request) if index == 0 and request.wants_prompt_logprobs else None,
            queue_s=0.25,
        )

    def _score(self, request: Request, token: int, *, is_first: bool = False) -> TokenLogprob:
        top = tuple((other, -float(rank)) for rank, other in enumerate(range(token, token + request.top_logprobs_num)))
        chosen = tuple((other, -float(other)) for other in request.token_ids_logprob)
        return TokenLogprob(token, None if is_first else -token / 1000, () if is_first else top, chosen)

    def _score_prompt(self, request: Request) -> tuple[TokenLogprob, ...]:
        scored = range(request.logprob_start_len, len(request.input_ids))
        return tuple(self._score(request, request.input_ids[i], is_first=i == 0) for i in scored)

    def flush_cache(self) -> bool:
        if self._running:
            return False
        self._seen.clear()
        return True

    def stats(self) -> dict[str, int | float]:
        if self.info.model_path == UNCOUNTED:
            raise RuntimeError("the page equation does not hold")
        return {
            "pid": os.getpid(),
            "num_running": len(self._running),
            "num_aborted": self._num_aborted,
            "num_added": self._num_added,
            "has_jax": int("jax" in sys.modules),
        }

    def close(self) -> None:
        self._running.clear()
