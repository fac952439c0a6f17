"""For tests of graphs: a model that answers by its prompt alone, programs drawn at random, a backend that counts."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

import jsg as sgl
from jsg import testing
from jsg.lang.executor.arguments import arguments_from_json
from jsg.lang.executor.posted import CallEvent, VariableEvent, execute
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_from_dict
from jsg.lang.streams.loop import shared_loop
from jsg.lang.words.ir import Gen
from tests.lang.scripted import ScriptedBackend

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def answer(prompt: str, gen: Gen) -> list[str]:
    """Two pieces that only the prompt decides, whatever runs beside."""
    digest = hashlib.sha256(f"{prompt}|{gen.args.max_tokens}".encode()).hexdigest()
    return [f"<{digest[:3]}", f"{digest[3:5]}>"]


def backend(answers: Any = answer) -> ScriptedBackend:
    return ScriptedBackend(answers, lambda prompt, select: select.choices[len(prompt) % len(select.choices)])


# Programs: a list of operations, carried out by the same body whether it is interpreted or traced.

_NAMES = st.sampled_from(["a", "b", "c"])
_TEXTS = st.sampled_from(["one ", "two\n", "{three} ", "%s 4 ", "ünï "])


def _ops(depth: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    leaf = st.one_of(
        st.tuples(st.just("text"), _TEXTS),
        st.tuples(st.just("argument")),
        st.tuples(st.just("gen"), _NAMES, st.integers(1, 3)),
        st.tuples(st.just("read"), _NAMES),
        st.tuples(st.just("select"), _NAMES),
        st.tuples(st.just("set"), _NAMES),
        st.tuples(st.just("text_so_far"), _NAMES),
        st.tuples(st.just("image")),
    )
    if depth == 0:
        return st.lists(leaf, max_size=3)
    inner = _ops(depth - 1)
    node = st.one_of(
        leaf,
        st.tuples(st.just("fork"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("concat"), st.lists(inner, min_size=1, max_size=2)),
        st.tuples(st.just("call"), inner),
        st.tuples(st.just("cond"), _NAMES, inner, inner),
        st.tuples(st.just("loop"), _NAMES, inner, st.integers(1, 3)),
        st.tuples(st.just("scope"), _NAMES, st.lists(leaf, max_size=2)),
        st.tuples(st.just("turn"), st.sampled_from(["user", "assistant"]), st.lists(leaf, max_size=2)),
    )
    return st.lists(node, max_size=4)


PLANS = _ops(2)


@sgl.function
def called(s, q, plan):
    s["a"], s["b"], s["c"] = "D", "E", "F"
    s += "called: "
    carry_out(s, q, plan, in_turn=False)
    return s["a"]


@sgl.function
def planned(s, q, plan):
    s["a"], s["b"], s["c"] = "A", "B", "C"
    carry_out(s, q, plan, in_turn=False)
    return [s["a"], {"b": s["b"]}, s.text()]


def carry_out(s, q, plan, *, in_turn):
    for op, *rest in plan:
        match op, rest:
            case "text", [text]:
                s += text
            case "argument", []:
                s += f"[{q}]"
            case "gen", [name, tokens]:
                s += "say " + sgl.gen(name, max_tokens=tokens)
            case "read", [name]:
                s += f"({s[name]})"
            case "select", [name]:
                s += sgl.select(name, ["yes", "no", "perhaps"])
            case "set", [name]:
                s[name] = f"{s[name]}!"
            case "text_so_far", [name]:
                s[name] = s.text()
            case "image", []:
                s += sgl.image(PNG)
            case "fork", [branches]:
                forks = s.fork(len(branches))
                for fork, inner in zip(forks, branches, strict=True):
                    carry_out(fork, q, inner, in_turn=in_turn)
                forks.join()
                for name in "abc":  # a list on one way through a cond and a text on the other could not be read
                    if isinstance(s[name], list):
                        s[name] = "+".join(f"{value}" for value in _flat(s[name]))
            case "concat", [branches]:
                forks = s.fork(len(branches))
                for fork, inner in zip(forks, branches, strict=True):
                    fork += "branch "
                    carry_out(fork, q, inner, in_turn=True)  # a branch that turned could not be joined
                forks.join("concate_and_append")
            case "call", [inner]:
                s += "from call: "
                s += called(q, inner).ret_value
            case "cond", [name, then, otherwise]:
                condition = sgl.any_of(sgl.contains(s[name], "a"), sgl.equals(s[name], "yes"))
                sgl.cond(
                    s,
                    condition,
                    lambda s, then=then: carry_out(s, q, then, in_turn=in_turn),
                    lambda s, otherwise=otherwise: carry_out(s, q, otherwise, in_turn=in_turn),
                )
                for variable in "abc":  # in a graph what one side sets counts as set, whichever way it goes
                    s[variable] = f"{s[variable]}"
            case "loop", [name, inner, rounds]:
                s[name] = "0"

                def body(s, name=name, inner=inner):
                    s[name] = f"{s[name]}1"
                    carry_out(s, q, inner, in_turn=in_turn)
                    s[name] = f"{s[name]}2"

                sgl.loop(s, body, until=lambda s, name=name: sgl.contains(s[name], "5"), max_rounds=rounds)
            case "scope", [name, inner]:
                with s.var_scope(name):
                    carry_out(s, q, inner, in_turn=in_turn)
            case "turn", [role, inner]:
                if in_turn:
                    continue
                with getattr(s, role)():
                    carry_out(s, q, inner, in_turn=True)


def _flat(value):
    if isinstance(value, list):
        return [one for item in value for one in _flat(item)] or [""]
    return ["" if value is None else value]


class CountingBackend:
    """Answers as `answer` does, keeps prefixes, and notes what was asked for, in order, and how much of it at a time.

    Attributes:
        log: What happened (call, hint, close), and to which prompt.
        max_running: Most calls and hints at a time.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.num_running = 0
        self.max_running = 0
        self._scripted = testing.ScriptedBackend(self._answer)

    @property
    def calls(self) -> list[str]:
        return [prompt for kind, prompt in self.log if kind == "call"]

    def open(self, *, num_api_spec_tokens: int | None = None) -> "CountingSession":
        return CountingSession(self, self._scripted.open())

    async def compute(self, kind: str, prompt: str) -> None:
        self.log.append((kind, prompt))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        for _ in range(20):  # so long that whatever can run beside it has begun
            await asyncio.sleep(0)
        self.num_running -= 1

    async def _answer(self, prompt: str, gen: Gen) -> list[str]:
        await self.compute("call", prompt)
        return answer(prompt, gen)


