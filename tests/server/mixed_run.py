"""Requests of all kinds at once, and what their clients were told."""

import concurrent.futures
import dataclasses
import json

import httpx

from tests.engine.fake_core import FAILING_TOKEN
from tests.server.running import events_of
from tests.server.scrape import Scrape


def quiet(result: Scrape) -> bool:
    """Nothing is under way, in the front and in the engine."""
    return all(result.get(name) == 0 for name in ("jsg:answers_open", "jsg:requests_running", "jsg:requests_waiting"))


class Seen:
    """The answers that the clients of a run got."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finishes: list[tuple[str, str]] = []  # of each answer: route and finish reason
        self.left_prompt_tokens = 0  # of requests that the client left after a token
        self.left_generated_tokens = 0
        self.statuses: list[tuple[str, str]] = []  # of each response: route and status

    def add(self, *others: "Seen") -> None:
        for other in others:
            for name, value in vars(other).items():
                setattr(self, name, getattr(self, name) + value)


class Client:
    """Talks to a server and remembers what it was told."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def completion(self, prompt: str, *, n: int, max_tokens: int, stream: bool, stop: str | None = None) -> Seen:
        seen = Seen()
        body = {"prompt": prompt, "n": n, "max_tokens": max_tokens, "stream": stream, "stop": stop}
        if stream:
            body |= {"stream_options": {"include_usage": True}}
            with self.http.stream("POST", "/v1/completions", json=body) as response:
                events = events_of(response)
            choices = [choice for event in events for choice in event["choices"]]
            usage = events[-1]["usage"]
        else:
            response = self.http.post("/v1/completions", json=body)
            choices, usage = response.json()["choices"], response.json()["usage"]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == n
        seen.finishes = [("/v1/completions", reason) for reason in reasons]
        seen.statuses = [("/v1/completions", str(response.status_code))]
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        seen.generated_tokens = usage["completion_tokens"]
        return seen

    def generate(self, prompt: list[int], *, stream: bool, abort_after: int | None = None) -> Seen:
        """A request of `/generate`. With `abort_after` its client aborts it after that many tokens, and reads on."""
        rid = "-".join(map(str, prompt))
        body = {"input_ids": prompt, "rid": rid, "stream": stream, "sampling_params": {"max_new_tokens": 30}}
        if abort_after is not None:
            body["sampling_params"] = {"max_new_tokens": 900}
        if not stream:
            response = self.http.post("/generate", json=body)
            return self._native(response.json(), response)
        last = {}
        with self.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line.removeprefix("data: "))
                if abort_after is not None and last["meta_info"]["completion_tokens"] >= abort_after:
                    abort_after = None
                    assert httpx.post(f"{self.http.base_url}/abort_request", json={"rid": rid}).status_code == 200
        return self._native(last, response)

    def leave(self, prompt: list[int], *, after: int) -> Seen:
        """Disconnects after this number of tokens."""
        body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 900}}
        seen = Seen()
        with self.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    seen.left_generated_tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                if seen.left_generated_tokens >= after:
                    break
        seen.left_prompt_tokens = len(prompt)
        seen.statuses = [("/generate", "200")]
        return seen

    def fail(self) -> Seen:
        """One that the engine fails, and one that is refused before that."""
        seen = Seen()
        for body in ({"input_ids": [FAILING_TOKEN, 1]}, {"nonsense": 1}):
            response = self.http.post("/generate", json=body)
            seen.statuses.append(("/generate", str(response.status_code)))
        return seen

    def _native(self, item: dict, response: httpx.Response) -> Seen:
        seen, meta = Seen(), item["meta_info"]
        seen.prompt_tokens, seen.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        seen.generated_tokens = meta["completion_tokens"]
        seen.finishes = [("/generate", meta["finish_reason"]["type"])]
        seen.statuses = [("/generate", str(response.status_code))]
        return seen


@dataclasses.dataclass(frozen=True)
class MixedRun:
    """A server after a mixed run.

    Attributes:
        seen: What its clients saw.
        scraped: Its counters.
        lines: Its log of requests.
    """

    seen: Seen
    scraped: Scrape
    lines: list[dict]


def a_mixed_run(http: httpx.Client) -> Seen:
    """Sixty-odd requests of all kinds, eight at a time."""
    client = Client(http)
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i in range(8):
            is_even = i % 2 == 0
            jobs += [
                pool.submit(client.completion, f"prompt {i}", n=1, max_tokens=20, stream=is_even),
                pool.submit(client.completion, f"two of {i}", n=2, max_tokens=10, stream=is_even),
                pool.submit(client.completion, f"ab.{i}", n=1, max_tokens=50, stream=is_even, stop="."),
                pool.submit(client.completion, "shared", n=1, max_tokens=3, stream=False),
                pool.submit(client.generate, [1, 2, i], stream=is_even),
                pool.submit(client.generate, [3, 4, i], stream=True, abort_after=5 + i),
                pool.submit(client.leave, [5, 6, i], after=1 + 2 * i),
                pool.submit(client.fail),
            ]
    seen = Seen()
    seen.add(*(job.result() for job in jobs))
    return seen
