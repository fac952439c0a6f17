"""Work that a posted graph may ask for without asking the model: counted beforehand, linear, and in turns."""

import asyncio
import dataclasses
import itertools
import time
from typing import Any

import pytest

from jsg.constrained.text_patterns import PatternSet, TextPatterns, pattern_tables
from jsg.errors import GraphError, RequestError
from jsg.lang.executor.evaluation import Evaluator
from jsg.lang.executor.frames import new_frame
from jsg.lang.executor.limits import ProgramLimits, check_limits
from jsg.lang.executor.posted import execute
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.nodes import ArgumentRef, Matches, TextValue, ValueRef
from jsg.lang.program.messages import messages_of
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.transcript import Turn
from jsg.lang.streams.variables import Variable
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import RoleBegin, RoleEnd, Text
from jsg.processing.parts import TextPart
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from tests.lang.fake_model import FakeModel
from tests.lang.scripted import ScriptedBackend

LINE = {"stream": 0, "line": "p:1"}
OPEN = {"kind": "open", "id": 0, **LINE, "program": "p"}
ONE = {"constant": 1}


def graph_of(*nodes: dict[str, Any], arguments: tuple[str, ...] = (), **more: Any):
    return graph_from_json(
        {
            "jsg_graph": 1,
            "name": "p",
            "arguments": [{"name": name, "kind": "text"} for name in arguments],
            "nodes": [OPEN, *nodes],
            "outputs": {},
            "returns": {"constant": None},
        }
        | more
    )


def loop(number: int, rounds: int, *nodes: dict[str, Any], outputs: Any = None, **more: Any) -> dict[str, Any]:
    body = {"nodes": list(nodes), "outputs": outputs or {}}
    return {"kind": "loop", "id": number, **LINE, "max_rounds": rounds, "body": body} | more


def append(number: int, *pieces: Any) -> dict[str, Any]:
    return {"kind": "append", "id": number, **LINE, "pieces": list(pieces)}


NONE: dict[str, Any] = {"nodes": [], "outputs": {}}
EMPTY = {"equals": [[], []]}
FREE = {
    "conditions of a loop": loop(1, 250, until={"any": [{"not": EMPTY}] * 200}),
    "conditions of a branch": loop(
        1, 250, {"kind": "cond", "id": 2, **LINE, "condition": {"all": [EMPTY] * 300}, "then": NONE, "otherwise": NONE}
    ),
    "pieces of a condition": loop(1, 250, until={"contains": [[""] * 300, ["x"]]}),
    "pieces of a text": loop(1, 250, append(2, *[""] * 300)),
    "outputs": loop(1, 250, append(2), outputs={f"o{i}": ONE for i in range(300)}),
    "items of outputs": loop(1, 250, append(2), outputs={"o": {"list": [ONE] * 300}}),
    "items of values": loop(1, 250, {"kind": "assign", "id": 2, **LINE, "name": "v", "value": {"list": [ONE] * 300}}),
    "what is carried": loop(1, 250, append(2), before={f"o{i}": ONE for i in range(300)}),
}


@pytest.mark.parametrize("node", FREE.values(), ids=list(FREE))
def test_m3_what_asks_no_model_and_appends_nothing_is_counted_for_each_round(node: dict[str, Any]):
    with pytest.raises(GraphError, match="steps up to"):
        check_limits(graph_of(node), {}, ProgramLimits())
    check_limits(graph_of(node | {"max_rounds": 10}), {}, ProgramLimits())


def test_m3_what_is_returned_is_counted():
    graph = graph_of(append(1), returns={"list": [ONE] * 70_000})
    with pytest.raises(GraphError, match="steps up to"):
        check_limits(graph, {}, ProgramLimits())


def test_m3_arguments_of_gens_are_counted_as_text():
    gen = {"kind": "generate", "id": 2, **LINE, "name": "g", "args": {"regex": "a" * 1000, "max_tokens": 1}}
    graph = graph_of(loop(1, 200, gen))
    check_limits(graph, {}, ProgramLimits(text_chars=200_000))
    with pytest.raises(GraphError, match="text_chars up to"):
        check_limits(graph, {}, ProgramLimits(text_chars=199_999))


REF: dict[str, Any] = {"node": 1, "name": "x"}


