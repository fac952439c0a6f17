"""Prompts in, answers out: every endpoint generates through this module."""

import asyncio
import contextlib
import dataclasses
import functools
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from jsg.config import ServerConfig
from jsg.constrained.special_tokens import check_names
from jsg.constrained.stop_patterns import finders, pattern_set
from jsg.constrained.text_patterns import PatternSet
from jsg.engine.child.protocol import ModelInfo
from jsg.engine.front.grammar_queue import AT_ONCE
from jsg.engine.front.served import ServedEngine
from jsg.errors import QueueFullError, RequestError, check_length
from jsg.processing.stop_strings import MakeFinder
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import PromptIds
from jsg.server.caller import ApiCall
from jsg.server.deltas import Deltas, NextTurn
from jsg.server.limits import Admission
from jsg.server.loop_share import IDS_PER_UNIT, PER_UNIT, LoopShare
from jsg.server.observer import Begun, Observer
from jsg.server.text_threads import TextThreads
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt, with_common_point
from jsg.speech.answers.tool_calls import nameable_tokens
from jsg.types import FinishReason, FinishType, GrammarSpec, RequestOutput, SamplingParams, altered
from jsg.waits import WaitReason, waiting

HELD = FinishReason(FinishType.STOP)
MAX_ANSWERS = 1024  # of one HTTP request: prompts times n
MAX_PROMPT_TOKENS = 2**23  # of one HTTP request, each prompt counted n times; a token takes 40 bytes in the engine
TOKENS_PER_UNIT = 4096  # of a prompt, in units of `LoopShare`
MAX_SCORES = 2**19  # log-probabilities of one HTTP request; the front takes about a second to make JSON of so many


