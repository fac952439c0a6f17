"""Limits on the number and time of running requests, and when a refused client should try again."""

import asyncio
import concurrent.futures
import gc
import time

import pytest

from jsg.config import ServerConfig
from jsg.errors import QueueFullError, RateLimitError, RequestError, ShuttingDownError
from jsg.server import garbage
from jsg.server.limits import MAX_RETRY_AFTER_S, MAX_STREAMS, Admission, DrainRate
from tests.server.running import LONG, LONG_STREAMS, POLL_DEADLINE_S, RunningServer
from tests.server.threads import ServerMaker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestDrainRate:
    def rate(self, *ends: float) -> DrainRate:
        """Ends that many seconds ago, oldest first."""
        clock = Clock()
        rate = DrainRate(clock)
        for age in ends:
            clock.now = 1000.0 - age
            rate.count()
        clock.now = 1000.0
        return rate

    @pytest.mark.parametrize(
        ("ends", "wanted", "seconds"),
        [
            ((8.0, 6.0, 4.0, 2.0), 1, 2),
            ((8.0, 6.0, 4.0, 2.0), 3, 6),
            ((8.0, 6.0, 4.0, 2.0), 1000, MAX_RETRY_AFTER_S),
            ([i / 100 for i in range(1000, 0, -1)], 1, 1),  # never less than a second
            ([i / 100 for i in range(1000, 0, -1)], 150, 2),
            ((0.0,), 3, 3),  # one end just now is one a second at most
            ((11.0, 10.5), 1, MAX_RETRY_AFTER_S),  # too long ago to tell
            ((), 1, MAX_RETRY_AFTER_S),
        ],
    )
    def test_seconds_until(self, ends, wanted, seconds):
        assert self.rate(*ends).seconds_until(wanted) == seconds

    def test_it_remembers_no_more_than_it_needs(self):
        rate = self.rate(*[i / 1000 for i in range(9000, 0, -1)])
        assert len(rate._ends) <= 1024 and rate.seconds_until(9_500) == 10


class TestAdmission:
    def test_the_answers_of_a_key_are_counted_until_each_has_left(self):
        admission = Admission(ServerConfig(max_requests_per_key=3))
        with admission.enter("a", 2) as leave:
            assert admission._under_way["a"] == 2
            with pytest.raises(RateLimitError), admission.enter("a", 2):
                pass
            with admission.enter("b", 3):
                leave()
                with admission.enter("a", 2):
                    assert admission._under_way["a"] == 3
            assert admission._under_way["a"] == 1
        assert admission._under_way["a"] == admission._under_way["b"] == 0

    def test_what_fails_leaves_too(self):
        admission = Admission(ServerConfig(max_requests_per_key=3))
        for error in (RuntimeError(), QueueFullError(), GeneratorExit()):
            with pytest.raises(type(error)):
                self.fail_inside(admission, error)
        assert admission._under_way["a"] == 0

    def fail_inside(self, admission: Admission, error: BaseException) -> None:
        with admission.enter("a", 2) as leave:
            leave()
            raise error

    def test_when_to_come_back_is_told_by_the_keys_own_ends(self):
        clock = Clock()
        admission = Admission(ServerConfig(max_requests_per_key=4), clock)
        with admission.enter("a", 4), admission.enter("b", 4) as leave:
            for _ in range(2):
                clock.now += 4
                leave()
            with pytest.raises(RateLimitError) as caught, admission.enter("b", 3):
                pass
            assert caught.value.retry_after_s == 2  # one has to end, and one ended in each of the last four seconds
            with pytest.raises(RateLimitError) as caught, admission.enter("a", 1):
                pass
            assert caught.value.retry_after_s == MAX_RETRY_AFTER_S

    def test_more_answers_than_a_key_may_ever_have_are_no_matter_of_waiting(self):
        with (
            pytest.raises(RequestError, match="at most 3 answers"),
            Admission(ServerConfig(max_requests_per_key=3)).enter("a", 4),
        ):
            pass

    def test_those_that_are_refused_make_no_room(self):
        clock = Clock()
        admission = Admission(ServerConfig(), clock)
        with admission.enter("a", 1) as leave:
            leave()
        clock.now += 5
        for _ in range(100):
            with pytest.raises(QueueFullError) as caught, admission.enter("a", 2):
                raise QueueFullError
            assert caught.value.retry_after_s == 10

    def test_a_server_that_ends_lets_nobody_in(self):
        admission = Admission(ServerConfig(shutdown_timeout=7.5))
        with admission.enter("a", 1):
            admission.close()
            with pytest.raises(ShuttingDownError) as caught, admission.enter("a", 1):
                pass
        assert caught.value.retry_after_s == 8


