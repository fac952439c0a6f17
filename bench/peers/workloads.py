"""The workloads, as data: what is asked, and what has to wait for what. Any client can run any of them.

A load is a list of chains. All chains begin at once, and the requests of one chain follow each other. Prompts are token
ids, so every engine gets exactly the same tokens, except where a form or a choice needs text.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.serving.dialects import Prompt

NAME = {"type": "string", "pattern": "^[A-Za-z ]{1,16}$"}
WAND = {"wood": NAME, "core": NAME, "length": {"type": "string", "pattern": r"^[0-9]{1,2}\.[0-9]$"}}
FIELDS: dict[str, Any] = {
    "name": NAME,
    "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
    "blood status": {"enum": ["Pure-blood", "Half-blood", "Muggle-born"]},
    "occupation": {"enum": ["student", "teacher", "auror", "minister"]},
    "wand": {"type": "object", "additionalProperties": False, "required": list(WAND), "properties": WAND},
    "alive": {"enum": ["Alive", "Deceased"]},
    "patronus": NAME,
    "bogart": NAME,
}
CHARACTER = {"type": "object", "additionalProperties": False, "required": list(FIELDS), "properties": FIELDS}
"""The schema of `f`: a character of the SGLang paper."""
WORDS = (
    "time people water house world school country story morning letter river garden music answer winter city".split()
)
CHOICES = (" a short story", " a long letter", " the history of a city", " an answer to a question")
MAX_JSON_TOKENS = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        prompt: Token ids or text.
        max_tokens: The tokens of each answer; with a schema the most of them, otherwise exactly as many.
        stream: Whether the answer is streamed, so that the time of its first token is seen.
        num_answers: How many answers it asks for. More than one are sampled, a single one is greedy.
        schema: The JSON schema that the answer must keep.
        choices: Texts to score behind the prompt. Then nothing is generated.
    """

    prompt: Prompt
    max_tokens: int = 0
    stream: bool = False
    num_answers: int = 1
    schema: Mapping[str, Any] | None = None
    choices: tuple[str, ...] = ()

    @property
    def output_tokens(self) -> int | None:
        """The tokens of all its answers; None if the answer ends where the schema says."""
        return None if self.schema or self.choices else self.max_tokens * self.num_answers


Load = list[list[Request]]


class Draw:
    """Draws prompts. The same seed, size of the vocabulary and divisor give the same ones.

    Args:
        seed: The seed, which each round changes, so that no engine finds a prompt of an earlier round in its cache.
        vocab_size: Ids are below it, and above its first eighth, which has special tokens and single bytes.
        divisor: Divides lengths and numbers of requests. Tests use it.
    """

    def __init__(self, seed: str, vocab_size: int, divisor: int = 1):
        self._random = random.Random(seed)
        self._ids = range(vocab_size // 8, vocab_size)
        self._divisor = divisor

    def size(self, full: int) -> int:
        """A length or a number after division, at least 1."""
        return max(1, full // self._divisor)

    def ids(self, length: int) -> tuple[int, ...]:
        """A prompt of this many ids, before division."""
        return tuple(self._random.choices(self._ids, k=self.size(length)))

    def text(self, num_words: int) -> str:
        """A text of this many words, before division."""
        return " ".join(self._random.choices(WORDS, k=self.size(num_words)))


def one_stream(draw: Draw) -> Load:
    """256 tokens in, 128 out, alone and streamed."""
    return [[Request(prompt=draw.ids(256), max_tokens=draw.size(128), stream=True)]]


def batch(count: int) -> Callable[[Draw], Load]:
    """`count` requests at once, 256 tokens in, 128 out."""
    return lambda draw: [[Request(prompt=draw.ids(256), max_tokens=draw.size(128))] for _ in range(count)]


def prefill(count: int) -> Callable[[Draw], Load]:
    """`count` prompts of 1024 tokens at once, 1 token out."""
    return lambda draw: [[Request(prompt=draw.ids(1024), max_tokens=1)] for _ in range(count)]


def shared_prefix(draw: Draw) -> Load:
    """64 requests at once, 512 shared tokens and 32 of their own, 8 out."""
    shared = draw.ids(512)
    return [[Request(prompt=shared + draw.ids(32), max_tokens=draw.size(8))] for _ in range(draw.size(64))]


def groups(draw: Draw) -> Load:
    """5 groups of 20 requests, mixed, 400 shared tokens and 50 of their own, 1 out."""
    shared = [draw.ids(400) for _ in range(5)]
    return [[Request(prompt=prefix + draw.ids(50), max_tokens=1)] for _ in range(draw.size(20)) for prefix in shared]


def chats(draw: Draw) -> Load:
    """8 chats of 4 turns, 128 new tokens in and 32 out for each turn. Answers do not become part of the next prompt."""

    def chat() -> list[Request]:
        turns = itertools.accumulate(draw.ids(128) for _ in range(4))
        return [Request(prompt=said, max_tokens=draw.size(32)) for said in turns]

    return [chat() for _ in range(draw.size(8))]


def objects(draw: Draw) -> Load:
    """16 JSON objects by a schema, at once."""
    prompt = f"Harry Potter is a character. {draw.text(4)}. As JSON:\n"
    texts = [f"{prompt}{number}. " for number in range(draw.size(16))]
    return [[Request(prompt=text, max_tokens=MAX_JSON_TOKENS, schema=CHARACTER)] for text in texts]


def choices(draw: Draw) -> Load:
    """16 questions at once to one text of 256 words; each scores the same four texts that may follow."""
    shared = draw.text(256)
    prompts = [f"{shared}\nQuestion {number}: {draw.text(16)} is" for number in range(draw.size(16))]
    return [[Request(prompt=prompt, choices=CHOICES)] for prompt in prompts]


def forks(draw: Draw) -> Load:
    """4 prompts of 512 tokens at once, each with 8 sampled answers of 64 tokens."""
    return [[Request(prompt=draw.ids(512), max_tokens=draw.size(64), num_answers=8)] for _ in range(draw.size(4))]


WORKLOADS: dict[str, Callable[[Draw], Load]] = {
    "a": one_stream,
    "b2": batch(2),
    "b8": batch(8),
    "b32": batch(32),
    "c1": prefill(1),
    "c8": prefill(8),
    "d": shared_prefix,
    "e": groups,
    "m": chats,
    "f": objects,
    "choices": choices,
    "forks": forks,
}
TITLES = {
    "a": "one stream",
    "b2": "2 at once",
    "b8": "8 at once",
    "b32": "32 at once",
    "c1": "a prompt of 1024",
    "c8": "8 prompts of 1024",
    "d": "shared prefix",
    "e": "5 groups",
    "m": "chats",
    "f": "JSON",
    "choices": "choices",
    "forks": "forks",
}
"""What a plot calls them."""
DEFAULT = tuple(name for name in WORKLOADS if name != "b2")
DECODES = ("a", "b2", "b8", "b32")
"""The workloads whose time has a bound that follows from the machine."""


def requests_of(load: Load) -> Sequence[Request]:
    """All requests of a load."""
    return [request for chain in load for request in chain]
