"""Graphs that are sent to a server: how the client reads its answers."""

import asyncio

import pytest

import jsg as sgl
from jsg.errors import (
    AbortedError,
    BackendError,
    ConfigError,
    ProgramError,
    RateLimitError,
    RequestError,
    UnknownVariableError,
)
from jsg.lang.executor import posts
from jsg.lang.streams.loop import shared_loop
from tests.lang.graph_programs import PNG, GraphServer, answer
from tests.lang.scripted import Gate, ScriptedBackend


@sgl.function
def called(s, x):
    s += f"called with {x}: " + sgl.gen("y")


@sgl.function
def program(s, q, photo):
    with s.user():
        s += q + sgl.image(photo)
    with s.assistant():
        s += sgl.gen("a", max_tokens=5)
    forks = s.fork(2)
    forks += lambda i: f"{i}" + sgl.gen("b", n=2)
    forks.join()
    return {"state": called(s["a"]), "n": 3}


def test_a_graph_that_was_sent_says_what_it_says_here():
    compiled = program.compile()
    here = compiled.run("why", PNG, backend=GraphServer(), where="here", temperature=0)
    server = GraphServer()
    sent = compiled.run("why", PNG, backend=server, temperature=0)
    assert sent.error() is None
    assert (len(server.bodies), server.num_ended) == (1, 1)
    assert (sent["a"], sent["b"], sent.text(), sent.messages()) == (here["a"], here["b"], here.text(), here.messages())
    assert sent.usage() == here.usage() and sent.get_meta_info("a") == here.get_meta_info("a")
    assert sent.ret_value["n"] == 3 and sent.ret_value["state"]["text"] == here.ret_value["state"].text()
    assert sent.ret_value["state"]["variables"] == {"y": here.ret_value["state"]["y"]}
    assert "".join(sent.text_iter()) == sent.text() and "".join(sent.text_iter("a")) == sent["a"]
    assert server.bodies[0][3] == {"temperature": 0}
    assert compiled.run("why", PNG, backend=GraphServer(), where="here").error() is None


@pytest.mark.parametrize("where", ["plain", "here", "server"])
def test_what_is_kept_and_returned_is_what_the_program_gave(where):
    @sgl.function
    def giving(s, q):
        s += q + sgl.gen("a")
        s["pair"] = (s["a"], [1, (q,)])
        return s["a"], {"deep": [("x", None), ()]}, [called(q).ret_value]

    if where == "plain":
        state = giving.run("why", backend=GraphServer())
    else:
        state = giving.compile().run("why", backend=GraphServer(), where=where)
    a = state["a"]
    assert state["pair"] == (a, [1, ("why",)]) and state.ret_value == (a, {"deep": [("x", None), ()]}, [None])


def test_variables_come_as_they_grow():
    gate = Gate()

    async def slow(prompt, gen):
        if gen.name == "y":
            await gate.passed()
        return ["one ", "two"]

    state = program.compile().run("why", PNG, backend=GraphServer(slow), stream=True)
    assert list(state.text_iter("a")) == ["one ", "two"]

    async def read() -> str:
        text, pieces = "", state.text_async_iter()
        async with asyncio.timeout(10):
            while not text.endswith("one two"):  # before the program has ended
                text += await anext(pieces)
        gate.open()
        return text + "".join([piece async for piece in pieces])

    assert asyncio.run(read()) == state.text()
    assert state["a"] == "one two" and state.get_meta_info("a")["completion_tokens"] == 2
    assert state["b"] == [["one two"] * 2] * 2


def test_what_failed_there_is_raised_here_with_its_line():
    def fail(prompt, gen):
        if gen.name == "b":
            raise RequestError("refused")
        return "fine"

    state = program.compile().run("why", PNG, backend=GraphServer(fail))
    assert state["a"] == "fine" and state.error() is None
    with pytest.raises(RequestError, match="refused") as caught:
        state["b"]
    assert any("test_remote_graph.py:" in note for note in caught.value.__notes__)

    def fail_first(prompt, gen):
        raise RequestError("refused")

    state = program.compile().run("why", PNG, backend=GraphServer(fail_first))
    for read in (lambda: state["a"], state.text, state.messages):
        with pytest.raises(RequestError, match="refused"):
            read()
    assert state.ret_value == {"state": {"text": None, "variables": {"y": None}}, "n": 3}
    assert isinstance(state.error(), RequestError)


def test_cancelling_closes_the_connection():
    gate = Gate()

    async def forever(prompt, gen):
        await gate.passed()
        return "never"

    server = GraphServer(forever)
    state = program.compile().run("why", PNG, backend=server)
    gate.wait_reached()
    state.cancel()
    with pytest.raises(AbortedError):
        state["a"]
    assert isinstance(state.error(), AbortedError)

    async def until_ended():
        while not server.num_ended:
            await asyncio.sleep(0)

    shared_loop().submit(until_ended()).result(30)
    gate.open()


def test_a_server_that_ends_without_a_result_is_an_error():
    class Silent(GraphServer):
        async def run_graph(self, graph, arguments, *, stream=False, sampling_params=None):
            return
            yield

    state = program.compile().run("why", PNG, backend=Silent())
    with pytest.raises(BackendError, match="without the program's result"):
        state["a"]


def test_a_refusal_is_raised_at_the_read():
    class Refusing(GraphServer):
        async def run_graph(self, graph, arguments, *, stream=False, sampling_params=None):
            raise RequestError("too many nodes")
            yield

    state = program.compile().run("why", PNG, backend=Refusing())
    with pytest.raises(RequestError, match="too many nodes"):
        state.text()


