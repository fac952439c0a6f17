"""Programs drawn at random whose variables hold values of every type, and all ways in which a program can run."""

import json
from typing import Any

from hypothesis import strategies as st

import jsg as sgl
from jsg.errors import UnknownVariableError
from jsg.lang.executor.arguments import arguments_from_json
from jsg.lang.executor.beginning import begin
from jsg.lang.executor.posted import execute
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_from_dict
from jsg.lang.graphs.reorder import varying_arguments
from tests.lang.graph_programs import GraphServer, backend

QUESTIONS = st.sampled_from(["why", "no"])
ARGUMENTS = st.sampled_from([3, 2.0, True, "t"])
NAMES = ["a", "b", "c", "d"]  # `d` is set on some ways only
_NAMES = st.sampled_from(NAMES)
_SCALARS = st.sampled_from([None, True, False, 0, 1, -7, 2**40, 0.5, 1.0, -0.0, "", "word", " x "])
_FLAT = st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3), st.lists(_SCALARS, max_size=2).map(tuple))
_VALUES = st.recursive(
    _FLAT,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from(["k", "l"]), inner, max_size=2),
    ),
    max_leaves=6,
)
CONDITIONS = st.sampled_from(["always", "never", "argument", "text", "round"])


def _ops(depth: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    leaf = st.one_of(
        st.tuples(st.just("set"), _NAMES, _VALUES),
        st.tuples(st.just("copy"), _NAMES, _NAMES),
        st.tuples(st.just("item"), _NAMES, _NAMES, st.integers(0, 2)),
        st.tuples(st.just("wrap"), _NAMES, _NAMES),
        st.tuples(st.just("format"), _NAMES, _NAMES),
        st.tuples(st.just("write"), _NAMES),
        st.tuples(st.just("argument"), _NAMES),
        st.tuples(st.just("gen"), _NAMES, st.sampled_from([1, 2])),
        st.tuples(st.just("each"), _NAMES, _NAMES),
    )
    if depth == 0:
        return st.lists(leaf, max_size=3)
    inner = _ops(depth - 1)
    node = st.one_of(
        leaf,
        st.tuples(st.just("fork"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("call"), inner),
        st.tuples(st.just("cond"), CONDITIONS, inner, inner),
        st.tuples(st.just("loop"), inner, st.integers(1, 3)),
    )
    return st.lists(node, max_size=5)


PLANS = _ops(2)


@sgl.function
def called(s, q, n, plan):
    s["a"], s["round"] = n, "r"
    carry_out(s, q, n, plan)
    return [s["a"]]


@sgl.function
def typed(s, q, n, plan):
    s["a"], s["b"], s["c"], s["round"] = None, [1, None, "x"], (True, 2.5), "r"
    carry_out(s, q, n, plan)
    return s["a"], {"b": s["b"]}, [n, q]


def scalars(value) -> bool:
    """Whether each part can be put into text, in a trace too."""
    return not isinstance(value, list | tuple | dict)


def carry_out(s, q, n, plan):
    for op, *rest in plan:
        match op, rest:
            case "set", [name, value]:
                s[name] = value
            case "copy", [name, source] if source in s:
                s[name] = s[source]
            case "item", [name, source, index] if source in s:
                value = s[source]
                if isinstance(value, list | tuple) and index < len(value):
                    s[name] = value[index]
            case "wrap", [name, source] if source in s:
                s[name] = [s[source], {"k": s[source]}, (s[source], 1)]
            case "format", [name, source] if source in s and scalars(s[source]):
                s[name] = f"{s[source]}"
            case "write", [name] if name in s and scalars(s[name]):
                s += f"({s[name]})"
            case "argument", [name]:
                s[name] = n
            case "gen", [name, number]:
                s += "say " + sgl.gen(name, max_tokens=4, n=number)
            case "each", [name, source] if source in s and isinstance(s[source], list | tuple):
                s[name] = [f"{value}" if scalars(value) else value for value in s[source]]
            case "fork", [branches]:
                forks = s.fork(len(branches))
                for index, (fork, inner) in enumerate(zip(forks, branches, strict=True)):
                    fork += f"[{index}]"
                    carry_out(fork, q, n, inner)
                forks.join()
                s["round"] = "r"  # no list, which the loops could not go on with
            case "call", [inner]:
                s["a"] = called(q, n, inner).ret_value
            case "cond", [which, then, otherwise]:
                conditions = {
                    "always": sgl.equals("x", "x"),
                    "never": sgl.equals("x", "y"),
                    "argument": sgl.contains(q, "y"),
                    "text": sgl.contains(s.text(), "5"),
                    "round": sgl.contains(s["round"], "rr"),
                }
                sgl.cond(
                    s,
                    conditions[which],
                    lambda s, then=then: carry_out(s, q, n, then),
                    lambda s, otherwise=otherwise: carry_out(s, q, n, otherwise),
                )
            case "loop", [inner, rounds]:

                def body(s, inner=inner):
                    s["round"] = s["round"] + "r"
                    carry_out(s, q, n, inner)

                sgl.loop(s, body, max_rounds=rounds)


def seen(state) -> Any:
    """All that a state holds at its end, with the types of all values."""
    found = {}
    for name in NAMES:
        try:
            found[name] = shown(state[name])
        except UnknownVariableError:
            found[name] = "unset"
    return found, shown(state.ret_value), state.text()


def shown(value) -> Any:
    match value:
        case list() | tuple():
            return type(value).__name__, [shown(item) for item in value]
        case dict():
            return {key: shown(item) for key, item in value.items()}
    return type(value).__name__, repr(value)


def ways(plan, **arguments):
    """Runs a plan interpreted and in each way in which a graph runs; gives what each leaves."""
    yield "interpreted", seen(typed.run(plan=plan, backend=backend(), **arguments))
    compiled = typed.compile(plan=plan)
    yield "here", seen(compiled.run(backend=backend(), **arguments))
    for stream in (False, True):
        yield f"posted {stream=}", seen(compiled.run(backend=GraphServer(), stream=stream, **arguments))
    _, state = compiled.run_batch([arguments | {"q": "other"}, arguments], backend=PostServer())
    yield "in a post", seen(state)


class PostServer(GraphServer):
    """A backend that takes many runs of a graph in one post, as a server does."""

    async def run_graphs(self, graph, batch, *, sampling_params=None):
        graph, items, defaults = json.loads(json.dumps([graph, batch, sampling_params or {}]))
        graph = graph_from_json(graph)
        runs = [arguments_from_json(graph, item) for item in items]
        beginning = await begin(graph, self, runs[0], varying_arguments(graph.arguments, runs))
        for index, run in enumerate(runs):
            options = {"defaults": sampling_from_dict(defaults), "beginning": beginning}
            async with execute(graph, self, run, **options) as running:
                yield {"item": index, "result": json.loads(json.dumps(await running.result()))}