class TestTimeLimits:
    LIMITED = Admission(ServerConfig(first_token_timeout=2, request_timeout=5))
    LONG = Admission(ServerConfig(first_token_timeout=9, request_timeout=5))
    WITHOUT_FIRST = Admission(ServerConfig(request_timeout=5))

    def test_the_first_token_is_due_first(self):
        assert self.LIMITED.due(10, has_token=False) == 12 and self.LIMITED.due(10, has_token=True) == 15
        assert self.LONG.due(10, has_token=False) == 15 and self.WITHOUT_FIRST.due(10, has_token=False) == 15
        assert Admission(ServerConfig(first_token_timeout=2)).due(10, has_token=True) is None

    def test_the_knob_is_named(self):
        assert "--first-token-timeout" in str(self.LIMITED.exceeded(has_token=False))
        assert "--request-timeout" in str(self.LIMITED.exceeded(has_token=True))
        assert "--request-timeout" in str(self.LONG.exceeded(has_token=False))
        assert "--request-timeout" in str(self.WITHOUT_FIRST.exceeded(has_token=False))


class TestFullQueue:
    """One request runs and one waits: the third is refused."""

    @pytest.fixture(scope="class")
    @classmethod
    def full(cls, make_server: ServerMaker):
        with make_server(engine={"max_running_requests": 1, "max_queued_requests": 1}) as server:
            yield server

    def test_it_is_a_503_that_says_when_to_come_back(self, full: RunningServer):
        for _ in range(4):  # some that end, so that there is a rate
            full.http.post("/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 1}})
        with full.holding(2):
            for path, body in LONG_STREAMS.items():
                response = full.http.post(path, json=body)
                assert response.status_code == 503, path
                assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER_S
            listed = full.http.post("/generate", json={"text": ["a", "b"]})
            assert listed.status_code == 503
        full.wait_for_stats(num_running=0, num_waiting=0)
        assert full.http.post("/generate", json={"text": "ab"}).status_code == 200

    def test_who_waits_too_long_is_refused_too(self, make_server: ServerMaker):
        with make_server(engine={"max_running_requests": 1, "queue_timeout": 0.2}) as server:
            with server.holding(1):
                response = server.http.post("/generate", json={"text": "ab"})
                assert response.status_code == 503
                assert "--queue-timeout" in response.json()["error"]["message"]
                assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER_S
                server.wait_for_stats(num_waiting=0, num_running=1)
            server.wait_for_stats(num_running=0)


class TestKeyLimit:
    @pytest.fixture(scope="class")
    @classmethod
    def limited(cls, make_server: ServerMaker):
        with make_server(server={"api_key": ("key-a", "key-b"), "max_requests_per_key": 2}) as server:
            yield server

    def test_it_is_a_429_that_says_when_to_come_back(self, limited: RunningServer):
        key_a, key_b = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
        one = {"text": "ab", "sampling_params": {"max_new_tokens": 1}}
        with limited.holding(2, key_a):
            refused = limited.http.post("/generate", json=one, headers=key_a)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= MAX_RETRY_AFTER_S
            assert "--max-requests-per-key" in refused.json()["error"]["message"]
            for path, body in LONG_STREAMS.items():
                streamed = limited.http.post(path, json=body, headers=key_a)
                assert streamed.status_code == 429, path
                assert "under way" in streamed.json()["error"]["message"]
            assert limited.http.post("/generate", json=one, headers=key_b).status_code == 200
            twice = {**one, "sampling_params": {"max_new_tokens": 1, "n": 2}}
            assert limited.http.post("/generate", json=twice, headers=key_b).status_code == 200
        deadline = time.monotonic() + POLL_DEADLINE_S
        while limited.http.post("/generate", json=one, headers=key_a).status_code == 429:
            assert time.monotonic() < deadline, "those that left still count"
            time.sleep(0.02)

    def test_answers_are_counted_not_requests(self, limited: RunningServer):
        body = {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 1}}
        response = limited.http.post("/generate", json=body, headers={"x-api-key": "key-b"})
        assert response.status_code == 400 and "at most 2 answers" in response.json()["error"]["message"]


