"""Graphs as data: what a server does with them."""

import asyncio
import gc
import threading
import weakref

import pytest

import jsg as sgl
from jsg.errors import AbortedError, GraphError, RequestError
from jsg.lang.executor.arguments import arguments_from_json, arguments_to_json
from jsg.lang.executor.limits import ProgramLimits, check_limits
from jsg.lang.executor.posted import CallEvent, ProgramRun, VariableEvent, execute
from jsg.lang.graphs.check import graph_from_json
from tests.lang.graph_programs import PNG, backend, branches, post, run_here, two_gens, until
from tests.lang.scripted import ScriptedBackend


@sgl.function
def posted(s, q, photo):
    s += q + sgl.image(photo)
    s += sgl.gen("a", max_tokens=5)
    forks = s.fork(2)
    forks += lambda i: f"{i}" + sgl.gen("b", max_tokens=5, n=2)
    forks.join()
    s["broken"] = f"{s['b'][1][0]}"
    return {"a": s["a"], "n": 1}


def test_a_posted_graph_gives_events_and_a_result():
    graph = posted.trace()
    arguments = arguments_from_json(graph, arguments_to_json({"q": "why ", "photo": sgl.image(PNG)}))
    where = backend()
    events, result = asyncio.run(post(graph, where, arguments))
    texts = {"a": "", "broken": ""}
    for event in events:
        if event.name in texts:
            texts[event.name] += event.delta
    assert texts["a"] == result["variables"]["a"] == result["return_value"]["a"]
    assert [event for event in events if event.is_done] == [
        event for event in events if event == VariableEvent(event.name, is_done=True)
    ]
    assert {event.name for event in events if event.is_done} == {"a", "b", "broken", None}
    assert result["text"] == f"why <image {len(PNG)}>{result['variables']['a']}" and result["errors"] == []
    assert result["failed"] == {"variables": {}, "text": None, "return_value": None}
    assert result["usage"]["calls"] == 3 and result["meta_info"]["a"]["completion_tokens"] == 2
    assert where.num_open == 0


def test_a_posted_graph_tells_when_a_call_of_which_node_begins_and_ends():
    graph = posted.trace()

    async def run():
        async with execute(graph, backend(), {"q": "why ", "photo": sgl.image(PNG)}) as run:
            return [event async for event in run.events() if isinstance(event, CallEvent)], await run.result()

    events, result = asyncio.run(run())
    seen: dict[int, list[dict]] = {}
    for event in events:
        seen.setdefault(event.index, []).append(event.call)
    assert [calls[-1] for _, calls in sorted(seen.items())] == result["timeline"]
    assert all([call["end_s"] is None for call in calls] == [True, False] for calls in seen.values())
    nodes = {node.id: node for node in graph.nodes() if type(node).__name__ == "Generate"}
    assert sorted(call["node"] for call in result["timeline"]) == sorted(nodes)
    assert all(call["line"] == nodes[call["node"]].line for call in result["timeline"])


def test_a_posted_graph_tells_what_failed_where():
    def fail(prompt, gen):
        if prompt.endswith("1"):
            raise RequestError("refused")
        return "fine"

    graph = posted.trace()
    arguments = {"q": "why ", "photo": sgl.image(PNG)}
    _, result = asyncio.run(post(graph, ScriptedBackend(fail), arguments))
    node = next(node for node in graph.nodes() if node.stream == 2 and type(node).__name__ == "Generate")
    (error,) = result["errors"]
    assert (error["node"], error["type"], error["message"]) == (node.id, "RequestError", "refused")
    assert (error["file"], error["line"]) == ("test_posted.py", int(node.line.partition(":")[2]))
    assert result["failed"] == {"variables": {"b": 0, "broken": 0}, "text": None, "return_value": None}
    assert result["variables"] == {"a": "fine", "b": None, "broken": None}
    assert result["return_value"] == {"a": "fine", "n": 1}


def test_an_error_that_is_none_of_ours_does_not_get_out(caplog):
    def fail(prompt, gen):
        raise OSError("/secret/path")

    graph = two_gens.trace()
    _, result = asyncio.run(post(graph, ScriptedBackend(fail), {"x": "x"}))
    assert [error["message"] for error in result["errors"]] == ["internal error"]
    assert "/secret/path" in caplog.text


async def test_leaving_the_block_cancels_the_program():
    started = asyncio.Event()

    async def forever(prompt, gen):
        started.set()
        await asyncio.Event().wait()

    where = ScriptedBackend(forever)
    async with execute(branches.trace(), where, {"x": "x"}):
        await started.wait()
    await until(lambda: where.num_open == 0)
    where = where
    assert len(where.aborted) >= 1


