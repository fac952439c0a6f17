"""The way of requests into the engine: what is sent and checked for many answers to a prompt, and in which turn."""

import dataclasses
import itertools

import pytest

from jsg import prompt_ids
from jsg.engine.child import intake, wire
from jsg.engine.child.intake import Intake
from jsg.engine.child.protocol import Failure, GrammarTables, ToEngine
from jsg.engine.child.wire import MessageDecoder, MessageEncoder
from jsg.errors import QueueFullError, RequestError
from jsg.prompt_ids import PromptIds, join_ids
from jsg.types import Request, SamplingParams, altered, expand_answers

LONG = tuple(range(5000))


def answers_to(name: str, num_answers: int, ids=LONG, **fields) -> list[Request]:
    """As the front makes them."""
    first = Request(rid=name, input_ids=ids, sampling=SamplingParams(temperature=0.5, logit_bias={5: 1.0}), **fields)
    each = expand_answers(altered(first.sampling, n=num_answers), 7)
    return [altered(first, rid=f"{name}_{index}", sampling=sampling) for index, sampling in enumerate(each)]


class Wire:
    """Both ends, and how many bytes went over it."""

    def __init__(self) -> None:
        self.num_bytes = self.num_frames = 0
        self._encoder, self._decoder = MessageEncoder(), MessageDecoder()

    def send(self, **news) -> wire.Arrived:
        frames = self._encoder.encode(ToEngine(**news))
        self.num_bytes += sum(map(len, frames))
        self.num_frames += len(frames)
        return self._decoder.decode([memoryview(bytes(frame)) for frame in frames])

    def pass_on(self, requests: list[Request]) -> list[Request]:
        return [sent.make() for sent in self.send(requests=requests).requests]


