"""The soak: what it sends, that it finds every kind of wrong answer, and a short soak."""

import asyncio
import collections
import faulthandler
import json
import math
import os
from collections.abc import Sequence

import msgspec
import pytest

from bench.served import Served, Usage, usage_of
from bench.serving.client import open_session
from bench.soak.__main__ import LATE_THREADS, SHOW_TOOLS, Keeper, Soak, check_processes, gauges_of, run, soak
from bench.soak.client import Answer, Broken, Client, Reading, check_form, check_whole
from bench.soak.memory import MIB, Sample, minima, theil_sen
from bench.soak.mix import CHAT, COMPLETIONS, GENERATE, INVALID, SHARES, Kind, Mix, Task
from tests.bench.scripted import SharedClock, scripted_server
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

MIX = Mix(0, 600, 1408)


def test_the_mix_is_that_of_the_issue():
    assert sum(SHARES.values()) == 100
    counts = collections.Counter(MIX.task(number).kind for number in range(5000))
    for kind, share in SHARES.items():
        assert counts[kind] / 50 == pytest.approx(share, abs=2)


def test_a_seed_decides_each_request():
    assert [Mix(3, 600, 1408).task(number) for number in range(50)] == [Mix(3, 600, 1408).task(n) for n in range(50)]
    assert MIX.task(7) != Mix(1, 600, 1408).task(7)


def test_requests_are_what_their_kind_says():
    tasks = [MIX.task(number) for number in range(3000)]
    paths = {kind: {task.path for task in tasks if task.kind is kind} for kind in SHARES}
    assert paths[Kind.STREAM] == paths[Kind.PLAIN] == paths[Kind.PARALLEL] == {GENERATE, COMPLETIONS, CHAT}
    for task in tasks:
        sampling = task.body.get("sampling_params", task.body)
        if task.kind in (Kind.DISCONNECT, Kind.ABORT):
            assert task.streams and task.cut_after is not None and 0 <= task.cut_after < task.max_tokens
        else:
            assert task.cut_after is None
        if task.kind is Kind.OVER_LONG:
            assert len(task.body["input_ids"]) >= 600
        elif task.kind is not Kind.INVALID and "input_ids" in task.body:
            assert len(task.body["input_ids"]) + task.max_tokens <= 600
            assert all(100 <= token < 1398 for token in task.body["input_ids"])
        if task.kind is not Kind.INVALID:
            assert sampling["n"] == (2 if task.kind is Kind.PARALLEL else 1)
            assert task.kind is not Kind.STREAM or task.streams
    assert {json.dumps(task.body) for task in tasks if task.kind is Kind.INVALID} == {
        json.dumps(body) for _, body in INVALID
    }
    shared = [tuple(task.body["input_ids"][:120]) for task in tasks if task.kind is Kind.SHARED]
    assert len(shared) > 200 and len(set(shared)) == 5


def test_a_replay_is_the_same_request_whole():
    task = Task(0, Kind.STREAM, GENERATE, {"rid": "a", "input_ids": [1], "sampling_params": {"n": 1}, "stream": True})
    assert task.alone() == {"input_ids": [1], "sampling_params": {"n": 1}}


NATIVE = Task(
    1, Kind.STREAM, GENERATE, {"sampling_params": {"max_new_tokens": 3, "n": 1, "ignore_eos": True}, "stream": True}
)
COMPLETION = Task(2, Kind.STREAM, COMPLETIONS, {"max_tokens": 2, "n": 1, "ignore_eos": True, "stream": True})


def native(ids: list[int], text: str, finish: str | None = None, count: int | None = None) -> bytes:
    reason = None if finish is None else {"type": finish}
    meta = {"completion_tokens": len(ids) if count is None else count, "finish_reason": reason}
    return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()


def completion(text: str, finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}).encode()


