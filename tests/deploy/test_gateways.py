"""Two servers behind the real gateways of others, with the command line of `deploy/compose`. It needs a network."""

import contextlib
import dataclasses
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jsg.free_ports import free_ports
from tests.clients.environment import UnreachableError, make_python
from tests.deploy.manifests import ROOT, of_file
from tests.server.running import ServerProcess, data_of, running, wait_until
from tests.server.scrape import scrape

COMMAND = of_file("compose/compose.yaml")["services"]["gateway"]["command"]
REPLICA = ["serve", "tiny", "--port", "0", "--metrics-alias", "vllm", "--shutdown-timeout", "0.5"]
REPLICA += ["--max-running-requests", "8", "--max-total-tokens", "32768"]
CHAT = [{"role": "user", "content": "hello there"}]
START_S = 60

NUM_DOCUMENTS, NUM_QUESTIONS, NUM_CLIENTS = 8, 8, 4
MIN_OF_POSSIBLE = 0.95
NUM_STREAMS, NUM_AFTER = 6, 40


@dataclasses.dataclass(frozen=True)
class Gateway:
    """A gateway of others.

    Attributes:
        pin: Its package.
        start: Its command, in the folder of its environment's programs, with options that only it needs: the second one
            tries a dead server again and again until it takes it for broken.
        has_messages: Whether it knows Anthropic's API.
    """

    pin: str
    start: tuple[str, ...]
    has_messages: bool

    @contextlib.contextmanager
    def running(self, urls: list[str], folder: Path) -> Iterator[str]:
        """Runs it before two servers; gives its address. Skips the test where the registry cannot be reached."""
        try:
            programs = make_python(ROOT / ".cache" / "deploy" / self.pin.partition("==")[0], [self.pin])
        except UnreachableError as error:
            pytest.skip(str(error))
        port = free_ports()
        program, *rest = self.start
        with started([str(programs / program), *rest, *arguments_of(urls, port)], folder):
            yield f"http://127.0.0.1:{port}"


GATEWAYS = [
    Gateway("smg==1.13.0", ("smg", "launch"), has_messages=True),
    Gateway(
        "sglang-router==0.3.2",
        ("python", "-m", "sglang_router.launch_router", "--cb-failure-threshold=3"),
        has_messages=False,
    ),
]