class TestRequestTimeout:
    @pytest.fixture(scope="class")
    @classmethod
    def timed(cls, make_server: ServerMaker):
        with make_server(server={"request_timeout": 1.0}) as server:
            yield server

    def test_a_stream_that_takes_too_long_ends_with_an_error_event(self, timed: RunningServer):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            read = {path: pool.submit(read_to_the_end, timed, path, body) for path, body in LONG_STREAMS.items()}
            for path, events in read.items():
                assert "--request-timeout" in events.result(), path
                assert '"error"' in events.result()
        timed.wait_for_stats(num_running=0, num_waiting=0)

    def test_without_a_stream_it_is_a_504(self, timed: RunningServer):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            whole = {path: {**body, "stream": False} for path, body in LONG_STREAMS.items()}
            answers = {path: pool.submit(timed.http.post, path, json=body) for path, body in whole.items()}
            for path, answer in answers.items():
                assert answer.result().status_code == 504, path
                assert "--request-timeout" in answer.result().json()["error"]["message"]
        timed.wait_for_stats(num_running=0, num_waiting=0)

    def test_what_is_quick_enough_is_left_alone(self, timed: RunningServer):
        body = {"text": "ab", "sampling_params": {"max_new_tokens": 3}}
        assert timed.http.post("/generate", json=body).json()["meta_info"]["completion_tokens"] == 3


class TestFirstTokenTimeout:
    """Two requests run for longer than the limit, so that what comes after them waits for too long."""

    @pytest.fixture(scope="class")
    @classmethod
    def timed(cls, make_server: ServerMaker):
        with make_server(engine={"max_running_requests": 2}, server={"first_token_timeout": 0.7}) as server:
            yield server

    def test_no_first_token_in_time(self, timed: RunningServer):
        with timed.holding(2), concurrent.futures.ThreadPoolExecutor() as pool:
            bodies = [{**LONG, "stream": is_stream} for is_stream in (False, True)]
            for answer in [pool.submit(timed.http.post, "/generate", json=body) for body in bodies]:
                assert answer.result().status_code == 504
                assert "--first-token-timeout" in answer.result().json()["error"]["message"]
            timed.wait_for_stats(num_waiting=0, num_running=2)
        timed.wait_for_stats(num_running=0)

    def test_one_late_answer_ends_the_request_as_a_whole(self, timed: RunningServer):
        with timed.holding(1):
            body = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 1000}}
            events = read_to_the_end(timed, "/generate", body)
            assert "--first-token-timeout" in events
            timed.wait_for_stats(num_waiting=0, num_running=1)
        timed.wait_for_stats(num_running=0)


def read_to_the_end(server: RunningServer, path: str, body: dict) -> str:
    """The events of a stream that began in time, which on a busy machine not every one does."""
    for _ in range(60):
        with server.http.stream("POST", path, json=body) as response:
            if response.status_code != 504:
                assert response.status_code == 200
                return response.read().decode()
    raise TimeoutError(f"no stream of {path} began before its time was over")


class TestHolds:
    def test_they_are_counted_apart(self):
        admission = Admission(ServerConfig(max_requests_per_key=1))
        with admission.hold("a"), admission.enter("a", 1), admission.hold("b"):
            with pytest.raises(RateLimitError, match="1 holds"), admission.hold("a"):
                pass
            assert admission._under_way["a"] == 1
        with admission.hold("a"):
            pass


