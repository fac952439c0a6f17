"""The model behind a jsg server. Each call sends the prompt in parts, most of which are tokens that exist."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, final

from jsg.errors import BackendError, NotFoundError, QueueFullError, RateLimitError
from jsg.lang.http.client import HttpClient
from jsg.lang.http.parts import id_lists, outcome, scored_choices
from jsg.lang.http.sent_files import SentFiles
from jsg.lang.tokens.model import Hold, ScoredChoices, TokenCall, TokenDelta
from jsg.processing.growing_text import GrowingText
from jsg.processing.parts import Part
from jsg.speech.prompts.turns import ChatTurns

MAX_CALLS = 256  # at a time, because each takes a connection, and most processes may open only 1024 files
MAX_HOLDS = 256
TEMPLATE_PATH = "/get_chat_template"
_PREFILL = {"max_new_tokens": 0}


@final
class HttpModel:
    """A `tokens.model.TokenModel` over HTTP."""

    def __init__(self, http: HttpClient, *, cache_salt: str | None) -> None:
        self._http = http
        self._common = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._template: dict[str, Any] | None = None
        self._turns: ChatTurns | None = None
        self._num_holds = 0
        self._files = SentFiles()
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def turns(self) -> ChatTurns:
        """Gives the chat template of the model.

        Raises:
            RequestError: The model has none.
            JsgError: The server failed, or is no jsg server.
        """
        if self._turns is None:
            template = await self._handshake()
            with self._understood(TEMPLATE_PATH):
                text, bos_token, eos_token = (template[name] for name in ("chat_template", "bos_token", "eos_token"))
                placeholders = dict(template.get("placeholders", {}))  # an older server has none
            self._turns = ChatTurns(text, bos_token=bos_token, eos_token=eos_token, placeholders=placeholders)
        return self._turns

    async def generate(self, call: TokenCall) -> AsyncGenerator[TokenDelta]:
        """Continues a prompt, as the server sends the text. Closing the iterator early disconnects, which aborts.

        Raises:
            JsgError: The request is wrong, or the server failed.
        """
        body = {"sampling_params": call.sampling, "stream": True, **call.reports, **self._common}
        if is_incremental := _has(await self._handshake(), "sends_increments"):
            body["incremental"] = True
        answers: dict[int, dict[str, Any]] = {}
        texts: dict[int, GrowingText] = {}
        async with self._room(), contextlib.aclosing(self._events(call.prompt, body)) as events:
            async for event in events:
                with self._understood("/generate"):
                    index, text = int(event.get("index", 0)), str(event["text"])
                answers[index] = event
                before = texts.setdefault(index, GrowingText())
                new = text if is_incremental else text[len(before) :]
                before.append(new)
                if index == 0 and new:
                    yield TokenDelta(new)
        with self._understood("/generate"):
            last = outcome([answers[index] | {"text": str(texts[index])} for index in range(len(answers))])
        yield TokenDelta("", last)

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        """Scores choices in one call. Raises JsgError."""
        body = {"choices": list(choices), "unconditional": unconditional} | self._common
        may_name = _has(await self._handshake(), "keeps_files")
        async with self._room():
            for written in self._files.attempts(prompt, may_name=may_name):
                try:
                    answer = await self._http.post("/select", {"prompt": written.json} | body)
                except NotFoundError:
                    if not written.named:
                        raise
                    self._files.refused(written)
                    continue
                self._files.taken(written)
                with self._understood("/select"):
                    return scored_choices(answer)
        raise AssertionError("the last attempt names nothing")

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Computes a prompt, and keeps it cached until the hold is released.

        Where the server, or this process, has too many holds already, the prompt is only computed.

        Raises:
            JsgError: The prompt is wrong, or the server failed.
        """
        body = {"sampling_params": _PREFILL, "stream": True} | self._common
        if self._num_holds < MAX_HOLDS:
            self._num_holds += 1
            events = self._events(prompt, body | {"hold": True}, max_retries=0)
            is_held = False

            async def end() -> None:
                self._num_holds -= 1
                await events.aclose()

            try:
                first: Any = await anext(events, None)  # any other answer is an error below
                with self._understood("/generate"):
                    hold = Hold(id_lists(first["meta_info"]["part_ids"]), end)
                is_held = True
                return hold
            except (QueueFullError, RateLimitError):
                pass
            finally:
                if not is_held:
                    await end()
        async with self._room(), contextlib.aclosing(self._events(prompt, body)) as computed:
            answers = [event async for event in computed]
        with self._understood("/generate"):
            return Hold(id_lists(answers[-1]["meta_info"]["part_ids"]))

    async def _events(
        self, prompt: tuple[Part, ...], fields: Mapping[str, Any], *, max_retries: int | None = None
    ) -> AsyncGenerator[Any]:
        """Gives the events of `/generate`. Names files that were sent before, and sends them if the server forgot them.

        Raises:
            JsgError: As `HttpClient.events` does.
        """
        for written in self._files.attempts(prompt, may_name=_has(await self._handshake(), "keeps_files")):
            body = {"prompt": written.json, **fields}
            has_begun = False
            try:
                async with contextlib.aclosing(self._http.events("/generate", body, max_retries=max_retries)) as events:
                    async for event in events:
                        if not has_begun:
                            has_begun = True
                            self._files.taken(written)
                        yield event
                return
            except NotFoundError:
                if has_begun or not written.named:
                    raise
                self._files.refused(written)

    async def _handshake(self) -> dict[str, Any]:
        """Gets the chat template once, which also shows whether the server is a jsg server."""
        template = self._template
        if template is None:
            try:
                template = self._template = await self._http.get(TEMPLATE_PATH)
            except NotFoundError:
                raise BackendError(
                    f"a RuntimeEndpoint must be a jsg server, whose prompts are text and tokens in parts, but "
                    f"{self._http.base_url} has no {TEMPLATE_PATH}; for another server with OpenAI's API use "
                    "jsg.OpenAI(model, base_url=...)",
                    404,
                ) from None
        return template

    def _room(self) -> asyncio.Semaphore:
        """Gives the semaphore of the running loop, which limits the connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._rooms:
            self._rooms[loop] = asyncio.Semaphore(MAX_CALLS)
        return self._rooms[loop]

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{self._http.base_url}{path} must answer as this version of jsg does, but {error!r} is wrong with "
                "its answer; run the same version on both sides"
            ) from error


def _has(template: Any, ability: str) -> bool:
    """Says whether a server has an ability. An older server does not say it."""
    return isinstance(template, dict) and template.get(ability) is True
