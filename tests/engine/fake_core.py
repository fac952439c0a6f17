"""An engine core that repeats the prompt: what the process and the server are tested against, without a model.

Output token i is prompt token i modulo the prompt's length, one per step and request. Requests wait, are admitted by
priority and then by arrival, and share cached prefixes within their namespace, as they do in the real core; the
counters are true. What it does besides is chosen by the configuration and by special prompts, see the constants.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.tree_log import TreeLog
from jsg.cache_report import CacheReport, EvictionCause, MissReason
from jsg.config import EngineConfig
from jsg.engine.child.protocol import CORE_STATS, STATE_STATS, Call, Failure, ModelInfo, Progress, Refusal
from jsg.errors import MemoryPlanError, QueueFullError, QueueTimeoutError, RequestError, check_length
from jsg.sched.table import POOL_TERMS
from jsg.step_reports import ConstraintReport
from jsg.token_scores import TokenScores
from jsg.types import FinishReason, FinishType, GrammarSpec, Request, RequestOutput, TokenLogprob
from jsg.waits import IN_THE_ENGINE, WaitReason, stat_of
from tests.scored import scores_of

VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024
POOL_TOKENS = 10_000
SHOWN_PAGES = 2**17  # of the tree that people look at
MAX_RUNNING = 128
STEP_S = 0.002
QUEUE_S = 0.25  # the wait that is reported, whatever it was
FAILING_TOKEN = 511  # a request that begins with it fails
CRASHING_TOKEN = 510  # a request that begins with it ends the engine
RAISING_TOKEN = 509  # a request that begins with it makes `add` raise something unexpected
HANGING_TOKEN = 508  # a request that begins with it makes a step that does not end
ENDLESS_TOKEN = 507  # a request that begins with it goes on until it is aborted
LAST_WORDS = b"F0000 00:00:1700000000.123456 42 step.cc:7] Check failed: rows > 0\n    @ 0x7f raw trace\n"
TOO_LARGE = "too-large"  # a model that does not fit
CRASHING = "crashing"  # a model whose load ends the process
UNCOUNTED = "uncounted"  # a model whose counters cannot be given
LATE = "late"  # a model that takes grammars once its cache was flushed

Tree = dict[int, "Tree"]


class FakeGrammars:
    """The tables that were sent and not forgotten."""

    def __init__(self, *, are_loaded: bool = True) -> None:
        self.are_loaded = are_loaded
        self.tables: dict[str, bytes] = {}

    def add_grammar(self, key: str, tables: bytes) -> None:
        assert tables, "a grammar has tables"
        self.tables[key] = tables

    def forget_grammars(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.tables[key]


class FakeCache:
    """The prompts that were served, by namespace, one node for each token; and those that were flushed last."""

    def __init__(self) -> None:
        self.num_tokens = self.num_inserted = self.num_evicted = 0
        self._trees: dict[str, Tree] = {}
        self._flushed: dict[str, Tree] = {}
        self._flushed_at = 0.0
        self._allocator = PageAllocator(SHOWN_PAGES)
        self._shown = RadixCache(1, self._allocator)
        self._log = TreeLog(self._shown)

    def insert(self, request: Request) -> None:
        tree = self._trees.setdefault(request.namespace, {})
        for token in request.input_ids:
            if token not in tree:
                tree[token] = {}
                self.num_tokens += 1
                self.num_inserted += 1
            tree = tree[token]
        tokens = np.array(request.input_ids, np.int32)
        self._shown.match(tokens, request.namespace)
        if len(tokens) > self._allocator.num_free:
            self._shown.reset()
        pages = self._allocator.allocate(len(tokens))
        assert pages is not None
        num_existing = self._shown.insert(tokens, pages, request.namespace).num_existing
        self._allocator.free(pages[:num_existing])

    def flush(self) -> None:
        self._flushed, self._flushed_at = self._trees, time.time()
        self._trees = {}
        self.num_evicted += self.num_tokens
        self.num_tokens = 0
        self._shown.reset()

    def matched(self, request: Request) -> int:
        """All but the last prompt token may match, and none whose log-probability is wanted."""
        return min(len(_path(self._trees.get(request.namespace, {}), request.input_ids)) - 1, _matchable(request))

    def report(self, request: Request) -> CacheReport:
        matched, matchable = self.matched(request), _matchable(request)
        if matched == matchable:
            return CacheReport(matched_tokens=matched, matchable_tokens=matchable)
        path = _path(self._trees.get(request.namespace, {}), request.input_ids)
        num_evicted = len(_path(self._flushed.get(request.namespace, {}), request.input_ids)) - 1 - matched
        return CacheReport(
            matched_tokens=matched,
            matchable_tokens=matchable,
            first_difference=matched,
            cached_continuations=tuple(path[matched])[:8],
            evicted_at=self._flushed_at if num_evicted > 0 else None,
            evicted_tokens=max(num_evicted, 0),
            evicted_for=EvictionCause.FLUSH if num_evicted > 0 else None,
            why=MissReason.EVICTED if num_evicted > 0 else self._why_new(request, matched),
        )

    def _why_new(self, request: Request, matched: int) -> MissReason:
        others = [tree for namespace, tree in self._trees.items() if namespace != request.namespace]
        is_elsewhere = any(len(_path(tree, request.input_ids)) - 1 > matched for tree in others)
        return MissReason.NAMESPACE if request.sees_all and is_elsewhere else MissReason.NEW

    def look(self, call: Call) -> dict[str, Any]:
        """The same prompts in a real tree."""
        return self._log.look(call.cursor, with_tokens=call.with_tokens)


def _constraint(request: Request, token_ids: tuple[int, ...]) -> ConstraintReport | None:
    """Every token was forced, and half of the model's wishes were allowed."""
    if not request.sampling.return_constraint or not token_ids:
        return None
    return ConstraintReport(is_forced=(True,) * len(token_ids), kept_mass=(0.5,) * len(token_ids), is_complete=False)


