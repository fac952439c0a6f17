"""`/v1/programs`: programs that are sent whole, as graphs, and run on the server in one round trip."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Annotated, Any, final

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg import types
from jsg.constrained.text_patterns import PatternSet, TextPatterns
from jsg.errors import GrammarError, GraphError, JsgError, RequestError, TimeLimitError
from jsg.lang.executor.arguments import ArgumentValue, arguments_from_json
from jsg.lang.executor.beginning import Beginning, begin
from jsg.lang.executor.limits import ProgramLimits, check_limits, num_streams
from jsg.lang.executor.posted import CallEvent, ProgramRun, VariableEvent, execute
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_from_dict
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import Choose, Fork, Generate, Open, describe
from jsg.lang.graphs.reorder import varying_arguments
from jsg.lang.tokens.choices import check_draw, method_named
from jsg.lang.tokens.session import reports_of, sampling_of
from jsg.lang.words.ir import SamplingArgs
from jsg.prompt_ids import PromptIds
from jsg.server.caller import ApiCall, CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import new_rid
from jsg.server.http.body import Body
from jsg.server.http.event_stream import Event, Events, respond_with_events, until_disconnect
from jsg.server.http.failures import MAX_MESSAGE_CHARS, json_response
from jsg.server.http.json_body import BodyBytes, new_router
from jsg.server.native.generate import Salt
from jsg.server.native.lang_backend import Budget, FrontBackend, FrontModel
from jsg.server.native.program_batch import Item, run_items
from jsg.server.native.sampling import Object
from jsg.server.shared.fields import CACHE_SALT, EXTRA_KEY
from jsg.types import SamplingParams
from jsg.waits import WaitReason, waiting

LIMITS = ProgramLimits()
BEAT_S = 15.0
MAX_BATCH = 1024  # runs of one post, which is also the most streams that a program may have
RUN_UNITS = 0.5  # of `LoopShare`, for a run of a batch that begins
NODE_UNITS = 0.25  # of `LoopShare`, for a node that is handed to its stream and executed
MAX_ANSWER_CHARS = 2**24  # of all texts in an answer, and of all deltas

router = new_router()


class ProgramBody(Body):
    """What `/v1/programs` takes: a compiled program and the arguments of this run."""

    graph: Object = Field(description="The compiled program, as its `to_json()` gives it.")
    arguments: Object | None = Field(
        None,
        description="All arguments that the graph declares: name → a text, a number, or a picture or video as "
        '`{"image": base64, "media_type": ...}`.',
    )
    batch: Annotated[list[Object], Field(min_length=1, max_length=MAX_BATCH)] | None = Field(
        None,
        description="In place of `arguments`: the arguments of many runs. The answer has `results`, one for each, with "
        "its `item` and its `result` or `failure`; with `stream` each is an event as soon as its run has ended.",
    )
    sampling_params: Object | None = Field(
        None, description="The defaults of all calls of `gen`, under the names that `gen` uses, such as `max_tokens`."
    )
    stream: bool | None = Field(
        None, description="Answer with events that show the variables and the text as they grow."
    )
    cache_salt: Salt | None = Field(None, description=CACHE_SALT)
    extra_key: Salt | None = Field(None, description=EXTRA_KEY)


@router.post("/v1/programs")
async def programs(
    body: ProgramBody, body_bytes: BodyBytes, request: Request, call: CurrentCall, front: ReadyFront
) -> Response:
    """Runs a compiled program and gives its variables, its text and its return value.

    Parts that do not depend on each other run at the same time, and a prefix that several parts share is computed once.
    If a part fails, `errors` names its node and its line, and the answer still has the other variables. With `stream`,
    an event with `variable` and `delta` or `done` is about one variable, one with `text` has what is new of the text,
    one with `call` says that a call of the model has begun or ended, as the timeline shows it at `index`, and the last
    event has the whole answer as `result`. With `batch` it runs once for each item.
    """
    program = await front.threads.run(lambda: _Program(body), body_bytes)
    namespace = call.caller.namespace(body.cache_salt, body.extra_key)
    if body.batch is not None:
        results = _results(program, front, call, namespace)
        if body.stream:
            return respond_with_events(request, results, beat_s=BEAT_S)
        return json_response(await until_disconnect(request, _all_of(results)))
    if body.stream:
        return respond_with_events(request, _events(program, front, call, namespace), beat_s=BEAT_S)
    return json_response(await until_disconnect(request, _answer(program, front, call, namespace)))


@final
class _Program:
    """A program that was checked and may run."""

    def __init__(self, body: ProgramBody) -> None:
        """Reads and checks a program, which takes long for a large one. Raises RequestError, which names the node."""
        self.graph = graph_from_json(body.graph)
        if body.batch is not None and body.arguments is not None:
            raise RequestError("arguments and batch exclude each other; give the arguments of many runs as batch")
        is_one = body.batch is None
        self.items = [self._item(each, is_one=is_one) for each in body.batch or [body.arguments or {}]]
        self.defaults = sampling_from_dict(body.sampling_params or {})
        fit = [item for item in self.items if not isinstance(item, JsgError)]
        self._pattern_nodes = check_limits(self.graph, fit[0], LIMITS, self.defaults, further=fit[1:]) if fit else {}
        self._known: Mapping[str, ArgumentValue] = fit[0] if fit else {}
        self._varying = varying_arguments(self.graph.arguments, fit)
        self.num_streams = num_streams(self.graph)
        _check_calls(self.graph, self.defaults)

    def _item(self, source: Object, *, is_one: bool) -> Item:
        try:
            return arguments_from_json(self.graph, source)
        except JsgError as error:
            if is_one:
                raise
            return error

    @property
    def arguments(self) -> Mapping[str, ArgumentValue]:
        """The arguments of a program that runs once."""
        (item,) = self.items
        assert not isinstance(item, JsgError), "such a program is refused"
        return item

    def run(
        self,
        front: Front,
        model: FrontModel,
        arguments: Mapping[str, ArgumentValue],
        tenant: str,
        patterns: TextPatterns | None,
        beginning: Beginning | None = None,
    ) -> contextlib.AbstractAsyncContextManager[ProgramRun]:
        """A run of the program, whose nodes take the turns of their key."""
        return execute(
            self.graph,
            FrontBackend(model),
            arguments,
            defaults=self.defaults,
            limits=LIMITS,
            patterns=patterns,
            pace=functools.partial(front.generator.share.turn, tenant, NODE_UNITS),
            beginning=beginning,
        )

    async def begin(self, front: Front, model: FrontModel, tenant: str) -> Beginning:
        """What all items have in common."""
        pace = functools.partial(front.generator.share.turn, tenant, NODE_UNITS)
        return await begin(self.graph, FrontBackend(model), self._known, self._varying, pace)

    async def patterns(self, front: Front, owner: str) -> TextPatterns | None:
        """The patterns of its conditions, which a grammar process compiles together; None where it has none.

        Raises:
            GraphError: A pattern is refused. The message names its node.
            JsgError: As `GrammarCompiler.tables`.
        """
        patterns = tuple(self._pattern_nodes)
        if not patterns:
            return None
        try:
            with waiting(WaitReason.GRAMMAR):
                tables = await front.client.grammars.patterns(PatternSet("matches", patterns), owner)
        except GrammarError as error:
            is_of_all = error.param == "matches"
            node = None if is_of_all else self._pattern_nodes.get(error.param or "")
            place = "" if node is None else f"{describe(node)}: "
            raise GraphError(f"{place}{error}", param="graph") from None
        return TextPatterns(patterns, tables)


def _check_calls(graph: Graph, defaults: SamplingArgs) -> None:
    """Raises GraphError for a call of the model whose arguments it would refuse, whatever its prompt."""
    opened: dict[int, SamplingArgs] = {}  # the defaults of each stream
    for node in graph.nodes():
        try:
            match node:
                case Open():
                    opened[node.stream] = defaults if node.defaults is None else node.defaults.over(defaults)
                case Fork(branches=branches):
                    opened |= dict.fromkeys(branches, opened[node.stream])
                case Generate(args=args):
                    _check_gen(args.over(opened[node.stream]))
                case Choose(method=method, temperature=temperature):
                    method_named(method)
                    check_draw(method, temperature)
                case _:
                    pass
        except RequestError as error:
            raise GraphError(f"{describe(node)}: {error}", param="graph") from None


def _check_gen(args: SamplingArgs) -> None:
    """Raises RequestError where a request with these sampling parameters and reports would be refused."""
    sampling = dataclasses.replace(SamplingParams.from_dict(sampling_of(args)), n=1)
    reports = reports_of(args)
    reports.pop("return_text_in_logprobs", None)
    if "logprob_start_len" in reports:  # its upper bound is the length of a prompt that is not known yet
        reports["logprob_start_len"] = min(reports["logprob_start_len"], 1)
    types.Request(rid="check", input_ids=PromptIds.of((0,)), sampling=sampling, **reports)


@contextlib.asynccontextmanager
async def _running(
    program: _Program, front: Front, call: ApiCall, namespace: str, *, is_read: bool
) -> AsyncIterator[ProgramRun]:
    """Lets a program in, compiles its patterns and runs it; its time limit covers all of this. Raises JsgError."""
    admission, tenant = front.generator.admission, call.caller.tenant
    model = FrontModel(front, call, namespace=namespace, budget=Budget(), waits=True, is_read=is_read)
    with admission.program(tenant):
        try:
            async with (
                _limited(front),
                admission.streams(tenant, program.num_streams),
                program.run(front, model, program.arguments, tenant, await program.patterns(front, tenant)) as run,
            ):
                yield run
        finally:
            await model.close()


@contextlib.asynccontextmanager
async def _limited(front: Front) -> AsyncIterator[None]:
    """Surrounds a run of a program, or what many runs share. Raises TimeLimitError where it takes too long."""
    limit_s = front.generator.admission.config.program_timeout
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise TimeLimitError(
            f"a program may take {limit_s:g} s (--program-timeout), but this one took longer; ask for fewer new "
            "tokens, or run it in parts"
        ) from None


async def _results(program: _Program, front: Front, call: ApiCall, namespace: str) -> AsyncGenerator[Events]:
    """The results of a batch, behind an event without one. All items together have the limits of one program.

    The key's room for answers limits how many run at a time; the time limit of an item begins when it does.
    """
    tenant, admission = call.caller.tenant, front.generator.admission
    model = FrontModel(front, call, namespace=namespace, budget=Budget(), waits=True, is_read=False)
    num_chars = 0

    with admission.program(tenant):
        async with _limited(front):
            patterns = await program.patterns(front, tenant)
            beginning = await program.begin(front, model, tenant)
        yield {"object": "program.batch", "items": len(program.items)}

        async def run(arguments: Mapping[str, ArgumentValue]) -> dict[str, Any]:
            nonlocal num_chars
            await front.generator.share.turn(tenant, RUN_UNITS)
            async with (
                admission.streams(tenant, program.num_streams),
                _limited(front),
                program.run(front, model, arguments, tenant, patterns, beginning) as running,
            ):
                result = await running.result()
                num_chars += _num_chars(result)
                _check_size(num_chars)
                return _shown(result)

        results = run_items(program.items, run, admission.config.max_requests_per_key or MAX_BATCH)
        try:
            async with contextlib.aclosing(results):
                async for some in results:
                    yield some
        finally:
            await model.close()


async def _all_of(results: AsyncGenerator[Events]) -> dict[str, Any]:
    found = [event async for some in results if isinstance(some, list) for event in some]
    found.sort(key=lambda event: event["item"])
    return {"id": f"programs-{new_rid()}", "object": "program.batch", "results": found}


async def _answer(program: _Program, front: Front, call: ApiCall, namespace: str) -> dict[str, Any]:
    async with _running(program, front, call, namespace, is_read=False) as run:
        return _checked(await run.result())


async def _events(program: _Program, front: Front, call: ApiCall, namespace: str) -> AsyncGenerator[Event]:
    news = _News()

    async def collect() -> None:
        async with _running(program, front, call, namespace, is_read=True) as run:
            num_chars = 0
            async for event in run.events():
                match event:
                    case CallEvent(index, shown):
                        news.add_call(index, shown)
                    case VariableEvent(name, delta, is_done, has_failed):
                        num_chars += len(delta)
                        _check_size(num_chars)
                        news.add(name, delta, is_done=is_done, has_failed=has_failed)
            news.end(_checked(await run.result()))

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(lambda _: news.wake())
    try:
        while True:
            await news.come()
            for event in news.take():
                yield event
            if collecting.done():
                for event in news.take():
                    yield event
                await collecting  # raises the error of the program
                return
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


@final
class _News:
    """What a client does not know yet. However slow the client is, all new text of a variable becomes one event."""

    def __init__(self) -> None:
        self._texts: dict[str | None, list[str]] = {}
        self._done: set[str | None] = set()
        self._failed: set[str | None] = set()
        self._calls: dict[int, dict[str, Any]] = {}
        self._result: dict[str, Any] | None = None
        self._is_some = asyncio.Event()

    def add(self, name: str | None, delta: str, *, is_done: bool, has_failed: bool = False) -> None:
        """Adds text of a variable, or of the program for None."""
        if has_failed:
            self._failed.add(name)
        self._texts.setdefault(name, []).append(delta)
        if is_done:
            self._done.add(name)
        self._is_some.set()

    def add_call(self, index: int, call: dict[str, Any]) -> None:
        """Adds what is known now of a call of the model."""
        self._calls[index] = call
        self._is_some.set()

    def end(self, result: dict[str, Any]) -> None:
        """Adds the whole answer."""
        self._result = result

    def wake(self) -> None:
        """Ends the wait of `come`, because there is news or the program has ended."""
        self._is_some.set()

    async def come(self) -> None:
        """Waits for news."""
        await self._is_some.wait()
        self._is_some.clear()

    def take(self) -> list[Event]:
        """The events since the last call."""
        events: list[Event] = [{"index": index, "call": call} for index, call in self._calls.items()]
        self._calls = {}
        for name, texts in self._texts.items():
            if text := "".join(texts):
                events.append({"text": text} if name is None else {"variable": name, "delta": text})
            if name is not None and name in self._done:
                failed: Event = {"failed": True} if name in self._failed else {}
                events.append({"variable": name, "done": True} | failed)
        self._texts = {}
        if self._result is not None:
            events.append({"result": self._result})
            self._result = None
        return events


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    _check_size(_num_chars(result))
    return _shown(result)


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    errors = [_shown_error(error) for error in result["errors"]]
    return {"id": f"program-{new_rid()}", "object": "program", **result, "errors": errors}


def _shown_error(error: dict[str, Any]) -> dict[str, Any]:
    """A failure of the program, without details that only the server's log may have."""
    is_known = error["type"] in _error_names(JsgError)
    return error | {
        "type": error["type"] if is_known else JsgError.__name__,
        "message": error["message"][:MAX_MESSAGE_CHARS],
    }


def _error_names(kind: type[JsgError]) -> set[str]:
    return {kind.__name__}.union(*map(_error_names, kind.__subclasses__()))


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_ANSWER_CHARS:
        raise RequestError(
            f"the variables, the text and the return value of a program may have {MAX_ANSWER_CHARS} characters in all, "
            "but these have more; return less",
            param="graph",
        )


def _num_chars(value: Any) -> int:
    """The characters of all texts in a JSON value; every other value, list and object counts as one."""
    total = 0
    waiting = [value]
    while waiting and total <= MAX_ANSWER_CHARS:
        item = waiting.pop()
        match item:
            case str():
                total += len(item)
            case dict():
                total += sum(map(len, item)) + 1
                waiting += item.values()
            case list() | tuple():
                total += 1
                waiting += item
            case _:
                total += 1
    return total