class TestWhatWasLetIn:
    def test_it_goes_on_while_the_server_ends_and_no_longer(self):
        admission = Admission(ServerConfig())
        admission.close()
        with pytest.raises(ShuttingDownError), admission.enter("a", 1):
            pass
        with admission.enter("a", 1, is_let_in=True):
            pass
        admission.end()
        with pytest.raises(ShuttingDownError), admission.enter("a", 1, is_let_in=True):
            pass

    def test_it_waits_for_room(self):
        asyncio.run(self.wait())

    async def wait(self) -> None:
        admission = Admission(ServerConfig(max_requests_per_key=2))
        with admission.enter("a", 2) as leave, admission.enter("b", 2):
            waiting = [asyncio.create_task(self.take(admission, 1)) for _ in range(2)]
            too_many = asyncio.create_task(self.take(admission, 3))
            await too_many  # there never is room for them: who enters is told
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            leave()
            await asyncio.gather(*waiting)

    async def test_what_is_refused_by_a_full_queue_makes_room_too(self):
        admission = Admission(ServerConfig(max_requests_per_key=1))
        waiting: list[asyncio.Task[None]] = []

        async def fail() -> None:
            with admission.enter("a", 1):
                waiting.append(asyncio.create_task(self.take(admission, 1)))
                await asyncio.sleep(0)
                raise QueueFullError

        with pytest.raises(QueueFullError):
            await fail()
        await asyncio.wait_for(waiting[0], 5)

    async def take(self, admission: Admission, num_answers: int) -> None:
        async with admission.room("a", num_answers):
            pass


class TestSeveralKeys:
    """Without `--max-requests-per-key` none of several keys fills the engines."""

    def test_a_key_may_have_half_of_what_others_leave(self):
        admission = Admission(ServerConfig(), capacity=lambda: 100, has_several_keys=True)
        with admission.enter("a", 50), pytest.raises(QueueFullError, match="half of"), admission.enter("a", 1):
            pass
        with admission.enter("a", 40), admission.enter("b", 30), admission.enter("c", 15):
            with pytest.raises(QueueFullError), admission.enter("d", 8):
                pass
            with admission.enter("d", 7):
                pass

    def test_a_key_alone_may_have_all(self):
        admission = Admission(ServerConfig(), capacity=lambda: 100)
        with admission.hold("a"), admission.enter("a", 99), pytest.raises(QueueFullError), admission.enter("a", 1):
            pass

    async def test_programs_wait_for_the_branches_of_others_of_their_key(self):
        admission, order = Admission(ServerConfig(), capacity=lambda: 100), list[str]()

        async def run(name: str, tenant: str, num_streams: int) -> None:
            async with admission.streams(tenant, num_streams):
                order.append(name)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks, admission.streams("a", MAX_STREAMS - 10):
            waiting = tasks.create_task(run("large", "a", 11))
            given_up = tasks.create_task(run("gone", "a", 5))
            tasks.create_task(run("behind", "a", 1))
            await run("other", "b", MAX_STREAMS + 1)
            given_up.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert order == ["other"] and not waiting.done()
        assert order == ["other", "large", "behind"]

    def test_what_waits_has_the_room_that_it_was_given(self):
        asyncio.run(self.room())

    async def room(self) -> None:
        admission = Admission(ServerConfig(max_requests_per_key=2))
        async with admission.room("a", 2):
            with pytest.raises(RateLimitError), admission.enter("a", 1):
                pass
        with admission.enter("a", 2):
            pass


async def test_garbage_is_collected_seldom(monkeypatch: pytest.MonkeyPatch):
    """And while many answers are under way only once in a long time, which is none here."""
    before, collected, frozen, looks = gc.get_threshold(), list[int](), list[int](), list[int]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1))
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)

    def num_under_way() -> int:
        looks.append(len(collected))
        return garbage.MANY - (len(looks) > 3)

    collecting = asyncio.create_task(garbage.collect_garbage(num_under_way))
    await asyncio.sleep(0)
    assert frozen and not collected  # the first would look at everything that the start made
    while len(collected) < 3:
        await asyncio.sleep(0.001)
    assert gc.get_threshold() == (garbage.YOUNG, before[1], garbage.NEVER) and looks[:4] == [0] * 4
    monkeypatch.setattr(garbage, "MOST_S", 0.0)
    looks.clear()
    first = len(collected)
    while len(collected) < first + 3:
        await asyncio.sleep(0.001)
    assert looks[:3] == [first, first + 1, first + 2], "a time that is over puts nothing off"
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gc.get_threshold() == before
