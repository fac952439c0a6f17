"""Runs a load on a server with the completions API, or in a worker process that generates whole batches."""

import asyncio
import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from bench.peers.workloads import Load, Request, requests_of
from bench.serving.client import Clock, Outcome, Target, open_session, send
from bench.serving.dialects import DIALECTS, Ask

TIMEOUT_S = 900


class WrongAnswerError(Exception):
    """An engine refused a request, or did not answer what was asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        prompt_tokens, output_tokens: Numbers of tokens.
        cached_tokens: Prompt tokens that the engine had in its cache; None if it does not say.
        text: The text, if there is one.
        first_s: Seconds until the first token of a streamed answer; None if it was not seen.
        last_s: Seconds until its last token; None as above.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    text: str = ""
    first_s: float | None = None
    last_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """A load that an engine has answered: seconds of wall time, and the answers in the order of the requests."""

    wall_s: float
    answers: list[Answer]


class Client(Protocol):
    """Something that runs loads on one engine."""

    def cannot(self, load: Load) -> str | None:
        """Why the engine cannot run this load; None if it can."""
        ...

    def run(self, load: Load) -> Ran:
        """Runs it. Raises WrongAnswerError if an answer is not what was asked for."""
        ...


Scorer = Callable[[aiohttp.ClientSession, str, Request], Any]


async def select(session: aiohttp.ClientSession, url: str, request: Request) -> int:
    """Scores the choices with jsg's `/select`, and gives the number of the likeliest."""
    body = {"prompt": request.prompt, "choices": request.choices, "method": "token_trie"}
    return (await _post(session, url + "/select", body))["choice"]


def by_prompt_logprobs(model: str) -> Scorer:
    """Scores choices where a server gives the log-probabilities of a prompt, as vLLM does: one prompt per choice."""

    async def score(session: aiohttp.ClientSession, url: str, request: Request) -> int:
        prompts = [f"{request.prompt}{choice}" for choice in request.choices]
        body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await _post(session, url + "/v1/completions", body)
        scored = sorted(answer["choices"], key=lambda choice: choice["index"])
        sums = [
            sum(next(iter(position.values()))["logprob"] for position in choice["prompt_logprobs"] if position)
            for choice in scored
        ]
        return sums.index(max(sums))

    return score


class HttpClient:
    """A client of a server.

    Args:
        url: The server's address.
        model: Its name of the model.
        schema_fields: The fields that ask it for JSON by a schema.
        scorer: Scores choices; None if it cannot.
        usage_is_of_one: Whether its usage counts the tokens of only one of several answers to a prompt, as llama.cpp's.
        clock: Seconds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        schema_fields: Callable[[Mapping[str, Any]], dict[str, Any]],
        scorer: Scorer | None = None,
        clock: Clock = time.perf_counter,
        *,
        usage_is_of_one: bool = False,
    ):
        self._url = url
        self._model = model
        self._schema_fields = schema_fields
        self._scorer = scorer
        self._clock = clock
        self._usage_is_of_one = usage_is_of_one

    def cannot(self, load: Load) -> str | None:
        if self._scorer is None and any(request.choices for request in requests_of(load)):
            return "it gives no log-probabilities of a prompt"
        return None

    def run(self, load: Load) -> Ran:
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> Ran:
        async with open_session(TIMEOUT_S) as session:
            started = self._clock()
            chains = await asyncio.gather(*(self._chain(session, chain) for chain in load))
            wall_s = self._clock() - started
        return Ran(wall_s, [answer for chain in chains for answer in chain])

    async def _chain(self, session: aiohttp.ClientSession, chain: Sequence[Request]) -> list[Answer]:
        return [await (self._choose if request.choices else self._ask)(session, request) for request in chain]

    async def _choose(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        assert self._scorer is not None
        try:
            chosen = await self._scorer(session, self._url, request)
        except (aiohttp.ClientError, TimeoutError, KeyError) as error:
            raise WrongAnswerError(f"the choices were not scored: {type(error).__name__} {error}") from error
        return Answer(0, 0, text=request.choices[chosen])

    async def _ask(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        fields: dict[str, Any] = {"n": request.num_answers} if request.num_answers > 1 else {}
        fields |= self._schema_fields(request.schema) if request.schema else {}
        ask = Ask(
            model=self._model,
            temperature=1.0 if request.num_answers > 1 else 0.0,
            ignore_eos=request.schema is None,
            stream=request.stream,
            extra_body=fields,
        )
        target = Target(base_url=self._url, dialect=DIALECTS["openai-completions"], ask=ask)
        outcome = Outcome(group=0, due_s=0.0, sent_s=0.0)
        await send(session, target, (request.prompt,), request.max_tokens, outcome, self._clock)
        if outcome.error is not None:
            raise WrongAnswerError(f"{outcome.error}: {outcome.message}")
        answer = answer_of(outcome)
        if self._usage_is_of_one:
            answer = dataclasses.replace(answer, output_tokens=answer.output_tokens * request.num_answers)
        return checked(request, answer)


def answer_of(outcome: Outcome) -> Answer:
    """What the client saw of an answer."""
    reading, arrivals = outcome.reading, outcome.arrivals
    first, last = (at - outcome.sent_s for at, _ in (arrivals[0], arrivals[-1])) if arrivals else (None, None)
    return Answer(reading.prompt_tokens or 0, reading.num_tokens or 0, reading.cached_tokens, reading.text, first, last)


def checked(request: Request, answer: Answer) -> Answer:
    """The answer. Raises WrongAnswerError if it has not as many tokens as were asked for."""
    if request.output_tokens is not None and answer.output_tokens != request.output_tokens:
        raise WrongAnswerError(f"{answer.output_tokens} tokens came, but {request.output_tokens} were asked for")
    return answer


class WorkerClient:
    """A client of a worker that generates one static batch after another, and speaks a line of JSON for each.

    Args:
        process: The worker, whose stdin and stdout are pipes.
        max_rows: The most rows of a batch.
    """

    def __init__(self, process: subprocess.Popen[str], max_rows: int, clock: Clock = time.perf_counter):
        self._process = process
        self._max_rows = max_rows
        self._clock = clock

    def cannot(self, load: Load) -> str | None:
        found = requests_of(load)
        if any(request.schema or request.choices or request.num_answers > 1 for request in found):
            return "its batches have prompts and lengths only"
        if any(len(chain) > 1 for chain in load) or len({(len(r.prompt), r.max_tokens) for r in found}) > 1:
            return "all rows of its batch begin and end together"
        return None

    def run(self, load: Load) -> Ran:
        found, answers, started = requests_of(load), [], self._clock()
        for begin in range(0, len(found), self._max_rows):
            rows = found[begin : begin + self._max_rows]
            said = self.ask({"prompts": [request.prompt for request in rows], "max_tokens": rows[0].max_tokens})
            for request, count in zip(rows, said["output_tokens"], strict=True):
                answer = Answer(len(request.prompt), count, None, "", said.get("first_s"), said.get("last_s"))
                answers.append(checked(request, answer))
        return Ran(self._clock() - started, answers)

    def ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one line and reads one. Raises WrongAnswerError if the worker has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WrongAnswerError("the worker has ended; its log says why")
        return json.loads(line)


async def _post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        answer = await response.json(content_type=None)
    if response.status != 200:
        raise WrongAnswerError(f"http_{response.status}: {str(answer)[:200]}")
    return answer