@sgl.function
def many_failures(s):
    """Branches, joined values, conditions, texts made of values and called programs, each behind a gen that fails."""
    forks = s.fork(8)
    for number, fork in enumerate(forks):
        fork += f"{number} " + sgl.gen("a", max_tokens=5)
        fork += fork["a"] + sgl.gen("b", max_tokens=5)
    forks.join()
    sides = s.fork(3)
    sides += sgl.gen("c", max_tokens=5)
    sides.join("concate_and_append")
    s["broken"] = f"{s['b'][1]}{s['a'][0]}"
    inner = two_gens(x="in ")
    s += inner.text() + sgl.gen("d", max_tokens=5)
    return [s["broken"], s["d"]]


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_nothing_of_a_run_that_failed_waits_for_the_collector(how: str):
    """A program with 256 branches whose budget was spent left 29 000 objects, which took the front 59 ms."""
    graph = many_failures.trace()
    calls: list[str] = []

    async def fail(prompt, gen):
        calls.append(prompt)
        if how == "cancelled":
            await asyncio.Event().wait()
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RequestError("refused") from error

    async def main() -> list[weakref.ref]:
        async with execute(graph, ScriptedBackend(fail), {}) as run:
            followed = asyncio.create_task(_all_events(run))
            if how == "failed":
                assert len((await run.result())["errors"]) >= 12
            else:
                while len(calls) < 8:  # all forks wait for their first answer
                    await asyncio.sleep(0)
        await followed
        execution = run._execution
        made = [execution, *execution.streams, *(stream.runner for stream in execution.streams)]
        assert len(made) > 20
        return [weakref.ref(each) for each in made]

    gc.collect()
    gc.disable()
    try:
        left = [type(ref()).__name__ for ref in asyncio.run(main()) if ref() is not None]
    finally:
        gc.enable()
    assert left == []


async def _all_events(run: ProgramRun) -> None:
    async for _ in run.events():
        pass


def test_no_threads_are_started():
    async def main():
        threads = threading.active_count()
        async with execute(branches.trace(), backend(), {"x": "x"}) as run:
            await run.result()
            return threading.active_count() - threads

    assert asyncio.run(main()) == 0


def test_arguments_are_exactly_those_of_the_graph():
    graph = posted.trace()
    photo = {"image": "AAAA", "media_type": "image/png"}
    for source, message in (
        ([], "must be an object"),
        ({"q": "a"}, "needs the argument 'photo'"),
        ({"q": "a", "photo": photo, "z": 1}, "no argument 'z'"),
        ({"q": [], "photo": photo}, "'q' must be text or a number"),
        ({"q": "\ud800", "photo": photo}, "lone surrogate"),
        ({"q": "a", "photo": "/etc/passwd"}, "'photo' must be an object with the field image"),
        ({"q": "a", "photo": {"image": "!", "media_type": "image/png"}}, "must be base64"),
        ({"q": "a", "photo": {**photo, "path": "x"}}, "no field 'path'"),
    ):
        with pytest.raises(GraphError, match=message):
            arguments_from_json(graph, source)


@sgl.function
def large(s, q):
    s += q
    sgl.loop(s, lambda s: s.extend("text" + sgl.gen("x", max_tokens=10, n=2)), max_rounds=5)
    forks = s.fork(3)
    forks += sgl.select("y", ["abc", q])
    sgl.cond(s, sgl.matches(q, "a+"), lambda s: s.extend("b"))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"nodes": 10}, r"node 10 \(append.*nodes up to 10, but this one has 11"),
        ({"steps": 76}, r"node 9 \(cond.*steps up to 76, but this one has 77"),
        ({"outputs": 1}, r"outputs up to 1, but this one has 2"),
        ({"patterns": 0}, r"\(cond.*patterns up to 0"),
        ({"pattern_chars": 1}, r"\(cond.*pattern_chars up to 1, but this one has 2"),
        ({"calls": 9}, r"gen 'x'.*calls up to 9, but this one has 10"),
        ({"calls": 12}, r"select 'y'.*calls up to 12"),
        ({"streams": 3}, r"\(fork.*streams up to 3, but this one has 4"),
        ({"fan_out": 2}, r"\(fork.*fan_out up to 2"),
        ({"new_tokens": 99}, r"gen 'x'.*new_tokens up to 99, but this one has 100"),
        ({"text_chars": 23}, r"append.*text_chars up to 23, but this one has 24"),
        ({"text_chars": 44}, r"select 'y'.*text_chars"),
        ({"rounds": 4}, r"\(loop.*rounds up to 4, but this one has 5"),
    ],
)
def test_limits_are_checked_before_anything_runs(limits, message):
    graph = large.trace()
    check_limits(graph, {"q": "four"}, ProgramLimits())
    exact = {"nodes": 11, "steps": 77, "outputs": 2, "patterns": 1, "pattern_chars": 2, "calls": 13, "streams": 4}
    exact |= {"fan_out": 3, "new_tokens": 100, "text_chars": 46, "rounds": 5}
    check_limits(graph, {"q": "four"}, ProgramLimits(**exact))
    with pytest.raises(GraphError, match=message):
        check_limits(graph, {"q": "four"}, ProgramLimits(**{**exact, **limits}))