def bodies(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """Each route that generates → a greedy request."""
    found: dict[str, dict[str, Any]] = {
        "/generate": {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        "/v1/completions": {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 8},
        "/v1/chat/completions": {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 8},
        "/v1/responses": {"model": "tiny", "input": CHAT, "temperature": 0, "max_output_tokens": 8},
    }
    if gateway.has_messages:
        found["/v1/messages"] = found["/v1/chat/completions"]
    return found


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    match path:
        case "/generate":
            return answer["text"]
        case "/v1/completions":
            return answer["choices"][0]["text"]
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case "/v1/responses":
            return "".join(part["text"] for item in answer["output"] for part in item["content"])
        case _:
            return answer["content"][0]["text"]


def streamed_text_of(path: str, events: list[dict[str, Any]]) -> str:
    """The text of the events of a stream."""
    match path:
        case "/generate":
            return events[-1]["text"]
        case "/v1/completions":
            return "".join(choice["text"] for event in events for choice in event["choices"])
        case "/v1/chat/completions":
            return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        case "/v1/responses":
            return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        case _:
            return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A gateway that knows its two servers."""

    gateway: Gateway
    replicas: list[ServerProcess]
    http: httpx.Client


Maker = Callable[[Gateway], contextlib.AbstractContextManager[Fleet]]


@pytest.fixture(scope="module")
def make_fleet(compile_cache_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    @contextlib.contextmanager
    def make(gateway: Gateway) -> Iterator[Fleet]:
        command = ["-m", "jsg.cli", *REPLICA, "--compilation-cache-dir", compile_cache_dir]
        with contextlib.ExitStack() as stack:
            replicas = [stack.enter_context(running(command)) for _ in range(2)]
            urls = [str(replica.http.base_url).rstrip("/") for replica in replicas]
            url = stack.enter_context(gateway.running(urls, tmp_path_factory.mktemp("gateway")))
            http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
            wait_until(lambda: num_ready(http) == len(replicas), START_S)
            yield Fleet(gateway, replicas, http)

    return make


def arguments_of(urls: list[str], port: int) -> list[str]:
    """The arguments in `compose.yaml`, for servers and ports of this machine."""
    places = {"http://jsg-0:30000": urls[0], "http://jsg-1:30000": urls[1], "--port=8080": f"--port={port}"}
    places |= {"--host=0.0.0.0": "--host=127.0.0.1", "--prometheus-host=0.0.0.0": "--prometheus-host=127.0.0.1"}
    places |= {"--prometheus-port=29000": f"--prometheus-port={free_ports()}"}
    assert set(places) <= set(COMMAND)
    return [places.get(argument, argument) for argument in COMMAND]


@contextlib.contextmanager
def started(command: list[str], directory: Path) -> Iterator[None]:
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(command, cwd=directory, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def num_ready(http: httpx.Client) -> int:
    with contextlib.suppress(httpx.TransportError):
        if (answer := http.get("/readiness")).status_code == 200:
            return answer.json()["healthy_workers"]
    return 0


@pytest.fixture(scope="module", params=GATEWAYS, ids=lambda gateway: gateway.pin)
def fleet(request: pytest.FixtureRequest, make_fleet: Maker) -> Iterator[Fleet]:
    with make_fleet(request.param) as made:
        yield made


@pytest.mark.long
class TestRoutes:
    def test_answers_are_those_of_the_server(self, fleet: Fleet):
        direct = fleet.replicas[0].http
        for path, body in bodies(fleet.gateway).items():
            answer = fleet.http.post(path, json=body)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            assert text_of(path, answer.json()) == text_of(path, direct.post(path, json=body).json()) != ""

    def test_streams_are_those_of_the_server(self, fleet: Fleet):
        direct = fleet.replicas[0].http
        for path, body in bodies(fleet.gateway).items():
            answer = fleet.http.post(path, json=body | {"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream"), f"{path}: {answer.text}"
            events = data_of(answer.text.splitlines())
            assert streamed_text_of(path, events) == text_of(path, direct.post(path, json=body).json())

    def test_what_is_asked_of_servers_is_answered(self, fleet: Fleet):
        for path in ("/health", "/health_generate", "/v1/models", "/get_model_info", "/get_server_info", "/get_loads"):
            assert fleet.http.get(path).status_code == 200, path
        assert [model["id"] for model in fleet.http.get("/v1/models").json()["data"]] == ["tiny"]
        assert "requests_waiting" in fleet.http.get("/engine_metrics").text
        if fleet.gateway.has_messages:
            counted = fleet.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": CHAT})
            assert counted.json()["input_tokens"] > 0

    def test_a_refusal_of_the_server_reaches_the_client(self, fleet: Fleet):
        refused = fleet.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 10**6})
        assert refused.status_code == 400 and "tokens" in refused.json()["error"]["message"]


@pytest.mark.long
def test_prefixes_are_found_again(fleet: Fleet):
    """As many cached tokens as one server finds that gets all requests."""
    prompts = [
        " ".join(f"{document}{word}" for word in range(150)) + f" Question {question}"
        for question in range(NUM_QUESTIONS)
        for document in range(NUM_DOCUMENTS)
    ]

    def cached(http: httpx.Client) -> int:
        flush(fleet)

        def ask(prompt: str) -> int:
            answer = http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            return sum(clients.map(ask, prompts))

    possible = cached(fleet.replicas[0].http)
    before = [num_finished(replica) for replica in fleet.replicas]
    found = cached(fleet.http)
    shares = [num_finished(replica) - old for replica, old in zip(fleet.replicas, before, strict=True)]
    print(json.dumps({"gateway": fleet.gateway.pin, "found": found, "possible": possible, "shares": shares}))
    assert min(shares) >= len(prompts) // 4, "both work"
    assert found >= MIN_OF_POSSIBLE * possible > 0


def num_finished(replica: ServerProcess) -> int:
    return int(scrape(replica.http).get("jsg:requests_finished_total"))


def flush(fleet: Fleet) -> None:
    for replica in fleet.replicas:
        wait_until(lambda replica=replica: replica.http.post("/flush_cache").status_code == 200)


@pytest.mark.long
@pytest.mark.parametrize("gateway", GATEWAYS, ids=lambda gateway: gateway.pin)
def test_a_server_that_is_killed_takes_only_its_own_streams_along(gateway: Gateway, make_fleet: Maker):
    with make_fleet(gateway) as fleet, ThreadPoolExecutor(NUM_STREAMS) as clients:
        streams = [clients.submit(stream, fleet.http, number) for number in range(NUM_STREAMS)]
        killed, other = fleet.replicas
        wait_until(lambda: sum(replica.stats()["num_running"] for replica in fleet.replicas) == NUM_STREAMS)
        num_lost = killed.stats()["num_running"]
        assert 0 < num_lost < NUM_STREAMS
        killed.process.send_signal(signal.SIGKILL)
        statuses = [
            fleet.http.post("/v1/completions", json={"model": "tiny", "prompt": f"{n}", "max_tokens": 2}).status_code
            for n in range(NUM_AFTER)
        ]
        ends = [each.result() for each in streams]
        print(json.dumps({"gateway": gateway.pin, "statuses": sorted(set(statuses)), "lost": num_lost, "ends": ends}))
        assert statuses == [200] * NUM_AFTER, statuses
        assert ends.count("length") == NUM_STREAMS - num_lost
        assert other.process.poll() is None


def stream(http: httpx.Client, number: int) -> str:
    """Reads a long stream; returns why it ended."""
    body = {"model": "tiny", "prompt": f"{number} " * 40, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    reason = "cut"
    try:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for event in data_of(answer.iter_lines()):
                if "error" in event:
                    return "error"
                reason = event["choices"][0]["finish_reason"] or reason
    except httpx.TransportError:
        return "cut"
    return reason


def test_compose_installs_what_is_tested_here():
    installed = of_file("compose/compose.yaml")["services"]["gateway"]["build"]["dockerfile_inline"]
    assert f" {GATEWAYS[0].pin}\n" in installed
