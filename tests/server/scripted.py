"""The application in this process, around an engine that says what a test tells it and remembers its requests."""

import abc
import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
from starlette.testclient import TestClient

from jsg.config import EngineConfig, ServerConfig
from jsg.constrained.compiler import compile_tables
from jsg.constrained.text_patterns import PatternSet, PatternTables, pattern_tables
from jsg.engine.child.protocol import ModelInfo
from jsg.engine.front.streams import Sink
from jsg.engine.media_reader import ModelMediaReader
from jsg.errors import JsgError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.app import create_app
from jsg.server.front import Front, FrontDoor
from jsg.server.generation import Generator
from jsg.server.media_sources import MediaSources, media_limits
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.step_reports import ConstraintReport
from jsg.token_scores import TokenScores
from jsg.types import (
    FinishReason,
    FinishType,
    GrammarSpec,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from tests.scored import scores_of

END = 257  # <|im_end|>
END_OF_TEXT = FinishReason(FinishType.STOP, matched=END)
INFO = ModelInfo(
    model_path="fake",
    context_length=8192,
    vocab_size=512,
    eos_token_ids=(END,),
    dtype="float32",
    kv_dtype="float32",
    device="fake",
    max_running_requests=8,
    max_total_tokens=65_536,
    max_request_tokens=8192,
    page_size=1,
)


class InPlaceCompiler:
    """In place of a `GrammarCompiler`, without its processes.

    Attributes:
        given: What was compiled, and for whom.
    """

    def __init__(self) -> None:
        self.given: list[tuple[GrammarSpec | PatternSet, str]] = []

    async def tables(self, spec: GrammarSpec, owner: str = "") -> bytes:
        self.given.append((spec, owner))
        return compile_tables(spec).to_bytes()

    async def patterns(self, patterns: PatternSet, owner: str = "") -> PatternTables:
        self.given.append((patterns, owner))
        return pattern_tables(patterns)


class Generating(abc.ABC):
    """In place of an `EngineClient`, with a generator in place of a sink."""

    @abc.abstractmethod
    def generate(self, request: Request, owner: str = "", **options: Any) -> AsyncGenerator[RequestOutput]:
        """The outputs of a request."""

    def begin(self, request: Request, owner: str, sink: Sink, **options: Any) -> Callable[[], object]:
        async def run() -> None:
            try:
                async with contextlib.aclosing(self.generate(request, owner, **options)) as outputs:
                    async for output in outputs:
                        sink(output)
            except Exception as error:
                sink(error)

        return asyncio.create_task(run()).cancel


class ScriptedClient(Generating):
    """In place of an `EngineClient`. The log-probability of every token is -0.5.

    Attributes:
        answer: What every request is answered with, at most its `max_new_tokens` tokens of it.
        finish: Why it ends there.
        step_len: Tokens in one output.
        goes_on: Whether an output may follow another one; a test sets it that wants to have seen the first.
        failure: What every request raises instead.
        score: The log-probability of each token that is asked for, given the tokens up to it and its index.
        requests: All that came.
        held: Those whose prompts are held now.
        break_holds: Set it, and holds end.
    """

    info = INFO
    is_alive = True
    is_stalled = False
    takes_grammars = False
    most_requests = 10_000

    @property
    def engines(self) -> "tuple[ScriptedClient]":
        return (self,)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.answer = "hello"
        self.finish = END_OF_TEXT
        self.step_len = 3
        self.goes_on: Callable[[], bool] = lambda: True
        self.failure: JsgError | None = None
        self.score: Callable[[Sequence[int], int], float] = lambda _ids, _index: -0.5
        self.requests: list[Request] = []
        self.grammar_turns: list[object] = []
        self.streamed: list[bool] = []  # of each of them, whether its outputs are wanted as they come
        self.held: list[Request] = []
        self.break_holds = asyncio.Event()
        self.grammars = InPlaceCompiler()
        self._tokenizer = tokenizer

    async def generate(
        self, request: Request, owner: str = "", *, is_streamed: bool = True, grammar_turns: object = None
    ) -> AsyncGenerator[RequestOutput]:
        self.requests.append(request)
        self.grammar_turns.append(grammar_turns)
        self.streamed.append(is_streamed)
        if self.failure is not None:
            raise self.failure
        if request.hold:
            async with contextlib.aclosing(self._hold(request)) as outputs:
                async for output in outputs:
                    yield output
            return
        ids = [*self._tokenizer.encode(self.answer, add_special_tokens=False), END]
        limit = request.sampling.max_new_tokens
        end = (
            self.finish
            if len(ids) <= limit or self.finish.type is FinishType.ABORT
            else FinishReason(FinishType.LENGTH)
        )
        ids = ids[:limit]
        prompt_logprobs = self._prompt_logprobs(request)
        if not ids:
            yield RequestOutput(
                rid=request.rid, finish=end, prompt_tokens=len(request.input_ids), prompt_logprobs=prompt_logprobs
            )
        for start in range(0, len(ids), self.step_len):
            step = tuple(ids[start : start + self.step_len])
            is_last = start + self.step_len >= len(ids)
            await asyncio.sleep(0.0005)  # so that the reader has its turn, and outputs are not joined
            while start and not self.goes_on():
                await asyncio.sleep(0)
            report = ConstraintReport(
                is_forced=(True, *(False,) * (len(step) - 1)), kept_mass=(0.5,) * len(step), is_complete=is_last
            )
            yield RequestOutput(
                rid=request.rid,
                token_ids=step,
                finish=end if is_last else None,
                prompt_tokens=len(request.input_ids),
                logprobs=self._logprobs(request, step) if request.return_logprob else (),
                prompt_logprobs=prompt_logprobs if start == 0 else None,
                constraint=report if request.sampling.return_constraint else None,
            )

    def _logprobs(self, request: Request, step: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Of tokens that were asked for, as if each came right behind the prompt."""
        chosen = self._chosen(request, len(request.input_ids))
        return tuple(TokenLogprob(token, -0.5, chosen=chosen) for token in step)

    def _prompt_logprobs(self, request: Request) -> TokenScores | None:
        if not request.wants_prompt_logprobs:
            return None
        ids = request.input_ids
        return scores_of(
            TokenLogprob(ids[i], self.score(ids, i) if i else None, chosen=self._chosen(request, i) if i else ())
            for i in range(request.logprob_start_len, len(ids))
        )

    def _chosen(self, request: Request, index: int) -> tuple[tuple[int, float], ...]:
        before = request.input_ids[:index]
        return tuple((token, self.score([*before, token], index)) for token in request.token_ids_logprob)

    async def _hold(self, request: Request) -> AsyncGenerator[RequestOutput]:
        self.held.append(request)
        try:
            await asyncio.sleep(0)
            yield RequestOutput(rid=request.rid, prompt_tokens=len(request.input_ids))
            await self.break_holds.wait()
            yield RequestOutput(rid=request.rid, finish=FinishReason(FinishType.STOP))
        finally:
            self.held.remove(request)


class ScriptedServer:
    """A server that is ready.

    Attributes:
        engine: Says what it is told to.
        http: Talks to the application.
    """

    def __init__(
        self, tokenizer_dir: Path, *, model_dir: Path | None = None, info: ModelInfo = INFO, **knobs: Any
    ) -> None:
        """With the pictures that the model in `model_dir` takes, if there is one."""
        self.tokenizer = _tokenizer(tokenizer_dir)
        self.engine = ScriptedClient(self.tokenizer)
        self.engine.info = info
        client: Any = self.engine
        config = ServerConfig(**knobs)
        door = FrontDoor()
        generator = Generator(client, self.tokenizer, random_seed=0, threads=door.threads)
        reader = None
        if model_dir is not None:
            reader = ModelMediaReader.of_model(model_dir, self.tokenizer, media_limits(config))
        media = MediaSources(reader, door.threads, config)
        chat = ChatPrompt(self.tokenizer, info.max_request_tokens, reader, caches_states=info.caches_states)
        door.front = Front(client, generator, chat, door.threads, EngineConfig(model_path="fake"), config, media)
        self.http = TestClient(create_app(door, config), "http://localhost", raise_server_exceptions=False)

    def reset(self) -> None:
        """Makes the engine say what it says at first, and forgets the requests that came to it."""
        vars(self.engine).update(vars(ScriptedClient(self.tokenizer)))

    @property
    def request(self) -> Request:
        """The last one that reached the engine."""
        return self.engine.requests[-1]

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt(self) -> str:
        """The text of the last one's prompt."""
        return self.tokenizer.decode(self.request.input_ids, skip_special_tokens=False)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=self.http)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=self.http)


@functools.lru_cache(8)
def _tokenizer(directory: Path) -> Tokenizer:
    """That of a directory, which nobody changes after it was written."""
    return load_tokenizer(directory)


TOOL_TEMPLATE = (  # Hermes's form
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