class CountingSession:
    """A scripted session that also takes hints and notes its end."""

    def __init__(self, backend: CountingBackend, scripted: testing.ScriptedSession):
        self._backend = backend
        self._scripted = scripted
        self.extend = scripted.extend
        self.generate = scripted.generate

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[CountingSession]":
        return [CountingSession(self._backend, fork) for fork in await self._scripted.fork(size)]

    async def join(self, branches: "Sequence[CountingSession]") -> None:
        await self._scripted.join([branch._scripted for branch in branches])

    async def hint(self) -> None:
        await self._backend.compute("hint", self._scripted.text)

    async def close(self) -> None:
        self._backend.log.append(("close", self._scripted.text))


class GraphServer(ScriptedBackend):
    """A backend that takes graphs as `jsg.RuntimeEndpoint` does, by way of JSON; the server is this process."""

    def __init__(self, reply=answer):
        super().__init__(reply)
        self.bodies = []
        self.num_ended = 0

    async def run_graph(self, graph, arguments, *, stream=False, sampling_params=None):
        self.bodies.append(json.loads(json.dumps([graph, arguments, stream, sampling_params])))
        graph, arguments, stream, sampling_params = self.bodies[-1]
        graph = graph_from_json(graph)
        try:
            async with execute(
                graph,
                self,
                arguments_from_json(graph, arguments),
                defaults=sampling_from_dict(sampling_params or {}),
            ) as run:
                if stream:
                    async for event in run.events():
                        if isinstance(event, CallEvent):
                            yield {"index": event.index, "call": event.call}
                            continue
                        failed = {"failed": True} if event.has_failed else {}
                        news = {"done": True, **failed} if event.is_done else {"delta": event.delta}
                        yield {"text": event.delta} if event.name is None else {"variable": event.name, **news}
                yield {"result": json.loads(json.dumps(await run.result()))}
        finally:
            self.num_ended += 1


@sgl.function
def two_gens(s, x):
    s += x + sgl.gen("first", max_tokens=4) + " then " + sgl.gen("second", max_tokens=4)


@sgl.function
def branches(s, x):
    s += x
    forks = s.fork(3)
    forks += lambda i: f"{i} " + sgl.gen("part")
    forks.join()
    s += ", ".join(f"{part}" for part in s["part"])


def run_here(coroutine):
    return shared_loop().submit(coroutine).result(60)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)
    return True


async def post(graph, where, arguments, **options):
    async with execute(graph, where, arguments, **options) as run:
        events = [event async for event in run.events() if isinstance(event, VariableEvent)]
        return events, await run.result()
