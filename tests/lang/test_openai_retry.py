"""Failures of an API: what is tried again, how long is waited, what is raised, what it costs."""

import asyncio
import email.utils
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

import jsg as sgl
from jsg.errors import BackendError, ConfigError, RequestError
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import Caller
from jsg.lang.remote.dialects import DIALECTS
from jsg.lang.remote.openai import OpenAI
from jsg.lang.remote.openai_wire import TextApi
from jsg.lang.remote.remote_backend import RemoteBackend
from jsg.lang.remote.retry import Backoff, RetryPolicy, is_passing, retry_after_s
from jsg.lang.remote.usage import Meter
from jsg.lang.remote.wire import Bill, Call, Delta, Failure, Scored, Token
from jsg.lang.streams.loop import shared_loop
from jsg.lang.streams.per_loop import PerLoop
from jsg.lang.words.ir import SamplingArgs
from tests.lang.wire_servers import Fault, Parrot, WireServer, closing, tell, write

PASSING = Failure("busy", 429, is_passing=True)


@pytest.fixture
def wire() -> Iterator[WireServer]:
    with WireServer(Parrot("Name: Ada\n", ["Name", "Ada"])).running() as server:
        yield server


def backend_of(wire: WireServer, waits: list[float], **policy):
    """A backend that notes how long it would wait, and does not."""
    import openai

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    hangs = any(fault is not None and fault.hangs for fault in wire.faults)

    def new_client() -> openai.AsyncOpenAI:
        timeout_s = 0.2 if hangs else 60.0  # a busy machine is no failure
        return openai.AsyncOpenAI(base_url=wire.openai_url, api_key="none", max_retries=0, timeout=timeout_s)

    unsupported = Unsupported("OpenAI('toy')", "error")
    api = TextApi(PerLoop(new_client, openai.AsyncOpenAI.close), "toy", DIALECTS["compatible"], unsupported)
    retry = RetryPolicy(**{"seed": 0, **policy})
    return closing(RemoteBackend(api, unsupported, retry, is_chat=False, model="toy", sleep=sleep))


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_passing_failure_is_tried_again_with_growing_waits(wire, status):
    wire.faults = [Fault(status)] * 3
    waits: list[float] = []

    async with backend_of(wire, waits) as backend:
        session = backend.open()
        await tell(session, "Name:")
        assert (await write(session, stop=("\n",))).text == " Ada"
        usage = backend.usage()
        assert (usage.calls, usage.retries) == (1, 3)
    assert [0.25 <= waits[0] <= 0.5, 0.5 <= waits[1] <= 1.0, 1.0 <= waits[2] <= 2.0] == [True] * 3
    assert len({request["prompt"] for request in wire.requests}) == 1


async def test_what_the_api_asks_to_wait_is_waited(wire):
    wire.faults = [Fault(429, {"Retry-After": "7"}), Fault(429, {"retry-after-ms": "9000"})]
    waits: list[float] = []

    async with backend_of(wire, waits) as backend:
        session = backend.open()
        await tell(session, "Name:")
        await write(session, max_tokens=1)
    assert waits == [7.0, 9.0]


@pytest.mark.parametrize(
    ("fault", "kind", "said", "num_requests"),
    [
        (Fault(400), RequestError, "HTTP 400.*told to fail", 1),
        (Fault(401), BackendError, "HTTP 401.*told to fail", 1),
        (Fault(404), BackendError, "HTTP 404", 1),
        (Fault(429, {"Retry-After": "3600"}), BackendError, "HTTP 429", 1),
        (Fault(500, {"x-should-retry": "false"}), BackendError, "HTTP 500", 1),
        (Fault(503), BackendError, r"HTTP 503.*after 4 attempts", 4),
    ],
)
async def test_the_rest_is_raised_with_the_apis_words(wire, fault, kind, said, num_requests):
    wire.faults = [fault] * 9
    waits: list[float] = []

    async with backend_of(wire, waits) as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(kind, match=said) as caught:
            await write(session)
        if fault.status == 429:
            assert caught.value.retry_after_s == 3600
        if kind is BackendError:
            assert caught.value.status == fault.status
        assert backend.usage().calls == 0
    assert len(wire.requests) == num_requests


async def test_a_silent_server_is_given_up_after_the_time_out(wire):
    wire.faults = [Fault(hangs=True)] * 2
    waits: list[float] = []

    async with backend_of(wire, waits, max_retries=1) as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(BackendError, match=r"timed out.*after 2 attempts"):
            await write(session)
    assert len(wire.requests) == 2