def test_a_batch_is_sent_item_by_item():
    server = GraphServer()
    states = program.compile().run_batch([{"q": f"q{i}", "photo": PNG} for i in range(5)], backend=server)
    assert [state.messages()[0]["content"][0]["text"] for state in states] == [f"q{i}" for i in range(5)]
    assert len(server.bodies) == 5


class BatchServer(GraphServer):
    """A backend that also takes many runs of a graph at once, one of which it refuses."""

    def __init__(self, reply=answer, *, room=None):
        super().__init__(reply)
        self.posts = []
        self.room = room  # how many posts it takes at a time
        self.num_under_way = 0

    async def run_graphs(self, graph, batch, *, sampling_params=None):
        if self.num_under_way == self.room:
            raise RateLimitError("too many posts")
        self.posts.append(len(batch))
        self.num_under_way += 1
        try:
            for item, arguments in reversed(list(enumerate(batch))):
                if arguments["q"] == "wrong":
                    yield {"item": item, "failure": {"type": "RequestError", "message": "refused"}}
                    continue
                async for event in self.run_graph(graph, arguments, sampling_params=sampling_params):
                    yield {"item": item, **event}
        finally:
            self.num_under_way -= 1


def test_a_batch_is_one_post_and_what_fails_stays_with_its_item(monkeypatch):
    monkeypatch.setattr(posts, "COLLECTED_S", 0.3)  # so that a busy machine does not make two posts of it
    server, compiled = BatchServer(), program.compile()
    items = [{"q": "wrong" if i == 3 else f"q{i}", "photo": PNG} for i in range(40)]
    states = compiled.run_batch(items, backend=server, temperature=0)
    assert server.posts == [40]
    for i, state in enumerate(states):
        if i == 3:
            assert isinstance(state.error(), RequestError)
            continue
        alone = compiled.run(f"q{i}", PNG, backend=GraphServer(), temperature=0)
        assert (state["a"], state.text(), state.ret_value["n"]) == (alone["a"], alone.text(), 3)
    assert all(body[3] == {"temperature": 0} for body in server.bodies)
    assert [state["a"] for state in compiled.run_batch(items[:3], backend=server, generator_style=True)] == [
        state["a"] for state in states[:3]
    ]
    compiled.run_batch(items[:9], backend=server, num_threads=2)
    assert max(server.posts[2:]) == 2


def test_posts_of_a_batch_wait_for_each_other_where_the_key_has_no_room():
    server, items = BatchServer(room=1), [{"q": f"q{i}"} for i in range(600)]

    @sgl.function
    def short(s, q):
        s += q

    states = short.compile().run_batch(items, backend=server)
    assert [state.text() for state in states] == [item["q"] for item in items]
    assert sum(server.posts) == 600 and max(server.posts) <= 256


async def test_a_cancelled_batch_closes_its_post():
    gate = Gate()

    async def forever(prompt, gen):
        await gate.passed()
        return "never"

    server = BatchServer(forever)

    running = asyncio.create_task(program.compile().arun_batch([{"q": "a", "photo": PNG}] * 3, backend=server))
    await asyncio.to_thread(gate.wait_reached)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    async def until_closed():
        while server.num_under_way:
            await asyncio.sleep(0)

    shared_loop().submit(until_closed()).result(30)
    gate.open()


def test_a_fork_that_no_server_takes_runs_here():
    @sgl.function
    def wide(s, size):
        forks = s.fork(size)
        forks += lambda i: sgl.gen("x")
        forks.join()

    server = BatchServer()
    assert len(wide.compile(size=300).run(backend=server)["x"]) == 300
    assert not server.bodies
    wide.compile(size=256).run(backend=server).sync()
    assert len(server.bodies) == 1
    wide.compile(size=300).run(backend=server, where="server").sync()
    assert len(server.bodies) == 2


def test_where_it_runs_is_checked():
    compiled = program.compile()
    with pytest.raises(ConfigError, match="ScriptedBackend takes no graphs"):
        compiled.run("why", PNG, backend=ScriptedBackend(), where="server")
    with pytest.raises(ProgramError, match="where must be 'auto', 'here' or 'server'"):
        compiled.run("why", PNG, backend=GraphServer(), where="there")


@sgl.function
def joined_calls(s):
    s += "p"
    forks = s.fork(2)
    forks[0] += "0" + sgl.gen("b")
    forks[1] += "1" + sgl.gen("b") + sgl.gen("c")
    for fork in forks:
        fork["word"] = "set"
    forks.join()


@sgl.function
def calls_joined(s):
    return joined_calls()


@pytest.mark.parametrize("where", ["plain", "here", "server"])
def test_the_report_about_a_joined_variable_has_that_of_each_branch(where):
    program = joined_calls if where == "plain" else joined_calls.compile()
    state = program.run(backend=GraphServer(), **({} if where == "plain" else {"where": where}))
    first, second = state.get_meta_info("b")["branches"]
    assert first["completion_tokens"] == second["completion_tokens"] == 2
    assert state.get_meta_info("c")["branches"] == [None, second | {"prompt_tokens": 1}]
    assert asyncio.run(state.aget_meta_info("b")) == {"branches": [first, second]}
    with pytest.raises(UnknownVariableError, match="'word' was not set by a call of the model"):
        state.get_meta_info("word")


def test_the_usage_of_a_called_program_has_the_calls_of_its_branches():
    for program in (calls_joined, calls_joined.compile()):
        called = program.run(backend=GraphServer(), **({} if program is calls_joined else {"where": "here"})).ret_value
        assert called.usage()["calls"] == 3