@final
class Generation:
    """The answers to one HTTP request, while they are made.

    Attributes:
        call: The HTTP request.
        answers: `n` for each prompt in turn.
        started_at: `time.monotonic()` when it was accepted.
    """

    def __init__(
        self,
        call: ApiCall,
        prompts: Sequence[Prompt],
        answers: Sequence[Answer],
        client: ServedEngine,
        admission: Admission,
        share: LoopShare,
        next_turn: NextTurn,
        observers: Sequence[Observer],
    ) -> None:
        self.call = call
        self.answers = answers
        self.started_at = time.monotonic()
        self._client = client
        self._admission = admission
        self._share = share
        self._observers = observers
        self._begun = Begun(call.route, call.user, prompts, answers, self.started_at)
        self._deltas = Deltas(len(answers), next_turn)
        self._ends: dict[int, Callable[[], None]] = {}  # what ends the request of each answer that is under way
        self._leave: Callable[[], None] = _nothing
        self._watch_hold: Callable[[Callable[[], None]], None] = _nothing
        self._is_held = False
        self._timer: asyncio.TimerHandle | None = None
        # However many grammars the request brings, few of them stand in the line of its key at a time: else they would
        # wait too long for each other, and the grammars of other requests would wait for all of them.
        self._grammar_turns = asyncio.Semaphore(AT_ONCE)

    @contextlib.contextmanager
    def run(self, *, is_read: bool = True) -> Iterator[Deltas]:
        """Generates all answers side by side during the block, which may be left early. May be entered once.

        Args:
            is_read: Somebody reads the answers as they grow. Otherwise they come in fewer and larger deltas.

        Raises:
            ShuttingDownError, RateLimitError, RequestError: The request is not let in.
        """
        entering = self._admission.enter(self.call.caller.tenant, len(self.answers), is_let_in=self.call.is_let_in)
        with contextlib.ExitStack() as stack:
            try:
                leave = stack.enter_context(entering)
            except QueueFullError as error:
                for observer in self._observers:
                    observer.on_start(self._begun)
                    observer.on_end(self._begun, error)
                raise
            yield stack.enter_context(self._under_way(is_read=is_read, leave=leave))

    @contextlib.contextmanager
    def hold(self) -> Iterator[Deltas]:
        """Holds the prompt of its one answer, whose request is a hold, in the cache. May be entered once.

        There is a delta without finish once the prompt is cached. The last delta comes when the hold ends by itself:
        after `--hold-timeout`, when the server ends, or when the engine needs the memory. To leave the block ends the
        hold too. To observers the answer finishes when the prompt is cached: the wait that follows is no latency.

        Raises:
            ShuttingDownError, RateLimitError: The hold is not let in.
        """
        with (
            self._admission.hold(self.call.caller.tenant) as self._watch_hold,
            self._under_way(is_read=True, leave=_nothing) as deltas,
        ):
            yield deltas

    async def complete(self) -> None:
        """Generates all answers to their ends. Raises as `run` and `Deltas`."""
        with self.run(is_read=False) as deltas:
            async for _ in deltas:
                pass

    @contextlib.contextmanager
    def _under_way(self, *, is_read: bool, leave: Callable[[], None]) -> Iterator[Deltas]:
        self._leave = leave
        ending: BaseException | None = None
        for observer in self._observers:
            observer.on_start(self._begun)
        loop = asyncio.get_running_loop()
        beginning = asyncio.Task(self._begin_all(is_read=is_read), loop=loop, eager_start=True)
        try:
            self._watch_time()
            yield self._deltas
        except BaseException as error:
            ending = error
            raise
        finally:
            beginning.cancel()
            if self._timer is not None:
                self._timer.cancel()
            while self._ends:
                self._ends.popitem()[1]()
            self._deltas.close()
            for observer in self._observers:
                observer.on_end(self._begun, None if self._is_held else ending)
            ending = None  # else its traceback, which has this frame, would hold it and all of the request

    async def _begin_all(self, *, is_read: bool) -> None:
        """Begins the answers, each in its turn. A long prompt takes as much time as several short ones."""
        tenant = self.call.caller.tenant
        try:
            for index, answer in enumerate(self.answers):
                await self._share.turn(tenant, 1 + len(answer.request.input_ids) / TOKENS_PER_UNIT)
                self._ends[index] = self._client.begin(
                    answer.request,
                    tenant,
                    functools.partial(self._take, index),
                    is_streamed=is_read or not answer.ends_in_engine,
                    grammar_turns=self._grammar_turns,
                )
        except Exception as error:
            self._deltas.fail(error)

    def _take(self, index: int, output: RequestOutput | Exception) -> None:
        """The sink of one answer: see `streams.Sink`. An error ends the generation."""
        if isinstance(output, Exception):
            self._deltas.fail(output)
            return
        try:
            answer = self.answers[index]
            delta = answer.push(output)
            if not self._is_held:
                self._show(answer, delta)
            if delta.finish is not None:
                if delta.finish.type is FinishType.ERROR:
                    raise delta.finish.to_error(answer.request.sampling.grammar)
                self._leave()
                self._ends.pop(index)()  # the engine knows no stop string
            self._deltas.put(index, delta)
        except Exception as error:
            self._deltas.fail(error)

    def _show(self, answer: Answer, delta: AnswerDelta) -> None:
        is_hold = answer.request.hold
        shown = dataclasses.replace(delta, finish=delta.finish or HELD) if is_hold else delta
        for observer in self._observers:
            observer.on_delta(self._begun, answer, shown)
        if is_hold and delta.finish is None:
            self._is_held = True
            self._watch_hold(self._release)

    def _release(self) -> None:
        """Ends a hold whose time is over."""
        if self._ends:
            self._take(0, RequestOutput(rid=self.answers[0].request.rid, finish=FinishReason(FinishType.STOP)))

    def _watch_time(self) -> None:
        """Ends the generation at the time by which an answer must have its first token or its end, if there is one."""
        still_open = [answer for answer in self.answers if answer.finish is None]
        has_token = all(answer.token_ids for answer in still_open)
        due, loop = self._admission.due(self.started_at, has_token=has_token), asyncio.get_running_loop()
        if due is None or not still_open or self._is_held:
            return
        if loop.time() < due:
            self._timer = loop.call_at(due, self._watch_time)
        else:
            self._deltas.fail(self._admission.exceeded(has_token=has_token))


