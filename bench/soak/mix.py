"""The requests of the soak. Request number i of a seed is always the same, whichever client sends it and when."""

import dataclasses
import enum
import random
from typing import Any

Json = dict[str, Any]

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
WORDS = (
    "who what when where why how is the a of in to and day night sun moon sea hill river road city king queen".split()
)
NUM_PREFIXES = 5
FIRST_ID, NUM_LAST_IDS = 100, 10  # tokens at the ends of a vocabulary may be special
NUM_SCHEMAS = 12  # fewer than the caches of grammars hold, so that their memory settles
MAX_NEW, MAX_OWN, PREFIX_LEN = 48, 100, 120


class Kind(enum.StrEnum):
    """What a request tests."""

    STREAM = "stream"
    DISCONNECT = "disconnect"
    ABORT = "abort"
    PARALLEL = "n=2"
    INVALID = "invalid"
    OVER_LONG = "over-long"
    SHARED = "shared prefix"
    PLAIN = "plain"
    FORM = "form"
    TOOL = "tool"


SHARES = {
    Kind.STREAM: 20,
    Kind.DISCONNECT: 20,
    Kind.ABORT: 10,
    Kind.PARALLEL: 10,
    Kind.INVALID: 5,
    Kind.OVER_LONG: 5,
    Kind.SHARED: 10,
    Kind.PLAIN: 10,
    Kind.FORM: 5,
    Kind.TOOL: 5,
}
"""How many of a hundred requests are of each kind."""

INVALID: tuple[tuple[str, Json], ...] = (
    (GENERATE, {}),
    (GENERATE, {"text": "a", "input_ids": [300]}),
    (GENERATE, {"input_ids": [-1]}),
    (GENERATE, {"input_ids": [2**31]}),
    (GENERATE, {"input_ids": []}),
    (GENERATE, {"input_ids": "text"}),
    (GENERATE, {"text": "a", "sampling_params": {"temperature": -1}}),
    (GENERATE, {"text": "a", "sampling_params": {"top_p": 0}}),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -5}}),
    (GENERATE, {"text": "a", "sampling_params": {"no_such_field": 1}}),
    (GENERATE, {"text": "a", "sampling_params": {"n": True}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "temperature": 1e300}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1000}),
    (CHAT, {"messages": "hello"}),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One request.

    Attributes:
        number: Its place in the seed's sequence.
        kind: What it tests.
        path: Its endpoint.
        body: Its JSON body.
        cut_after: The number of events after which the client disconnects or aborts; None if it does not.
    """

    number: int
    kind: Kind
    path: str
    body: Json
    cut_after: int | None = None

    @property
    def streams(self) -> bool:
        """Whether it asks for a stream."""
        return bool(self.body.get("stream"))

    @property
    def max_tokens(self) -> int:
        """The most tokens of each answer."""
        if self.path == GENERATE:
            return self.body["sampling_params"]["max_new_tokens"]
        return self.body["max_tokens"]

    def alone(self) -> Json:
        """The body of its replay, which asks for the same answer without streaming and without a request id."""
        without = {"rid", "stream", "stream_options"}
        return {name: value for name, value in self.body.items() if name not in without}


class Mix:
    """The sequence of requests of one seed."""

    def __init__(self, seed: int, max_request_tokens: int, vocab_size: int):
        """Makes a mix for a server with this limit of tokens per request. Token ids are below `vocab_size`."""
        self._seed = seed
        self._max_request_tokens = max_request_tokens
        self._ids = range(FIRST_ID, vocab_size - NUM_LAST_IDS)
        self._prefixes = [
            random.Random(f"{seed}:prefix:{number}").choices(self._ids, k=PREFIX_LEN) for number in range(NUM_PREFIXES)
        ]

    def task(self, number: int) -> Task:
        """The request with this number."""
        rng = random.Random(f"{self._seed}:{number}")
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind is Kind.INVALID:
            path, body = rng.choice(INVALID)
            return Task(number, kind, path, body)
        if kind in (Kind.FORM, Kind.TOOL):
            return Task(number, kind, CHAT, self._grammar_body(rng, kind))
        path = GENERATE
        if kind in (Kind.STREAM, Kind.PARALLEL, Kind.PLAIN):
            path = rng.choice((GENERATE, COMPLETIONS, CHAT))
        streams = kind in (Kind.STREAM, Kind.DISCONNECT, Kind.ABORT)
        body = self._body(rng, number, kind, path, streams=streams)
        cut_after = None
        if kind in (Kind.DISCONNECT, Kind.ABORT):
            body["rid"] = f"soak-{number}"
            cut_after = rng.randrange(body["sampling_params"]["max_new_tokens"])
        return Task(number, kind, path, body, cut_after)

    def _body(self, rng: random.Random, number: int, kind: Kind, path: str, *, streams: bool) -> Json:
        max_tokens = rng.randint(4, MAX_NEW)
        ids = rng.choices(self._ids, k=rng.randint(1, MAX_OWN))
        if kind is Kind.SHARED:
            ids = rng.choice(self._prefixes) + ids
        if kind is Kind.OVER_LONG:
            ids = rng.choices(self._ids, k=self._max_request_tokens + rng.randint(0, 200))
        seed, is_greedy = rng.randrange(2**31), rng.random() < 0.5
        count = 2 if kind is Kind.PARALLEL else 1
        if path == GENERATE:
            sampling: Json = {"max_new_tokens": max_tokens, "ignore_eos": rng.random() < 0.8, "n": count}
            sampling |= {"temperature": 0} if is_greedy else {"temperature": 0.9, "top_p": 0.95, "sampling_seed": seed}
            return {"input_ids": ids, "sampling_params": sampling, "stream": streams}
        sampling = {"max_tokens": max_tokens, "n": count, "seed": seed, "temperature": 0 if is_greedy else 0.9}
        if streams:
            sampling |= {"stream": True, "stream_options": {"include_usage": True}}
        if path == COMPLETIONS:
            return {"prompt": ids, "ignore_eos": True} | sampling
        return {"messages": _messages(rng)} | sampling

    def _grammar_body(self, rng: random.Random, kind: Kind) -> Json:
        """A chat whose answer is a form, or a call of a tool, by one of a few schemas. Half of them are streams."""
        word = rng.choice(WORDS[:NUM_SCHEMAS])
        schema = {
            "type": "object",
            "properties": {word: {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
            "required": [word, "count"],
            "additionalProperties": False,
        }
        if kind is Kind.FORM:
            form = {"name": word, "schema": schema}
            body: Json = {"response_format": {"type": "json_schema", "json_schema": form}}
        else:
            tool = {"name": f"find_{word}", "parameters": schema}
            body = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        body |= {"max_tokens": MAX_NEW, "n": 1, "seed": rng.randrange(2**31), "temperature": rng.choice([0, 0.9])}
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {"messages": _messages(rng)} | body


def _messages(rng: random.Random) -> list[Json]:
    return [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 10)))}]
