"""A backend that passes everything on, and notes each call of the model: its times, its tokens, its prompt.

It also takes away what the ablations take away: the parallelism of a program, and the hint of a fork.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from bench.paper.sequences import Sequences
from jsg.errors import UnsupportedError
from jsg.lang.http.client import HttpClient
from jsg.lang.http.endpoint import MAX_RETRIES, RuntimeEndpoint
from jsg.lang.http.model import HttpModel
from jsg.lang.tokens.model import Hold, ScoredChoices, TokenCall, TokenDelta, TokenModel
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.backend import Backend, BatchSession, Piece, PromptItem, Selection, Session
from jsg.lang.words.ir import Gen, Select, Text
from jsg.processing.parts import Part
from jsg.speech.prompts.turns import ChatTurns

TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of the model. Times are those of `time.perf_counter`, tokens those that the engine reports.

    Attributes:
        sent_s, first_s, ended_s: When it was made, when its first text came, and when its last text came.
        prompt_tokens, cached_tokens, completion_tokens: What it was charged for; None where the engine does not say.
    """

    sent_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None

    @staticmethod
    def of(sent_s: float, first_s: float, meta: dict[str, Any] | None) -> "Call":
        """A call that ends now with this report."""
        counts = [(meta or {}).get(name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
        return Call(sent_s, first_s, time.perf_counter(), *counts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How programs are run.

    Attributes:
        one_by_one: The calls of one program follow each other in the order in which they are made.
        hints_forks: A fork computes the common prompt before its branches need it.
        compiles_always: Each call has a regular expression that no call had before, for the same texts.
        forgotten: The share of calls that find nothing in the cache.
        ends_at: Texts at which an answer ends, and it also ends where the model ends it. Without them an answer has as
            many tokens as the program says.
        endless: The engine ends no answer by itself, so no call asks it not to.
        opening: What each program begins with. An engine that has run the same programs in another way then finds
            nothing of them in its cache.
    """

    one_by_one: bool = False
    hints_forks: bool = True
    compiles_always: bool = False
    forgotten: float = 0.0
    ends_at: tuple[str, ...] = ()
    endless: bool = False
    opening: str = ""


class RecordedBackend:
    """A `jsg.lang.words.backend.Backend`.

    Attributes:
        calls: The calls so far.
    """

    def __init__(self, backend: Backend, ways: Ways):
        """Programs on this are programs on `backend`."""
        self.calls: list[Call] = []
        self._backend = backend
        self._ways = ways
        self._num_forms = 0

    def as_backend(self) -> Backend:
        """Gives itself."""
        return self

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """Opens a session of the backend."""
        turn = asyncio.Lock() if self._ways.one_by_one else None
        return RecordedSession(self._backend.open(), self, self._ways, turn, self._ways.opening)

    async def flush_cache(self) -> bool:
        """Does what the backend does."""
        return await self._backend.flush_cache()

    async def server_info(self) -> dict[str, Any]:
        """Does what the backend does."""
        return await self._backend.server_info()

    async def close(self) -> None:
        """Does what the backend does."""
        await self._backend.close()

    def fresh(self, regex: str) -> str:
        """A regular expression for the same texts that nobody has compiled."""
        self._num_forms += 1
        return f"{regex}(?:{self._num_forms}{id(self)}){{0}}"


class RecordedSession:
    """A session that notes its calls. Where an engine cannot join branches, their texts follow each other."""

    def __init__(
        self, session: Session, backend: RecordedBackend, ways: Ways, turn: asyncio.Lock | None, opening: str = ""
    ):
        self._opening = opening
        self._session = session
        self._backend = backend
        self._ways = ways
        self._turn = turn or contextlib.nullcontext()
        self._written: list[str] = []  # since it was opened or forked

    @property
    def own_texts(self) -> frozenset[str]:
        return getattr(self._session, "own_texts", frozenset())

    @own_texts.setter
    def own_texts(self, texts: frozenset[str]) -> None:
        if hasattr(self._session, "own_texts"):
            cast(BatchSession, self._session).own_texts = texts

    async def extend(self, item: PromptItem) -> str:
        if self._opening:
            opening, self._opening = self._opening, ""
            await self._session.extend(Text(opening))
        added = await self._session.extend(item)
        self._written.append(added)
        return added

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        gen = self._changed(gen)
        async with self._turn:
            sent_s, first_s, meta = time.perf_counter(), None, None
            async for piece in self._session.generate(gen):
                if first_s is None and piece.text:
                    first_s = time.perf_counter()
                self._written.append(piece.text)
                meta = piece.meta or meta
                yield piece
            self._backend.calls.append(Call.of(sent_s, first_s or time.perf_counter(), meta))

    def _changed(self, gen: Gen) -> Gen:
        """The call as it is made in this way."""
        form, changes = gen.args.given().get("regex"), {}
        if self._ways.compiles_always and form is not None:
            changes["regex"] = self._backend.fresh(form)
        if self._ways.ends_at and form is None:
            changes |= {"ignore_eos": False, "stop": self._ways.ends_at}
        if self._ways.endless:
            changes["ignore_eos"] = None
        return dataclasses.replace(gen, args=dataclasses.replace(gen.args, **changes)) if changes else gen

    async def select(self, select: Select) -> Selection:
        async with self._turn:
            sent_s = time.perf_counter()
            selection = await self._session.select(select)
            self._backend.calls.append(Call.of(sent_s, time.perf_counter(), selection.meta))
        self._written.append(selection.choice)
        return selection

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> Sequence[Session]:
        try:
            branches = await self._forked(size, position_ids_offset)
        except UnsupportedError:  # texts that follow each other need no offsets
            branches = await self._forked(size, None)
        turn = self._turn if isinstance(self._turn, asyncio.Lock) else None
        return [RecordedSession(branch, self._backend, self._ways, turn) for branch in branches]

    async def _forked(self, size: int, offsets: Sequence[int] | None) -> Sequence[Session]:
        if self._ways.hints_forks:
            return await self._session.fork(size, offsets)
        # A fork into one branch has no prompt in common with another.
        each = [None] * size if offsets is None else [[offset] for offset in offsets]
        return [branch for offset in each for branch in await self._session.fork(1, offset)]

    async def join(self, branches: Sequence[Session]) -> None:
        ours = [branch for branch in branches if isinstance(branch, RecordedSession)]
        try:
            await self._session.join([branch._session for branch in ours])
        except UnsupportedError:
            for branch in ours:
                await self.extend(Text("".join(branch._written)))

    async def close(self) -> None:
        await self._session.close()


class NotedModel:
    """A `TokenModel` that notes the tokens of all prompts and answers."""

    def __init__(self, next_model: Callable[[], TokenModel], sequences: Sequences):
        """`next_model` gives the model for the next call."""
        self._next_model = next_model
        self._sequences = sequences

    async def turns(self) -> ChatTurns:
        return await self._next_model().turns()

    async def generate(self, call: TokenCall) -> AsyncIterator[TokenDelta]:
        async for delta in self._next_model().generate(call):
            if (outcome := delta.outcome) is not None:
                is_cut = outcome.meta["finish_reason"]["type"] == "length"
                self._sequences.generated(call.prompt, outcome.part_ids, outcome.kept_ids, is_cut=is_cut)
            yield delta

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        scored = await self._next_model().score(prompt, choices, unconditional=unconditional)
        answers = [choice.token_ids for choice in scored.choices]
        self._sequences.scored(prompt, scored.part_ids, scored.common_ids, answers)
        return scored

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        return await self._next_model().hold(prompt)


class NotedBackend:
    """A jsg server, whose prompts `sequences` gets."""

    def __init__(self, url: str, sequences: Sequences, forgotten: float):
        """`forgotten` is the share of calls that find nothing in the cache."""
        self._endpoint = RuntimeEndpoint(url, timeout_s=TIMEOUT_S)
        self._http = HttpClient(url, api_key=None, timeout_s=TIMEOUT_S, max_retries=MAX_RETRIES, verify=True)
        usual, drawn, salts = HttpModel(self._http, cache_salt=None), random.Random(0), itertools.count()

        def next_model() -> TokenModel:
            return HttpModel(self._http, cache_salt=f"{next(salts)}") if drawn.random() < forgotten else usual

        self._model = NotedModel(next_model, sequences)

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """Opens an empty session."""
        return TokenSession(self._model)

    async def flush_cache(self) -> bool:
        """Does what the server does."""
        return await self._endpoint.flush_cache()

    async def server_info(self) -> dict[str, Any]:
        """Does what the server does."""
        return await self._endpoint.server_info()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()
        await self._endpoint.close()