def test_patterns_are_given_with_their_nodes_and_are_compiled_elsewhere():
    @sgl.function
    def program(s, q):
        sgl.cond(s, sgl.any_of(sgl.matches(q, "(a"), sgl.matches(q, "b+")), lambda s: s.extend("c"))
        sgl.cond(s, sgl.matches(q, "b+"), lambda s: s.extend("d"))

    patterns = check_limits(program.trace(), {"q": "x"}, ProgramLimits())
    assert [(pattern, node.id) for pattern, node in patterns.items()] == [("(a", 1), ("b+", 1)]


def test_text_that_doubles_is_stopped():
    @sgl.function
    def program(s):
        s["x"] = "0123456789"
        sgl.loop(s, lambda s: s.set_var("x", f"{s['x']}{s['x']}"), max_rounds=100)

    async def main():
        limits = ProgramLimits(text_chars=1_000_000)
        check_limits(program.trace(), {}, limits)
        async with execute(program.trace(), backend(), {}, limits=limits) as run:
            return await run.result()

    result = asyncio.run(main())
    assert "more text than is allowed" in result["errors"][0]["message"]


def doubling(size, copies):
    """A graph whose last variable is a list of `copies` of the one before, `size` times."""
    node = {"kind": "assign", "stream": 0, "line": "a.py:1", "name": "v"}
    nodes = [
        {"kind": "open", "id": 0, "stream": 0, "line": "a.py:1", "program": "p"},
        {**node, "id": 1, "value": {"text": ["a"]}},
    ]
    for number in range(2, size + 2):
        last = {"variable": {"node": number - 1, "name": "v"}}
        nodes.append({**node, "id": number, "value": {"list": [last] * copies}})
    graph = {"jsg_graph": 1, "name": "p", "arguments": [], "nodes": nodes}
    return graph | {"outputs": {}, "returns": {"variable": {"node": size + 1, "name": "v"}}}


@pytest.mark.parametrize("kept", ["returns", "outputs"])
@pytest.mark.parametrize(
    ("size", "copies", "message"),
    [(40, 2, "65536 characters in all"), (64, 2, "in all"), (65, 1, "64 deep"), (3000, 1, "64 deep")],
)
def test_what_doubles_or_nests_without_end_is_not_written_into_an_answer(kept, size, copies, message):
    source = doubling(size, copies)
    if kept == "outputs":
        source["outputs"] = {"v": source.pop("returns")}
        source["returns"] = {"constant": None}
    graph = graph_from_json(source)
    check_limits(graph, {}, ProgramLimits())
    limits = ProgramLimits(answer_chars=2**16)  # all that is allowed is written before it is refused
    with pytest.raises(RequestError, match=message):
        asyncio.run(post(graph, backend(), {}, limits=limits))


def test_other_tasks_have_their_turn_while_an_answer_is_written():
    async def main():
        num_turns = 0

        async def other():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with execute(graph_from_json(doubling(14, 2)), backend(), {}, limits=ProgramLimits()) as run:
            await run._execution.ended.get()
            task = asyncio.create_task(other())
            result = await run.result()
            task.cancel()
            return result, num_turns

    result, num_turns = asyncio.run(main())
    assert str(result["return_value"]).count("a") == 2**14
    assert num_turns >= 2**15 // 1000  # one for each thousand of the items that are written


def test_a_program_that_is_cancelled_before_it_began_ends():
    async def main():
        where = backend()
        state = two_gens.compile().run("x", backend=where)
        state.cancel()  # on the loop itself: the program's task has had no turn yet
        for read in (state.settle(), state.aget("first"), state.atext(), state.aret_value()):
            with pytest.raises(AbortedError):
                await asyncio.wait_for(read, 10)
        return where

    where = run_here(main())
    assert where.calls == [] and where.num_open == 0


async def test_a_block_that_is_left_at_once_ends():
    where = backend()
    async with asyncio.timeout(10):
        async with execute(two_gens.trace(), where, {"x": "x"}):
            pass
    assert (where).calls == []


def test_reading_the_text_within_limits_does_not_come_between_a_fork_and_its_join():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks[0] += "one"
        forks[1] += "two"
        s["before"] = s.text()
        forks.join("concate_and_append")
        s["after"] = s.text()
        return s["after"]

    _, result = asyncio.run(post(program.trace(), backend(), {}, limits=ProgramLimits()))
    assert result["errors"] == [] and result["variables"] == {"before": "", "after": "onetwo"}
    _, result = asyncio.run(post(program.trace(), backend(), {}, limits=ProgramLimits(text_chars=5)))
    assert "more text than is allowed" in result["errors"][0]["message"]
