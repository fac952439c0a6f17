"""Programs that call programs, and reads where an event loop runs."""

import asyncio
import concurrent.futures
import sys
import threading
import types

import pytest

import jsg as sgl
from jsg.errors import ProgramError
from tests.lang.scripted import Gate, ScriptedBackend
from tests.lang.test_remote_graph import GraphServer


@sgl.function
def plain_leaf(s, q):
    s += q + sgl.gen("x")
    return s["x"]


@sgl.function
async def async_leaf(s, q):
    s += q + sgl.gen("x")
    return await s.aget("x")


@sgl.function
def plain_caller(s, leaf, n):
    states = [leaf(str(i)) for i in range(n)]
    return [(state["x"], state.ret_value) for state in states]


@sgl.function
async def async_caller(s, leaf, n):
    states = [leaf(str(i)) for i in range(n)]
    return [(await state.aget("x"), await state.aret_value()) for state in states]


@pytest.mark.parametrize("leaf", [plain_leaf, async_leaf])
@pytest.mark.parametrize("caller", [plain_caller, async_caller])
@pytest.mark.parametrize("way", ["run", "stream", "arun", "batch"])
def test_called_programs_run_beside_their_caller_though_their_bodies_read(caller, leaf, way):
    gate, num_waiting = Gate(), 0

    async def answer(prompt, gen):
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 4:
            gate.open()
        await asyncio.wait_for(gate.passed(), 30)  # opened by the last of them
        return f"<{prompt}>"

    backend = ScriptedBackend(answer)
    match way:
        case "run" | "stream":
            state = caller.run(leaf, 4, backend=backend, stream=way == "stream")
        case "arun":
            state = asyncio.run(caller.arun(leaf, 4, backend=backend))
        case _:
            (state,) = caller.run_batch([(leaf, 4)], backend=backend)
    assert state.ret_value == [(f"<{i}>", f"<{i}>") for i in range(4)]


def test_a_call_that_is_awaited_is_at_its_end_and_raises_what_its_body_raised():
    @sgl.function
    async def failing(s):
        raise ValueError("mine")

    @sgl.function
    async def caller(s):
        for leaf in (plain_leaf, async_leaf):
            state = await leaf("q")
            assert state["x"] == state.ret_value == "A"  # all is known: reading needs no await
        first, second = await asyncio.gather(plain_leaf("a"), async_leaf("b"))
        with pytest.raises(ValueError, match="mine"):
            await failing()
        return [first.ret_value, second.ret_value]

    assert caller.run(backend=ScriptedBackend("A")).ret_value == ["A", "A"]
    compiled = sgl.function(lambda s: [plain_leaf_no_read("a")["x"]]).compile()
    assert compiled.run(backend=ScriptedBackend("A")).ret_value == ["A"]


@sgl.function
async def plain_leaf_no_read(s, q):
    s += q + sgl.gen("x")


@pytest.mark.parametrize("where", ["plain", "here", "server"])
def test_awaiting_a_call_means_the_same_in_a_compiled_program(where):
    @sgl.function
    async def caller(s):
        state = await plain_leaf_no_read("q")
        return state["x"] if where != "plain" else await state.aget("x")

    backend = GraphServer(lambda prompt, gen: "A")
    run = caller.run if where == "plain" else lambda **options: caller.compile().run(where=where, **options)
    assert run(backend=backend).ret_value == "A"


def test_a_called_body_that_raises_fails_where_its_state_is_read_and_nothing_else():
    @sgl.function
    def failing(s, q):
        s += q + sgl.gen("x")
        raise ValueError("mine")

    @sgl.function
    def caller(s):
        state = failing("q")
        s += sgl.gen("y")
        for read in (lambda: state.ret_value, state.sync, lambda: state["z"]):
            with pytest.raises(ValueError, match="mine"):
                read()
        return s["y"]

    assert caller.run(backend=ScriptedBackend("A")).ret_value == "A"


@pytest.mark.parametrize("way", ["run", "arun", "batch"])
def test_a_call_that_nobody_awaits_runs_to_its_end_before_that_of_the_run(way):
    ended = []

    @sgl.function
    async def slow(s):
        s += sgl.gen("x")
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(await s.aget("x"))

    @sgl.function
    async def caller(s):
        slow()

    if way == "batch":
        caller.run_batch([()], backend=ScriptedBackend("A"))
    elif way == "arun":
        asyncio.run(caller.arun(backend=ScriptedBackend("A")))
    else:
        caller.run(backend=ScriptedBackend("A"))
    assert ended == ["A"]


def late(gate: Gate):
    async def answer(prompt, gen):
        await gate.passed()
        return "A"

    return answer


def waiting(gate: Gate) -> ScriptedBackend:
    return ScriptedBackend(late(gate))


@sgl.function
def one_gen(s):
    s += "p" + sgl.gen("x")


READS = {
    "variable": lambda state: state["x"],
    "text": lambda state: state.text(),
    "messages": lambda state: state.messages(),
    "sync": lambda state: state.sync(),
    "error": lambda state: state.error(),
    "text_iter": lambda state: list(state.text_iter()),
    "text_iter of one": lambda state: list(state.text_iter("x")),
    "meta_info": lambda state: state.get_meta_info("x"),
    "ret_value": lambda state: state.ret_value,
}