def total(count: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode()


DONE = b"[DONE]"


def read(task: Task, events: list[bytes]) -> list[Answer]:
    reading = Reading(task)
    for event in events:
        reading.take(event)
    return reading.end()


def test_whole_streams_are_answers():
    assert read(NATIVE, [native([5], "a"), native([5, 6, 7], "abc", "length"), DONE]) == [
        Answer("abc", [5, 6, 7], "length")
    ]
    assert read(COMPLETION, [completion("a"), completion("b", "length"), total(2), DONE]) == [
        Answer("ab", None, "length")
    ]


@pytest.mark.parametrize(
    ("task", "events", "message"),
    [
        (NATIVE, [native([5], "a"), native([5, 6], "ab", "length"), DONE], "3 tokens were asked for, but 2 came"),
        (NATIVE, [native([5, 5, 6, 7], "aabc", "length"), DONE], "but 4 came"),
        (NATIVE, [native([5], "a"), native([6, 5, 7], "bac", "length"), DONE], "tokens of a stream changed"),
        (NATIVE, [native([5], "b"), native([5, 6, 7], "abc", "length"), DONE], "text of a stream changed"),
        (NATIVE, [native([5, 6, 7], "abc", "length", count=2), DONE], "2 tokens are counted"),
        (NATIVE, [native([5, 6, 7], "abc", "length")], "without [DONE]"),
        (NATIVE, [native([5, 6, 7], "abc"), DONE], "finish reason None"),
        (NATIVE, [native([5], "a", "stop"), DONE], "finish reason 'stop'"),
        (NATIVE, [native([5], "a", "abort"), DONE], "finish reason 'abort'"),
        (NATIVE, [native([5], "a", "length"), native([5, 6], "ab", "length")], "after the finish reason"),
        (NATIVE, [native([5, 6, 7], "abc", "length"), DONE, DONE], "after [DONE]"),
        (NATIVE, [b'{"error": {"message": "dead"}}'], "dead"),
        (COMPLETION, [completion("a", "length"), total(1), DONE], "usage says 1"),
        (COMPLETION, [completion("a", "length"), total(3), DONE], "usage says 3"),
        (COMPLETION, [completion("a", "length"), DONE], "without its usage"),
    ],
)
def test_a_stream_that_is_not_whole_is_seen(task, events, message):
    with pytest.raises(Broken) as broken:
        read(task, events)
    assert message in str(broken.value)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (Kind.INVALID, 500, "a bad request was answered 500"),
        (Kind.INVALID, 200, "a bad request was answered 200"),
        (Kind.INVALID, 400, "a refusal without a message"),
        (Kind.OVER_LONG, 503, "a bad request was answered 503"),
        (Kind.PLAIN, 500, "POST /generate answered 500"),
        (Kind.PLAIN, 429, "POST /generate answered 429"),
        (Kind.STREAM, 503, "POST /generate answered 503"),
    ],
)
def test_a_wrong_status_is_seen(kind, status, message):
    async def ask() -> None:
        task = Task(0, kind, GENERATE, NATIVE.body | {"stream": kind is Kind.STREAM})
        async with scripted_server({GENERATE: [b"{}"]}, SharedClock(), status) as (url, _), open_session(20) as session:
            await Client(session, url).run(task)

    with pytest.raises(Broken) as broken:
        asyncio.run(ask())
    assert message in str(broken.value)


def test_two_answers_must_be_two():
    task = Task(3, Kind.PARALLEL, GENERATE, {"sampling_params": {"max_new_tokens": 1, "n": 2}})
    one = msgspec.json.decode(native([5], "a", "length"))
    assert len(check_whole(task, [one, one])) == 2
    with pytest.raises(Broken, match="2 answers were asked for, but 1 came"):
        check_whole(task, [one])


def test_the_kept_answers_are_bounded_and_fair():
    keeper = Keeper(0)
    for number in range(100_000):
        keeper.add(Task(number, Kind.PLAIN, GENERATE, {}), [])
    numbers = [task.number for task, _ in keeper.kept]
    assert len(numbers) == 2000 and 48_000 < sum(numbers) / 2000 < 52_000
    assert len(keeper.chosen()) == 1000


# Growth.


def samples_of(private: list[float], *, num_fds: int = 5, num_threads: Sequence[int] = ()) -> list[Sample]:
    """One each 10 s. Where no numbers of threads are given, there are three."""
    threads = num_threads or [3] * len(private)
    return [
        Sample(10.0 * place, {"front": Usage(0, 0, round(held * MIB), count, num_fds, 0.0)})
        for place, (held, count) in enumerate(zip(private, threads, strict=True))
    ]


def test_the_least_of_each_stretch_counts():
    points = minima(samples_of([5, 4, 6, 9, 7, 8, 1]), "front", 30.0)
    assert points == [(10, 4), (40, 7)], "the last stretch is not whole"


def test_a_slope_is_the_median_of_slopes():
    slope = theil_sen([(0.0, 10.0), (3600.0, 11.0), (7200.0, 14.0)])
    assert slope is not None and slope.per_hour == 2.0 and (slope.low, slope.high) == (1.0, 3.0)
    assert theil_sen([(0.0, 1.0), (1.0, 2.0)]) is None


def test_a_step_is_no_slope_but_a_growth_is():
    noise = [0.2 * math.sin(7 * place) for place in range(30)]
    stepped = theil_sen([(60.0 * n, (5 if n > 1 else 0) + noise[n]) for n in range(30)])
    grown = theil_sen([(60.0 * n, 3.0 * n / 60 + noise[n]) for n in range(30)])
    assert stepped is not None and grown is not None
    assert abs(stepped.per_hour) < 0.5
    assert 2.5 < grown.per_hour < 3.5 and grown.low < 3 < grown.high