class TestCarried:
    """A variable that a loop carries is, from the second round on, what the body has left."""

    def test_m3_a_list_that_grows_is_no_text(self):
        node = loop(1, 3, append(2, REF), before={"x": {"text": ["a"]}})
        node["body"]["outputs"] = {"x": {"list": [{"variable": REF}] * 9}}
        with pytest.raises(GraphError, match="it reads 'x' of node 1"):
            graph_of(node)

    def test_text_that_stays_text(self):
        node = loop(1, 3, append(2, REF), before={"x": {"text": ["a"]}})
        node["body"]["outputs"] = {"x": {"text": ["b"]}}

        async def main() -> str:
            async with execute(graph_of(node), ScriptedBackend(""), {}) as run:
                return (await run.result())["text"]

        assert asyncio.run(main()) == "abb"


async def test_m3_a_value_that_is_no_text_is_not_written_as_one():
    """Its text could be larger by far than what holds it."""
    large: list[Any] = ["a"]
    for _ in range(40):
        large = [large, large]

    async with asyncio.TaskGroup() as tasks:
        evaluator = Evaluator({}, tasks, 100)
        frame = new_frame(graph_of({"kind": "readtext", "id": 1, **LINE}).block, None)
        variable = Variable()
        variable.finish(large)
        frame.define(1, "", variable)
        with pytest.raises(RequestError, match="must be text or a number"):
            await evaluator.text((ValueRef(1, ""),), frame)


async def test_m3_text_is_charged_piece_by_piece():
    async with asyncio.TaskGroup() as tasks:
        evaluator = Evaluator({"a": "a" * 60}, tasks, 100)
        graph = graph_of(append(1))
        with pytest.raises(RequestError, match="more text"):
            await evaluator.text((ArgumentRef("a"),) * 5, new_frame(graph.block, None))
        assert evaluator._text_left == -20  # the last three were not even looked at


def test_patterns_read_beside_each_other_share_the_time_between_two_turns_of_other_tasks():
    pattern = f"({'.?' * 150}){{2}}b"
    condition = Matches(TextValue((ArgumentRef("a"),)), pattern)

    async def most_steps(num_texts: int) -> int:
        """Steps between two turns, while texts are read that differ in their last characters."""
        patterns = TextPatterns((pattern,), pattern_tables(PatternSet("matches", (pattern,))))
        frame = new_frame(graph_of(append(1)).block, None)
        turns = [0]
        async with asyncio.TaskGroup() as tasks:
            evaluators = [Evaluator({"a": f"aaaaa{index}"}, tasks, 10**8, patterns) for index in range(num_texts)]
            tests = [tasks.create_task(evaluator.holds(condition, frame)) for evaluator in evaluators]
            while not all(test.done() for test in tests):
                await asyncio.sleep(0)
                turns.append(patterns._automaton.num_steps)
        return max(after - before for before, after in itertools.pairwise(turns))

    assert asyncio.run(most_steps(5)) < 3 * asyncio.run(most_steps(1))


class TestManyShortTexts:
    """One by one, each would copy what there is: these would take minutes."""

    COUNT = 20_000
    TEXT = "\U0001f600" + "a" * 100

    def within_seconds(self, started: float) -> None:
        assert time.thread_time() - started < 3

    async def test_m3_of_a_session(self):
        started = time.thread_time()

        session = TokenSession(FakeModel(load_tokenizer(resolve_model("tiny"))))
        for _ in range(self.COUNT):
            await session.extend(Text(self.TEXT))
        (part,) = await session._resolve()
        assert isinstance(part, TextPart) and (len(part.text)) == self.COUNT * len(self.TEXT)
        self.within_seconds(started)

    def test_m3_of_a_message(self):
        started = time.thread_time()
        (message,) = messages_of((Turn("user", [Text(self.TEXT)] * self.COUNT),))
        assert message == {"role": "user", "content": self.TEXT * self.COUNT}
        self.within_seconds(started)


async def test_m3_a_stream_with_much_to_do_lets_others_have_their_turn():
    stream = Stream(running_loop(), ScriptedBackend("").open)
    for _ in range(500):
        stream.append(RoleBegin("user"))
        stream.append(Text("x"))
        stream.append(RoleEnd("user"))
    ended = asyncio.ensure_future(stream.read("size").get())
    num_turns = 0
    while not ended.done():
        await asyncio.sleep(0)
        num_turns += 1
    stream.close()
    await stream.log.get()
    assert (num_turns) > 10


def test_the_default_limits_are_all_finite():
    assert all(isinstance(value, int) for value in dataclasses.asdict(ProgramLimits()).values())