@pytest.mark.parametrize("where", ["plain", "here", "server"])
async def test_a_read_that_would_block_a_running_loop_is_refused_and_one_of_a_state_at_its_end_is_not(where):
    gate = Gate()
    given = {} if where == "plain" else {"where": where}
    program = one_gen if where == "plain" else one_gen.compile()
    backend = waiting(gate) if where != "server" else GraphServer(late(gate))
    state = program.run(backend=backend, **given, **({"stream": True} if where == "plain" else {}))
    for name, read in READS.items():
        if where != "server" and name == "ret_value":
            continue  # that it is None may be known
        with pytest.raises(ProgramError, match=r"await s\.aget\(name\).*arun"):
            read(state)
    gate.open()
    await state.settle()
    state = await program.arun(backend=backend, **given)
    for read in READS.values():
        read(state)
    assert (state.text()) == "pA"


async def test_a_plain_body_that_reads_under_a_running_loop_is_refused():
    gate = Gate()

    with pytest.raises(ProgramError, match="arun"):
        plain_leaf.run("q", backend=waiting(gate))
    gate.open()
    assert ((await plain_leaf.arun("q", backend=ScriptedBackend("A"))).ret_value) == "A"


async def test_a_cell_of_a_notebook_may_block_its_loop_but_no_async_body_may(monkeypatch):
    @sgl.function
    async def body(s):
        s += sgl.gen("x")
        with pytest.raises(ProgramError, match=r"await s\.aget"):
            s.sync()
        gate.open()

    gate = Gate()

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))

    assert one_gen.run(backend=ScriptedBackend("A"))["x"] == "A"
    assert one_gen.compile().run(backend=ScriptedBackend("A"))["x"] == "A"
    await body.arun(backend=waiting(gate))


@sgl.function
def reading_leaf(s):
    s += sgl.user("q") + sgl.assistant(sgl.gen("x"))
    if s["x"]:
        s += sgl.user("r")
    forks = s.fork(2)
    forks += sgl.assistant(sgl.gen("y"))
    forks.join()


@sgl.function
async def awaiting_leaf(s):
    s += sgl.user("q") + sgl.assistant(sgl.gen("x"))
    if await s.aget("x"):
        s += sgl.user("r")
    forks = s.fork(2)
    forks += sgl.assistant(sgl.gen("y"))
    forks.join()


WHOLE = {
    "text": "[user]q[/user][assistant]A[/assistant][user]r[/user]",
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "r"},
    ],
    "sync": {"x": "A", "y": ["A", "A"]},
    "error": {"x": "A", "y": ["A", "A"]},
}


def read_whole(state, name):
    read = getattr(state, name)()
    if name in ("text", "messages"):
        return read
    assert read is None
    return {name: variable.now() for name, variable in state._variables().items()}  # waits for nothing more


async def read_whole_async(state, name):
    read = await getattr(state, {"sync": "settle"}.get(name, f"a{name}"))()
    if name in ("text", "messages"):
        return read
    assert read is None
    return {name: variable.now() for name, variable in state._variables().items()}


@pytest.mark.parametrize("read", WHOLE)
@pytest.mark.parametrize("leaf", [reading_leaf, awaiting_leaf])
def test_whoever_runs_or_calls_a_program_reads_it_as_it_is_at_its_end(leaf, read):
    async def answer(prompt, gen):
        await asyncio.sleep(0.001)
        return "A"

    @sgl.function
    def caller(s):
        return read_whole(leaf(), read)

    @sgl.function
    async def async_caller(s):
        return await read_whole_async(leaf(), read)

    async def main():
        return await read_whole_async(await leaf.arun(backend=backend, stream=True), read)

    backend = ScriptedBackend(answer)
    assert read_whole(leaf.run(backend=backend), read) == WHOLE[read]
    assert read_whole(leaf.run(backend=backend, stream=True), read) == WHOLE[read]
    assert caller.run(backend=backend).ret_value == WHOLE[read]
    assert async_caller.run(backend=backend).ret_value == WHOLE[read]
    assert asyncio.run(main()) == WHOLE[read]


def test_a_body_reads_what_it_has_appended_so_far_in_any_thread():
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x")
        with concurrent.futures.ThreadPoolExecutor() as pool:  # which knows nothing of the body
            first = pool.submit(s.text).result()
        s += "q"
        return first, s.text()

    assert program.run(backend=ScriptedBackend("A")).ret_value == ("pA", "pAq")


def test_programs_may_be_called_hundreds_deep():
    @sgl.function
    def program(s, n):
        s += "p"
        if n:
            program(n - 1)
        s += sgl.gen("x")

    async def main(read):
        gate = Gate()
        opener = threading.Thread(target=lambda: (gate.wait_reached(300), gate.open()))
        opener.start()
        async with asyncio.timeout(60):
            read = await read(await program.arun(299, backend=waiting(gate), stream=True))
        opener.join()
        return read

    assert asyncio.run(main(lambda state: state.settle())) is None
    assert asyncio.run(main(lambda state: state.ausage()))["calls"] == 300


@sgl.function
def grandchild(s):
    s += "p" + sgl.gen("x")


@sgl.function
def child(s):
    grandchild()


@pytest.mark.parametrize("way", ["arun", "sync", "cancel"])
def test_what_a_called_program_called_belongs_to_the_run_though_the_called_one_has_ended(way):
    gate = Gate()
    backend = waiting(gate)

    @sgl.function
    def program(s):
        called = child()
        called._run.stream.ended.wait_done(30)
        gate.wait_reached()
        s += "q"

    async def main():
        task = asyncio.create_task(program.arun(backend=backend))
        done, _ = await asyncio.wait([task], timeout=0.1)
        gate.open()
        assert not done
        return await task

    if way == "arun":
        assert asyncio.run(main()).usage()["calls"] == 1
        return
    state = program.run(backend=backend)
    if way == "cancel":
        state.cancel()
        backend.wait_closed()
        assert [gen.name for gen in backend.inner.aborted] == ["x"]
        return
    threading.Timer(0.01, gate.open).start()
    state.sync()
    assert state.usage()["calls"] == 1
