"""Turns whose answer copies from their prompt: what drafts are measured with, which are copies.

A document and fields to extract as JSON, a log of calls of tools and one to call again, or a text and a word to
replace.
"""

import json
import random
from collections.abc import Callable

from tasks import Turn
from words import Values

FIELDS = "title author city address phone status owner reason price model place team plan rule goal".split()
TOOLS = "search read write list open find send move".split()
ARGUMENTS = "path text query name target".split()


def words(values: Values, least: int, most: int) -> str:
    """Return some words of the half of the values."""
    return " ".join(values.word() for _ in range(values.rng.randint(least, most)))


def extraction(rng: random.Random, values: Values) -> Turn:
    """Extract some fields of a document, in the order asked, as a JSON object."""
    drawn = {field: words(values, 1, 7) for field in rng.sample(FIELDS, rng.randint(2, 6))}
    document = " ".join(f"The {field} is {value}." for field, value in drawn.items())
    asked = rng.sample(list(drawn), rng.randint(1, min(4, len(drawn))))
    answer = json.dumps({field: drawn[field] for field in asked})
    return Turn("extraction", "", "", f"{document}\nExtract {', '.join(asked)}.", answer)


def tool_call(rng: random.Random, values: Values) -> Turn:
    """Call one of some tools again, in half of the cases with one argument changed."""
    calls = {
        tool: {"tool": tool} | {key: words(values, 1, 5) for key in rng.sample(ARGUMENTS, rng.randint(1, 3))}
        for tool in rng.sample(TOOLS, rng.randint(2, 4))
    }
    log = "\n".join(f"{json.dumps(call)}\nResult: {words(values, 1, 6)}" for call in calls.values())
    tool = rng.choice(list(calls))
    call, change = calls[tool], ""
    if rng.random() < 0.5:
        key = rng.choice([key for key in call if key != "tool"])
        call = call | {key: words(values, 1, 2)}
        change = f" with {key} {call[key]}"
    return Turn("tool_call", "", "", f"{log}\nCall {tool} again{change}.", json.dumps(call))


def edit(rng: random.Random, values: Values) -> Turn:
    """Write a text with one word replaced. Its phrasing and item are the old and the new word."""
    sentences = [words(values, 3, 8) for _ in range(rng.randint(1, 5))]
    text = ". ".join(sentences) + "."
    old, new = rng.choice(" ".join(sentences).split()), values.word()
    changed = ". ".join(" ".join(new if each == old else each for each in line.split()) for line in sentences) + "."
    return Turn("edit", old, new, f"{text}\nReplace {old} with {new}.", changed)


TASKS: dict[str, Callable[[random.Random, Values], Turn]] = {
    "extraction": extraction,
    "tool_call": tool_call,
    "edit": edit,
}