@pytest.mark.parametrize("fault", [Fault(after_tokens=1), Fault(after_tokens=1, hangs=True)])
async def test_an_answer_that_breaks_off_is_not_begun_again(wire, fault):
    """Somebody has read its beginning already."""
    wire.faults = [fault]
    waits: list[float] = []

    async with backend_of(wire, waits) as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(BackendError):
            await write(session)
        assert backend.usage().unreported_calls == 1
    assert not waits
    assert len(wire.requests) == 1


async def test_an_answer_that_ends_without_a_reason_is_no_answer(wire):
    wire.faults = [Fault(event={"object": "text_completion", "choices": []})]
    wire.answer = None

    async with backend_of(wire, []) as backend:
        real = backend._caller.api.stream

        async def without_reason(call):
            async for delta in real(call):
                if delta.finish is None:
                    yield delta

        backend._caller.api.stream = without_reason
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(BackendError, match="without saying why"):
            await write(session)


class Answers:
    """An API whose attempts are written down: deltas, and what ends them."""

    name = "Written"
    failures = (ConnectionError,)

    def __init__(self, *attempts: list[Any]):
        self.attempts = list(attempts)

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        for one in self.attempts.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        return self.attempts.pop(0)  # pyright: ignore[reportReturnType]

    def explain(self, error: Exception) -> Failure:
        return Failure(str(error), is_passing=True)


def caller_of(*attempts: Any) -> Caller:
    async def sleep(_seconds: float) -> None:
        pass

    api: Any = Answers(*attempts)
    return Caller(api, Backoff(RetryPolicy(seed=0)), Meter(), sleep)


async def test_n12_what_came_of_a_failed_attempt_is_not_part_of_the_next():
    r"""Such as the token "bytes:\xe2", whose text comes with the one behind it."""
    half, whole = Token("bytes:\\xe2"), Token("é")
    end = Delta(finish="stop")
    caller = caller_of(
        [Delta(tokens=(half,)), ConnectionError("lost")],
        [Delta(tokens=(half,)), Delta(text="é", tokens=(whole,)), end],
    )

    assert [delta async for delta in caller.stream(Call(prompt="p", args=SamplingArgs()))] == [
        Delta(tokens=(half,)),
        Delta(text="é", tokens=(whole,)),
        end,
    ]
    assert caller.meter.usage.retries == 1


@pytest.mark.parametrize("wrong", [Delta(text=5), Delta(index=7), Delta(index=-1), KeyError("choices"), TypeError("a")])  # pyright: ignore[reportArgumentType]
def test_n6_an_answer_of_another_form_is_the_backends_fault(wrong):
    call = Call(prompt="p", args=SamplingArgs())

    async def stream():
        return [delta async for delta in caller_of([wrong]).stream(call)]

    for attempt in (stream, lambda: caller_of([wrong]).collect(call)):
        with pytest.raises(BackendError, match=r"Written must answer in the form of its API.*check base_url"):
            asyncio.run(attempt())


def test_n6_scores_must_be_those_of_the_choices():
    with pytest.raises(BackendError, match=r"each of 2 choices, but gave 1 scores"):
        asyncio.run(caller_of(Scored(((),), Bill())).score("p", ("a", "b")))


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "text": ["a"], "finish_reason": None}]},
        {"choices": [{"text": "a"}]},
        {"choices": [5]},
        {"choices": 5},
        {"choices": [], "usage": {"prompt_tokens": "many"}},
        {"choices": [], "usage": []},
    ],
)
async def test_n6_a_wrong_event_on_the_wire(wire, event):
    wire.faults = [Fault(event=event, comes_first=True)]

    async with backend_of(wire, []) as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(BackendError, match=r"in the form of its API|without saying why"):
            await write(session)


def test_nobody_there_is_tried_again():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"

        async def main():
            retry = RetryPolicy(max_retries=2, first_wait_s=0.0)
            backend = OpenAI("toy", base_url=url, api="completions", retry=retry)
            session = backend.open()
            await tell(session, "Name:")
            with pytest.raises(BackendError, match=r"Connection error.*after 3 attempts"):
                await write(session)
            assert backend.usage().retries == 2
            await backend.close()

        asyncio.run(main())


class TestBackoff:
    def test_waits_grow_to_a_limit_and_differ_by_the_seed(self):
        policy = RetryPolicy(max_retries=99, first_wait_s=1.0, max_wait_s=8.0, seed=1)
        waits = [Backoff(policy).wait_s(PASSING, failed) or 0.0 for failed in range(1, 99)]
        assert waits[:4] == sorted(waits[:4])
        assert all(4.0 <= wait <= 8.0 for wait in waits[4:])
        one, other = (Backoff(RetryPolicy(seed=seed)).wait_s(PASSING, 1) for seed in (1, 2))
        assert one != other and one == Backoff(RetryPolicy(seed=1)).wait_s(PASSING, 1)

    def test_gives_up(self):
        backoff = Backoff(RetryPolicy(max_retries=2))
        assert backoff.wait_s(PASSING, 2) is not None and backoff.wait_s(PASSING, 3) is None
        assert backoff.wait_s(Failure("wrong", 400), 1) is None
        assert backoff.wait_s(Failure("busy", 429, is_passing=True, retry_after_s=61.0), 1) is None

    @pytest.mark.parametrize("wrong", [{"max_retries": -1}, {"first_wait_s": -1.0}, {"max_wait_s": float("inf")}])
    def test_numbers_that_cannot_be_are_refused(self, wrong):
        with pytest.raises(ConfigError, match="max_retries must be"):
            RetryPolicy(**wrong)