def test_growth_is_a_problem():
    knobs = Soak(minutes=20, bin_s=60)
    flat = samples_of([50 + 0.1 * (n % 3) for n in range(61)])
    growing = samples_of([50 + n / 120 for n in range(61)])
    assert list(check_processes(knobs, flat[0], flat[-1], flat)) == []
    assert "grows by 3.0" in next(check_processes(knobs, growing[0], growing[-1], growing))
    assert list(check_processes(Soak(minutes=10), growing[0], growing[-1], growing)) == [], "too short to say"
    [problem] = check_processes(knobs, flat[0], samples_of([50], num_fds=6)[0], flat)
    assert problem.startswith("front: num_fds was 5 before and is 6 after")


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ([9] * 50 + [10] * 11, ""),
        ([9] * 20 + [10] * 20 + [9 + LATE_THREADS] * 21, ""),
        ([9] * 60 + [10 + LATE_THREADS], f"num_threads was 9 before and is {10 + LATE_THREADS} after"),
        ([9] * 33 + [10] * 9 + [11] * 9 + [12] * 10, "the number of threads grew in each quarter: [9, 10, 11, 12]"),
    ],
)
def test_late_threads_of_a_pool_are_no_growth(threads: list[int], message: str):
    flat = samples_of([50.0] * 61, num_threads=threads)
    problems = list(check_processes(Soak(minutes=20, bin_s=60), flat[0], flat[-1], flat))
    assert len(problems) == bool(message) and message in "".join(problems)


def test_gauges_are_read():
    text = """# HELP jsg:running requests
# TYPE jsg:running gauge
jsg:running{model="a b"} 2.0
# TYPE jsg:tokens counter
jsg:tokens 7
# TYPE jsg:kv gauge
jsg:kv 0.5
"""
    assert gauges_of(text) == {'jsg:running{model="a b"}': 2, "jsg:kv": 0.5}


def test_the_kernel_tells_what_a_process_holds():
    usage = usage_of(os.getpid())
    assert usage.rss >= usage.pss > 10 * MIB and usage.rss >= usage.anonymous > 5 * MIB
    assert usage.num_threads >= 1 and usage.num_fds >= 3 and usage.cpu_s > 0


# The soak.


@pytest.mark.slow
def test_a_moment_of_soak_on_the_scripted_engine(make_server, tmp_path):
    """This engine heeds no grammar, so no form and no call is complete, and all end by their length."""
    write_byte_tokenizer(tmp_path, SHOW_TOOLS + CHAT_TEMPLATE)
    with make_server(engine={"max_total_tokens": 600}, tokenizer=tmp_path) as running:
        server = Served(str(running.http.base_url).rstrip("/"), {"front": os.getpid()})
        result = asyncio.run(soak(server, Soak(minutes=1.0, num_requests=200, clients=16, pause_s=0.0, period_s=0.2)))
    assert result.problems == [] and all(result.counts[kind] for kind in SHARES)
    assert sum(result.counts[kind] for kind in SHARES) == 200
    assert result.num_replayed == 20 and result.counts["finished"] > 100
    assert result.state["num_aborted"] > 0


@pytest.mark.parametrize("text", ["{", "[]", '{"sun": "a"}', '{"sun": "a", "count": "1"}'])
def test_a_form_that_is_none_is_seen(text: str):
    check_form('{"sun": "a", "count": 1}')
    with pytest.raises(Broken):
        check_form(text)


def test_a_server_that_answers_otherwise_the_second_time_is_seen(make_server):
    """The replay is compared: here the answer that is kept has one token doubled."""

    async def compare(url: str) -> list[str]:
        from bench.soak.__main__ import Result, _compare

        result = Result()
        task = Task(
            0, Kind.PLAIN, GENERATE, {"input_ids": [101, 102], "sampling_params": {"max_new_tokens": 3, "n": 1}}
        )
        async with open_session(20) as session:
            client = Client(session, url)
            answers = await client.run(task)
            assert answers is not None and answers[0].ids == [101, 102, 101]
            await _compare(client, task, answers, result)
            assert result.problems == []
            await _compare(client, task, [Answer(answers[0].text, [101, 101, 102], "length")], result)
        return result.problems

    with make_server() as running:
        [problem] = asyncio.run(compare(str(running.http.base_url).rstrip("/")))
    assert "replay of request 0" in problem and "[101, 101, 102]" in problem


@pytest.mark.slow
def test_half_a_minute(tmp_path):
    result = run(Soak(minutes=0.5, pause_s=0.1, bin_s=5.0), tmp_path / "log")
    assert result.problems == []
    assert result.state["num_evicted_tokens"] > 0 and result.state["num_retracts"] > 0


@pytest.mark.slow
@pytest.mark.long  # `test_half_a_minute` does the same to an engine in a shorter time
def test_three_minutes(tmp_path):
    faulthandler.cancel_dump_traceback_later()  # it takes longer than pytest waits before it shows what hangs
    result = run(Soak(minutes=3.0, pause_s=1.0), tmp_path / "log")  # so that other tests have a core meanwhile
    assert result.problems == []