class Core:
    """Notes what happens to it, in order."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.grammars = self

    def add(self, request: Request) -> None:
        if request.rid == "full":
            raise QueueFullError("no room")
        if request.rid == "bug":
            raise ZeroDivisionError
        self.log.append(("add", request.rid))

    def abort(self, rid: str) -> None:
        self.log.append(("abort", rid))

    def add_grammar(self, key: str, tables: bytes) -> None:
        self.log.append(("grammar", key))

    def forget_grammars(self, keys) -> None:
        self.log.append(("forget", *keys))


def test_the_ids_of_a_prompt_are_sent_read_and_checked_once_for_all_answers(monkeypatch: pytest.MonkeyPatch):
    """The answers come in several messages, as the loop of the front has its turns."""
    over, requests, num_checks = Wire(), answers_to("a", 128), itertools.count()
    check = PromptIds.__init__

    def counted(ids: PromptIds, array) -> None:
        next(num_checks)
        check(ids, array)

    monkeypatch.setattr(PromptIds, "__init__", counted)
    got = [request for some in itertools.batched(requests, 10) for request in over.pass_on(list(some))]
    assert got == requests
    assert next(num_checks) == 1
    assert len({id(request.input_ids.array) for request in got}) == 1
    assert len({id(request.sampling.logit_bias) for request in got}) == 1
    assert over.num_frames == 1 + 13, "the ids, and a head for each message"
    assert over.num_bytes < 4 * len(LONG) + 128 * 100


def test_requests_that_differ_share_nothing():
    over, one = Wire(), answers_to("a", 1)[0]
    others = [
        dataclasses.replace(one, priority=1),
        dataclasses.replace(one, namespace="b"),
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, temperature=0.25)),
        answers_to("b", 1, LONG[1:])[0],
    ]
    assert over.pass_on([one, *others, *others, one]) == [one, *others, *others, one]
    assert over.pass_on([*others, one]) == [*others, one]


def test_points_for_snapshots_are_sent_once_for_all_answers():
    over, requests = Wire(), answers_to("a", 8, snapshot_at=(3, 4998, 5000))
    sent = over.pass_on(requests)
    assert [request.snapshot_at for request in sent] == [(3, 4998, 5000)] * 8
    assert sent[0].snapshot_at is sent[7].snapshot_at
    assert over.pass_on(answers_to("b", 1))[0].snapshot_at == ()


def test_both_ends_keep_few_common_parts(monkeypatch: pytest.MonkeyPatch):
    """Of a prompt that was not kept the ids are sent again."""
    monkeypatch.setattr(wire, "MOST_KEPT", 4)
    over, posts = Wire(), [answers_to(str(number), 3) for number in range(9)]
    for some in zip(*posts, strict=True):  # the posts take turns
        assert over.pass_on(list(some)) == list(some)
    assert len(over._encoder._kept) == len(over._decoder._common) == 4
    monkeypatch.setattr(wire, "MOST_KEPT_BYTES", 0)
    assert over.pass_on(posts[0]) == posts[0]
    assert not over._encoder._kept and not over._decoder._common
    assert not over._encoder._num_kept_bytes


def test_a_turn_takes_so_many_requests_and_so_many_tokens():
    for requests, num_turns in (
        (answers_to("a", 1000, ids=(1, 2)), 16),  # 64 short ones at a time
        ([each for n in range(40) for each in answers_to(str(n), 1, ids=range(2**18))], 5),  # nine units each
        (answers_to("a", 40, ids=range(2**14), position_jumps=((5, 7),)), 5),  # the same
    ):
        waiting, core = Intake(), Core()
        waiting.put(Wire().send(requests=requests), core)
        assert len(waiting) == len(requests) and not core.log
        turns = 0
        while waiting:
            assert waiting.take(core) == []
            turns += 1
        assert turns == num_turns
        assert core.log == [("add", request.rid) for request in requests], "the order is kept"
        assert waiting.most_units < intake.UNITS + 10


def test_aborts_pass_what_waits_and_grammars_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "UNITS", 2)
    waiting, core, over = Intake(), Core(), Wire()
    tables = [GrammarTables("g", b"tables")]
    waiting.put(over.send(grammars=tables, requests=answers_to("a", 4), forgotten_grammars=["g"]), core)
    waiting.take(core)
    assert core.log == [("grammar", "g"), ("add", "a_0")]
    waiting.put(over.send(grammars=tables, requests=answers_to("b", 1), aborts=["a_0", "a_2"]), core)
    assert core.log.pop() == ("abort", "a_0")
    assert len(waiting) == 3
    while waiting:
        waiting.take(core)
    rest = [("add", "a_1"), ("add", "a_3"), ("forget", "g"), ("grammar", "g"), ("add", "b_0")]
    assert core.log[2:] == rest
    assert len(waiting) == 0


def test_a_request_that_cannot_be_added_fails_alone(caplog: pytest.LogCaptureFixture):
    waiting, core = Intake(), Core()
    requests = [altered(each, rid=name) for each, name in zip(answers_to("a", 3), ("full", "bug", "good"), strict=True)]
    waiting.put(Wire().send(requests=requests), core)
    full, bug = waiting.take(core)
    assert (full.rid, full.failure) == ("full", Failure.of(QueueFullError("no room")))
    assert (bug.rid, bug.failure.message) == ("bug", intake.NOT_ADDED)
    assert core.log == [("add", "good")]
    assert "could not be added" in caplog.text


def test_prompt_ids_are_a_sequence_that_was_checked():
    ids = PromptIds.of([3, 1, 2])
    assert PromptIds.of(ids) is ids
    assert ids == (3, 1, 2) == ids[:] and ids == PromptIds.of((3, 1, 2)) and ids != (3, 1)
    assert (ids[1:], ids[-1], len(ids), ids.highest, list(ids)) == ((1, 2), 2, 3, 3, [3, 1, 2])
    more = (4,)
    assert ids + more == (3, 1, 2, 4) and more + ids == (4, 3, 1, 2)
    assert isinstance(ids + more, PromptIds) and isinstance(more + ids, PromptIds)
    assert join_ids(((), ids, more)) == ids + more and join_ids((more, (), more)) == (4, 4)
    assert hash(ids) == hash((3, 1, 2)) and repr(ids) == "(3, 1, 2)"
    assert isinstance(ids[0], int)
    with pytest.raises(ValueError, match="read-only"):
        ids.array[0] = 5
    for wrong in ([], [1, -1], [2**31], [2**70], [True], [1.0], ["1"], [None]):
        with pytest.raises(RequestError, match="input_ids must be"):
            PromptIds.of(wrong)


def test_long_prompts_are_checked_in_chunks():
    """So other threads have their turn, and a wrong id anywhere is found."""
    good = [1] * (2 * prompt_ids.CHUNK + 1)
    assert PromptIds.of(good) == good
    with pytest.raises(RequestError):
        PromptIds.of([*good, -1])