def test_retry_after_is_read_in_all_its_forms():
    assert retry_after_s({"retry-after": "2"}) == 2
    assert retry_after_s({"retry-after": "2", "retry-after-ms": "30"}) == 0.03
    assert retry_after_s({"retry-after": "nan"}) is None and retry_after_s({"retry-after": "-3"}) is None
    assert retry_after_s({}) is None and retry_after_s({"retry-after": "soon"}) is None
    later = email.utils.formatdate(time.time() + 30, usegmt=True)
    wait = retry_after_s({"retry-after": later})
    assert wait is not None and 25 < wait <= 31
    assert retry_after_s({"retry-after": email.utils.formatdate(0, usegmt=True)}) == 0
    assert is_passing(400, {"x-should-retry": "true"})


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_a_date_is_read_by_the_clock_of_who_wrote_it(monkeypatch: pytest.MonkeyPatch, jump_s: int):
    """The clock of this machine may be wrong, and may jump."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    headers = {
        "date": email.utils.formatdate(now, usegmt=True),
        "retry-after": email.utils.formatdate(now + 30, usegmt=True),
    }
    assert retry_after_s(headers) == 30 and retry_after_s(headers | {"retry-after": headers["date"]}) == 0


@pytest.mark.parametrize(("package", "name"), [("openai", "OpenAI"), ("anthropic", "Anthropic")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, name):
    code = f"""
import sys
import jsg
from jsg.errors import ConfigError
assert not {{"openai", "anthropic", "httpx"}} & sys.modules.keys()
sys.modules[{package!r}] = None
try:
    jsg.{name}("m")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert f"pip install {package}\n" in done.stdout


def test_n10_another_server_does_not_hear_of_the_account_at_openai(wire, monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")

    async def ask(**options):
        backend = OpenAI("toy", base_url=wire.openai_url, api="completions", **options)
        session = backend.open()
        await tell(session, "Name:")
        await write(session, max_tokens=1)
        await backend.close()

    asyncio.run(ask())
    assert not {"openai-organization", "openai-project"} & wire.headers[0].keys()
    asyncio.run(ask(organization="mine", project="this"))
    assert (wire.headers[1]["openai-organization"], wire.headers[1]["openai-project"]) == ("mine", "this")


def test_s9_a_backend_closes_what_programs_opened(wire):
    @sgl.function
    def program(s):
        s += "Name:" + sgl.gen("name", max_tokens=1)

    with OpenAI("toy", base_url=wire.openai_url, api="completions") as backend:
        api: Any = backend._caller.api

        def program_client():
            return api._clients._things[shared_loop().loop][1]

        program.run(backend=backend)["name"]
        clients = [program_client()]
        asyncio.run(backend.close())  # on another loop than that of programs
        assert clients[0].is_closed()
        program.run(backend=backend)["name"]
        clients.append(program_client())
    assert [client.is_closed() for client in clients] == [True, True]


def test_options_that_the_package_refuses_are_a_config_error(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key"):
        OpenAI("gpt-4o-mini")
    with pytest.raises(ConfigError, match="no_such_option"):
        OpenAI("m", base_url="http://127.0.0.1:1", no_such_option=1)
    with pytest.raises(ConfigError, match="dialect must be one of"):
        OpenAI("m", base_url="http://127.0.0.1:1", dialect="klingon")
    with pytest.raises(ConfigError, match='api must be "chat"'):
        OpenAI("m", base_url="http://127.0.0.1:1", api="telex")  # pyright: ignore[reportArgumentType]


def test_calls_of_a_backend_wait_for_each_other():
    class Counting:
        name, failures, num_running, most = "counting", (), 0, 0

        async def stream(self, call):
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.num_running -= 1
            yield Delta(text="a", finish="stop")

    async def most(**options):
        api: Any = Counting()
        caller = Caller(api, Backoff(RetryPolicy()), Meter(), **options)
        call: Any = Call(prompt="p", args=SamplingArgs())
        await asyncio.gather(*(caller.collect(call) for _ in range(40)))
        return api.most

    assert asyncio.run(most()) == 32 and asyncio.run(most(max_calls=3)) == 3
