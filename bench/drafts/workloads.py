"""What is asked to measure drafts: rounds of requests whose answers copy, repeat, or do neither.

Texts are drawn from the values that the model was not trained on.
"""

import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.report import ROOT

PROSE_TOKENS = 96
NUM_TURNS = 4
GREEDY = {"temperature": 0.0, "max_new_tokens": 256}
OPENINGS = ("Tell me a story", "Who are you", "What can you do", "Say something about my home", "Let us talk")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        prompt: Its text, with the special tokens of the chat.
        params: Its sampling parameters.
        answer: What it should be answered; None where anything is right.
    """

    prompt: str
    params: dict[str, Any]
    answer: str | None = None


Wave = Sequence[Asked]
"""Requests that run at once."""


class Draw:
    """Draws texts.

    Args:
        seed: The same one gives the same texts.
        is_embedded: Whether they are for the embedded model, which knows one task that copies.
    """

    def __init__(self, seed: str, *, is_embedded: bool):
        self.random = random.Random(seed)
        self._is_embedded = is_embedded

    def turns(self, task: str, count: int) -> list[Any]:
        """So many turns of a task of `copy_tasks`, or of the extraction of the embedded model."""
        sys.path.insert(0, str(ROOT / "examples" / "tiny_model"))
        try:
            from copy_tasks import TASKS  # pyright: ignore[reportMissingImports]
            from tasks import json_extraction  # pyright: ignore[reportMissingImports]
            from words import Values  # pyright: ignore[reportMissingImports]
        finally:
            sys.path.pop(0)
        assert task == "extraction" or not self._is_embedded, "the embedded model knows one task that copies"
        make = json_extraction if self._is_embedded else TASKS[task]
        values = Values(self.random, unseen=True)
        return [make(self.random, values) for _ in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A kind of requests.

    Attributes:
        waves: The waves of a round, of which one begins when the one before has ended. It takes the number of the
            requests of a wave, and the least number of requests.
        target: The most steps per token that there should be with one request at a time; None where there is none.
        gain: How much faster it should be then.
        is_asked_before: Whether each request was answered before, which is not timed.
    """

    waves: Callable[[Draw, int, int], list[Wave]]
    target: float | None
    gain: float
    is_asked_before: bool = False


def chat(*texts: str) -> str:
    """The prompt of a conversation in which user and assistant take turns."""
    roles = ("<|user|>", "<|assistant|>")
    return "".join(f"{roles[number % 2]}{text}<|end|>" for number, text in enumerate(texts)) + roles[1]


def cut(asked: Iterable[Asked], size: int) -> list[Wave]:
    """Waves of this size."""
    all_of_them = list(asked)
    return [all_of_them[start : start + size] for start in range(0, len(all_of_them), size)]


def of_task(task: str, *, has_schema: bool = False) -> Callable[[Draw, int, int], list[Wave]]:
    """Requests of a task, with a schema for their answers or without."""

    def waves(draw: Draw, size: int, least: int) -> list[Wave]:
        made = []
        for turn in draw.turns(task, max(size, least)):
            schema = {"json_schema": schema_of(json.loads(turn.answer))} if has_schema else {}
            made.append(Asked(chat(turn.prompt), GREEDY | schema, turn.answer))
        return cut(made, size)

    return waves


def schema_of(answer: dict[str, Any]) -> str:
    """The schema of objects with these fields, which are texts or numbers."""
    kinds = {str: "string", int: "integer"}
    fields = {name: {"type": kinds[type(value)]} for name, value in answer.items()}
    return json.dumps({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})


def tool_loops(draw: Draw, size: int, least: int) -> list[Wave]:
    """Agents that call tools again and again: each turn has all turns before it."""
    waves: list[list[Asked]] = [[] for _ in range(NUM_TURNS)]
    for _ in range(max(1, least // NUM_TURNS) if size == 1 else size):
        said: list[str] = []
        for wave, turn in zip(waves, draw.turns("tool_call", NUM_TURNS), strict=True):
            said.append(turn.prompt)
            wave.append(Asked(chat(*said), GREEDY, turn.answer))
            said.append(turn.answer)
    return [*waves] if size > 1 else [[asked] for chain in zip(*waves, strict=True) for asked in chain]


def edits(draw: Draw, size: int, least: int) -> list[Wave]:
    """Programs that have a text written up to a word, put another one there, and have the rest written.

    The program also writes the word after it, by which a model that only copies finds its place again.
    """
    stages: list[list[Asked]] = [[], []]
    for turn in draw.turns("edit", max(size, least)):
        old, new = turn.phrasing, turn.item
        before = re.split(rf"\b{old}\b", turn.prompt)[0]
        after = turn.answer[len(before) + len(new) :]
        given, space, rest = after[1:].partition(" ")
        stages[0].append(Asked(chat(turn.prompt), GREEDY | {"stop": [old]}, before))
        stages[1].append(Asked(chat(turn.prompt) + before + new + after[:1] + given, GREEDY, space + rest))
    return [
        wave for first in range(0, len(stages[0]), size) for stage in stages if (wave := stage[first : first + size])
    ]


def samples(draw: Draw, size: int, least: int) -> list[Wave]:
    """Many answers to one prompt, at the model's own probabilities."""
    (turn,) = draw.turns("extraction", 1)
    params = GREEDY | {"temperature": 1.0}
    count = max(size, least)
    return cut((Asked(chat(turn.prompt), params | {"sampling_seed": number}) for number in range(count)), size)


def prose(draw: Draw, size: int, least: int) -> list[Wave]:
    """Free text at the model's own probabilities, in which nothing can be copied for long."""
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": PROSE_TOKENS}
    made = (
        Asked(chat(draw.random.choice(OPENINGS)), params | {"sampling_seed": draw.random.randrange(2**31)})
        for _ in range(max(size, least))
    )
    return cut(made, size)


WORKLOADS = {
    "extraction": Workload(of_task("extraction"), 0.5, 1.0),
    "json": Workload(of_task("extraction", has_schema=True), 0.5, 1.8),
    "tools": Workload(tool_loops, 0.5, 1.8),
    "edits": Workload(edits, 0.5, 1.8),
    "repeats": Workload(of_task("extraction"), 0.15, 3.0, is_asked_before=True),
    "samples": Workload(samples, None, 1.0),
    "prose": Workload(prose, None, 0.99),
}