@final
class Generator:
    """Makes a `Generation` of the prompts of a request, on one event loop.

    Attributes:
        tokenizer: The model's.
        admission: Lets generations in or refuses them.
        share: Gives turns of the event loop to whoever makes many things of a request.
    """

    def __init__(
        self,
        client: ServedEngine,
        tokenizer: Tokenizer,
        *,
        random_seed: int,
        threads: TextThreads | None = None,
        config: ServerConfig | None = None,
        observers: Sequence[Observer] = (),
        has_several_keys: bool = False,
        admission: Admission | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.admission = admission or Admission(
            config or ServerConfig(), capacity=lambda: client.most_requests, has_several_keys=has_several_keys
        )
        self.share, self._next_turn = LoopShare(), NextTurn()
        self._client = client
        self._threads = threads or TextThreads()
        self._seeds = random.Random(random_seed)
        self._observers = observers

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._client.info

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """The written forms of the special tokens that a grammar for this model may name."""
        return frozenset(nameable_tokens(self.tokenizer, self.info.vocab_size, self.info.eos_token_ids).values())

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[tuple[int, ...] | PromptIds]:
        """The tokens of each prompt; texts are encoded beside the event loop. Raises RequestError."""
        limit = self.info.max_request_tokens

        def ids_of(prompt: str | list[int]) -> tuple[int, ...] | PromptIds:
            if isinstance(prompt, str):  # a list of texts may be millions of tokens, which would be as many objects
                return PromptIds.of_any(self.tokenizer.encode(prompt, max_tokens=limit))
            return tuple(prompt)

        def encode_all() -> list[tuple[int, ...] | PromptIds]:
            return list(map(ids_of, prompts))

        return await self._threads.run(encode_all, sum(len(p) for p in prompts if isinstance(p, str)))

    async def beside[T](self, work: Callable[[], T], num_chars: int) -> T:
        """The result of work on texts of so many characters. Long work is done beside the event loop."""
        return await self._threads.run(work, num_chars)

    async def begin(self, call: ApiCall, prompts: Sequence[Prompt]) -> Generation:
        """The generation of `n` answers to each prompt. Nothing runs before `run` or `hold` is called.

        Everything that `n` multiplies is checked before it is multiplied.

        Raises:
            RequestError: More than `MAX_ANSWERS`, `MAX_PROMPT_TOKENS` or `MAX_SCORES`, or a prompt that is too long
                with its new tokens.
            GrammarError: A grammar names a special token that the model does not have, or a stop pattern is refused.
            QueueFullError: Stop patterns could not be compiled in time.
            ShuttingDownError, RateLimitError: There are stop patterns, and the request is not let in.
        """
        info = self.info
        for prompt in prompts:
            prompt.check_task(info.embedder)
            num_new = 0 if prompt.embed else prompt.sampling.max_new_tokens
            check_length(len(prompt.input_ids), num_new, info.max_request_tokens)
        for grammar in {id(prompt.sampling): prompt.sampling.grammar for prompt in prompts}.values():
            if isinstance(grammar, GrammarSpec):
                check_names(grammar, self.markers)
        num_answers = sum(prompt.sampling.n for prompt in prompts)
        if num_answers > MAX_ANSWERS:
            raise RequestError(
                f"prompts times n must be at most {MAX_ANSWERS} answers, but got {num_answers}; send several requests"
            )
        num_tokens = sum(len(prompt.input_ids) * prompt.sampling.n for prompt in prompts)
        if num_tokens > MAX_PROMPT_TOKENS:
            raise RequestError(
                f"prompts times n must be at most {MAX_PROMPT_TOKENS} prompt tokens, but got {num_tokens}; send "
                "several requests"
            )
        num_scores = sum(prompt.num_scores for prompt in prompts)
        if num_scores > MAX_SCORES:
            raise RequestError.of(
                "return_logprob",
                f"may report at most {MAX_SCORES} log-probabilities (scored positions times alternatives times "
                f"answers), but this request asks for up to {num_scores}; ask for fewer alternatives or new tokens, or "
                "send several requests",
            )
        if info.caches_states:
            prompts = await self.beside(functools.partial(with_common_point, prompts), num_tokens)
        makers = await self._finders(call, [prompt.sampling for prompt in prompts], num_answers)
        answers: list[Answer] = []
        for prompt, patterns in zip(prompts, makers, strict=True):
            units = prompt.sampling.n / PER_UNIT + len(prompt.input_ids) / IDS_PER_UNIT
            await self.share.turn(call.caller.tenant, units)
            marked = altered(prompt, post=call.post)
            answers += marked.answers(self.tokenizer, self._seeds.getrandbits(63), info.vocab_size, patterns)
        observers = self._observers if call.observer is None else (*self._observers, call.observer)
        return Generation(call, prompts, answers, self._client, self.admission, self.share, self._next_turn, observers)

    async def _finders(
        self, call: ApiCall, samplings: Sequence[SamplingParams], num_answers: int
    ) -> list[MakeFinder | None]:
        """For each, what makes the finders of its stop patterns, which a grammar process compiles; None without any.

        Nothing is compiled for a request that is not going to be let in.
        """
        tenant, wanted = call.caller.tenant, [pattern_set(sampling) for sampling in samplings]
        makers: dict[PatternSet | None, MakeFinder | None] = {None: None}
        for patterns in wanted:
            if patterns is not None and patterns not in makers:
                if not call.is_let_in:  # else it has room already
                    self.admission.check(tenant, num_answers, is_let_in=False)
                with waiting(WaitReason.GRAMMAR):
                    tables = await self._client.grammars.patterns(patterns, tenant)
                makers[patterns] = finders(patterns.patterns, tables)
        return [makers[patterns] for patterns in wanted]


def new_rid() -> str:
    """A name for a request that its client did not name."""
    return secrets.token_hex(16)


def _nothing(*_: Any) -> None:
    """Does nothing."""
