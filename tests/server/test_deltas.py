"""What is new of answers: who sends it, in which order, and how much at once."""

import asyncio
import functools

import pytest

from jsg.server.deltas import Deltas, NextTurn
from jsg.speech.answers.answer_stream import AnswerDelta
from jsg.types import FinishReason, FinishType

END = AnswerDelta(finish=FinishReason(FinishType.STOP))


class Sent:
    """What senders and the reader of two answers have sent, in order."""

    def __init__(self) -> None:
        self.deltas = Deltas(2, NextTurn())
        self.all: list[tuple[str, int, str]] = []
        self.is_paused = False
        self.may_read = asyncio.Event()
        self.may_read.set()

    def send(self, index: int, delta: AnswerDelta) -> bool:
        if self.is_paused or not delta.only_text:
            return False
        self.all.append(("sender", index, delta.text))
        return True

    async def read(self) -> None:
        async for index, delta in self.deltas:
            await self.may_read.wait()
            self.all.append(("reader", index, delta.text))
            self.deltas.senders[index] = functools.partial(self.send, index)


@pytest.fixture
async def sent():
    made = Sent()
    reading = asyncio.create_task(made.read())
    for index in (0, 1):
        made.deltas.put(index, AnswerDelta("begin"))
    await _turns()
    assert made.all == [("reader", 0, "begin"), ("reader", 1, "begin")]
    made.all.clear()
    yield made
    for index in (0, 1):
        made.deltas.put(index, END)
    await reading


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_texts_are_sent_together_without_the_reader(sent):
    for index, text in ((1, "a"), (0, "b"), (1, "c")):
        sent.deltas.put(index, AnswerDelta(text))
    assert not sent.all
    await asyncio.sleep(0)
    assert sent.all == [("sender", 1, "ac"), ("sender", 0, "b")]


async def test_what_a_sender_leaves_and_what_comes_behind_it_is_read(sent):
    sent.deltas.put(0, AnswerDelta("a"))
    sent.deltas.put(1, AnswerDelta("b", thoughts="c"))
    sent.deltas.put(0, AnswerDelta("d"))
    await asyncio.sleep(0)
    sent.deltas.put(0, AnswerDelta("e"))  # the reader is about to begin
    await _turns()
    assert sent.all == [("sender", 0, "ad"), ("reader", 1, "b"), ("reader", 0, "e")]


async def test_nothing_overtakes_the_reader(sent):
    sent.is_paused = True
    sent.may_read.clear()
    sent.deltas.put(0, AnswerDelta("a"))
    await _turns()
    sent.is_paused = False
    sent.deltas.put(0, AnswerDelta("b"))
    await _turns()
    assert not sent.all
    sent.may_read.set()
    await _turns()
    assert sent.all == [("reader", 0, "a"), ("reader", 0, "b")]


async def test_a_sender_that_fails_ends_the_generation():
    deltas = Deltas(1, NextTurn())
    reading = asyncio.create_task(anext(deltas))
    await asyncio.sleep(0)
    deltas.senders[0] = lambda _: bool(1 / 0)
    deltas.put(0, AnswerDelta("a"))
    assert await reading == (0, AnswerDelta("a"))
    with pytest.raises(ZeroDivisionError):
        await anext(deltas)