def _path(tree: Tree, tokens: tuple[int, ...]) -> list[Tree]:
    """The nodes along the tokens, as far as there are any, the root first."""
    path = [tree]
    for token in tokens:
        if token not in path[-1]:
            break
        path.append(path[-1][token])
    return path


def _matchable(request: Request) -> int:
    if request.wants_prompt_logprobs:
        return max(request.logprob_start_len - 1, 0)
    return len(request.input_ids) - (request.sampling.max_new_tokens > 0)


class Live:
    """A request from arrival to its end."""

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived_s = time.monotonic()
        self.num_output = 0
        self.cached_tokens = 0
        self.cache_report: CacheReport | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids) + self.num_output


class FakeCore:
    """Repeats prompts."""

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None]) -> None:
        if config.model_path == TOO_LARGE:
            raise MemoryPlanError("weights must fit in 1 GB, but need 2 GB; raise --mem-fraction-static")
        if config.model_path == CRASHING:
            self.crash(7)
        report(Progress("plan", 1, 1, "weights 1 MB, KV pool 2 MB"))
        report(Progress("load", 1, 1))
        while config.tokenizer_path and not os.path.exists(config.tokenizer_path):
            self.sleep(0.02)  # a start that lasts until the test makes this file
        pool_tokens = config.max_total_tokens or POOL_TOKENS
        self.info = ModelInfo(
            model_path=config.model_path,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(257,),
            dtype="float32",
            kv_dtype="float32",
            device="fake",
            max_running_requests=config.max_running_requests or MAX_RUNNING,
            max_total_tokens=pool_tokens,
            max_request_tokens=min(CONTEXT_LENGTH, pool_tokens),
            page_size=1,
        )
        self._config = config
        self._waiting: dict[str, Live] = {}
        self._running: dict[str, Live] = {}
        self._held: dict[str, Live] = {}
        self._broken: list[RequestOutput] = []
        self._cache = FakeCache()
        self.is_settled = True
        self.grammars = FakeGrammars(are_loaded=config.model_path != LATE)
        self._totals = dict.fromkeys(
            (
                "num_added", "num_steps", "num_aborted", "num_expired", "num_failed",
                "num_holds_broken", "branch_tokens", "branch_tokens_computed",
                "prompt_tokens", "cached_tokens", "generated_tokens",
            ),
            0,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        """Tests that run it in a thread wake it up."""
        time.sleep(seconds)

    def crash(self, status: int) -> NoReturn:
        """Tests that run it in a thread end no more than that."""
        os._exit(status)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._broken)

    def add(self, request: Request) -> None:
        key = request.sampling.grammar
        assert not isinstance(key, GrammarSpec), "the text of a grammar is nothing for an engine process"
        if key is not None and key not in self.grammars.tables:
            raise RequestError("this grammar was not sent", param="grammar")
        if request.input_ids[0] == RAISING_TOKEN:
            raise RuntimeError("this request cannot be added")
        sampling = request.sampling
        named_ids = {
            "input_ids": request.input_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": [token for token, _ in sampling.logit_bias],
        }
        for name, ids in named_ids.items():
            if any(token >= VOCAB_SIZE for token in ids):
                raise RequestError.of(name, f"must be below {VOCAB_SIZE}")
        check_length(len(request.input_ids), request.sampling.max_new_tokens, self.info.max_request_tokens)
        if len(self._waiting) >= self._config.max_queued_requests:
            raise QueueFullError(f"at most {self._config.max_queued_requests} requests may wait")
        self._waiting[request.rid] = Live(request, self._totals["num_added"])
        self._totals["num_added"] += 1

    def abort(self, rid: str) -> None:
        live = self._waiting.pop(rid, None) or self._running.pop(rid, None)
        self._held.pop(rid, None)
        self._totals["num_aborted"] += live is not None

    def refuse_overdue(self) -> list[Refusal]:
        limit_s = self._config.queue_timeout
        if limit_s is None:
            return []
        now = time.monotonic()
        overdue = [rid for rid, live in self._waiting.items() if now - live.arrived_s > limit_s]
        for rid in overdue:
            del self._waiting[rid]
        self._totals["num_expired"] += len(overdue)
        return [Refusal(rid, Failure.of(QueueTimeoutError("waited longer than --queue-timeout"))) for rid in overdue]

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_S)
        self._admit()
        self._totals["num_steps"] += 1
        outputs = self._broken + [self._advance(live) for live in list(self._running.values())]
        self._broken = []
        for output in outputs:
            self._totals["generated_tokens"] += len(output.token_ids)
            if output.finish is not None:
                self._totals["num_failed"] += output.finish.type is FinishType.ERROR
                self._running.pop(output.rid, None)
            elif self._running[output.rid].request.hold:
                self._held[output.rid] = self._running.pop(output.rid)
        return outputs

    def _admit(self) -> None:
        order = sorted(self._waiting.values(), key=lambda live: (-live.request.priority, live.arrival))
        for live in order[: self.info.max_running_requests - len(self._running)]:
            request = live.request
            live.cached_tokens = self._cache.matched(request)
            live.cache_report = self._cache.report(request) if request.return_cache_info else None
            self._totals["prompt_tokens"] += len(request.input_ids)
            self._totals["cached_tokens"] += live.cached_tokens
            del self._waiting[request.rid]
            self._running[request.rid] = live

    def _advance(self, live: Live) -> RequestOutput:
        request, index = live.request, live.num_output
        prompt, limit = request.input_ids, request.sampling.max_new_tokens
        if prompt[0] == CRASHING_TOKEN:
            os.write(2, LAST_WORDS)
            self.crash(9)
        if prompt[0] == HANGING_TOKEN:
            self.sleep(3600)
        if prompt[0] == FAILING_TOKEN:
            finish = FinishReason(FinishType.ERROR, message="this row failed")
            return RequestOutput(rid=request.rid, finish=finish, prompt_tokens=len(prompt))
        token_ids = (self.token(request, index),) if limit else ()
        live.num_output += len(token_ids)
        finish = self.finish(request, live.num_output)
        if finish is not None:
            self._cache.insert(request)
        if request.hold:
            finish = None
        return RequestOutput(
            rid=request.rid,
            token_ids=token_ids,
            finish=finish,
            prompt_tokens=len(prompt),
            cached_tokens=live.cached_tokens,
            logprobs=tuple(self._score(request, t) for t in token_ids) if request.return_logprob else (),
            prompt_logprobs=self._score_prompt(request) if index == 0 and request.wants_prompt_logprobs else None,
            queue_s=QUEUE_S,
            waited={WaitReason.ROWS: QUEUE_S} if index == 0 else None,
            cache_report=live.cache_report if index == 0 else None,
            constraint=_constraint(request, token_ids),
        )

    def token(self, request: Request, index: int) -> int:
        """The output token with this index."""
        return request.input_ids[index % len(request.input_ids)]

    def finish(self, request: Request, num_output: int) -> FinishReason | None:
        """Why the answer ends after so many tokens; None where it goes on."""
        is_over = num_output >= request.sampling.max_new_tokens and request.input_ids[0] != ENDLESS_TOKEN
        return FinishReason(FinishType.LENGTH) if is_over else None

    def _score(self, request: Request, token: int, *, is_first: bool = False) -> TokenLogprob:
        if is_first:
            return TokenLogprob(token, None)
        top = tuple((other, -float(rank)) for rank, other in enumerate(range(token, token + request.top_logprobs_num)))
        chosen = tuple((other, -float(other)) for other in request.token_ids_logprob)
        return TokenLogprob(token, -token / 1000, top, chosen)

    def _score_prompt(self, request: Request) -> TokenScores:
        scored = range(request.logprob_start_len, len(request.input_ids))
        return scores_of(self._score(request, request.input_ids[i], is_first=i == 0) for i in scored)

    def answer(self, call: Call) -> bool | dict[str, Any]:
        match call.name:
            case "flush_cache":
                if self.has_work:
                    return False
                self._cache.flush()
                self.grammars.are_loaded = True
                self._totals["num_holds_broken"] += len(self._held)
                self._broken = [RequestOutput(rid=rid, finish=FinishReason(FinishType.STOP)) for rid in self._held]
                self._held.clear()
                return True
            case "stats":
                return self.stats()
            case "watch_cache":
                return self._cache.look(call) | {"pool": self._pool()}

    def stats(self) -> dict[str, int | float]:
        if self.info.model_path == UNCOUNTED:
            raise RuntimeError("the page equation does not hold")
        size, cached = self.info.max_total_tokens, self._cache.num_tokens
        held = sum(live.num_tokens for live in self._running.values())
        prompt_tokens = self._totals["prompt_tokens"]
        return {
            "pid": os.getpid(),
            "num_grammars": len(self.grammars.tables),
            "grammar_bytes": sum(map(len, self.grammars.tables.values())),
            **dict.fromkeys(("num_masks", "num_masks_made", "num_masks_found", "num_grammar_failures"), 0),
            **dict.fromkeys([key for key in CORE_STATS if "drafts" in key or "gate" in key], 0),
            **dict.fromkeys(("num_encoder_calls", "num_encoded_tiles", "num_found_images", "num_evicted_images"), 0),
            "vision_bytes": 0,
            **dict.fromkeys(STATE_STATS, 0),
            "has_jax": int("jax" in sys.modules),
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            **dict.fromkeys(map(stat_of, IN_THE_ENGINE), 0),
            stat_of(WaitReason.ROWS): len(self._waiting),
            "num_holds": len(self._held),
            "num_retracts": 0,
            "num_lowered": 0,
            "num_compiled": 0,
            "num_loaded": 0,
            "num_programs_pending": 0,
            "cache_hit_rate": self._totals["cached_tokens"] / prompt_tokens if prompt_tokens else 0.0,
            "num_cached_tokens": cached,
            "num_inserted_tokens": self._cache.num_inserted,
            "num_evicted_tokens": self._cache.num_evicted,
            "num_free_tokens": size - held - cached,
            "num_evictable_tokens": cached,
            "num_protected_tokens": 0,
            "num_uncached_tokens": held,
            "kv_usage": held / size,
            **self._totals,
        }

    def _pool(self) -> dict[str, Any]:
        stats = self.stats()
        terms = {term: stats[f"num_{term}_tokens"] for term in POOL_TERMS}
        return {"total": self.info.max_total_tokens, **terms, "terms": POOL_TERMS}

    def close(self, *, waits: bool = True) -> None:
        self._running.clear()


class CompilingCore(FakeCore):
    """A core with a thread that compiles for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = threading.Thread(target=threading.Event().wait)
        self._thread.start()

    def close(self, *, waits: bool = True) -> None:
        super().close()
        if waits:
            self._thread.join()
