"""A scripted model that knows what the examples ask: what runs on it in a moment, runs on the embedded model too."""

import json
import re
from typing import Any

from jsg.lang.words.ir import Gen, Select

OPPOSITES = {
    "up": "down", "fast": "slow", "happy": "sad", "early": "late", "strong": "weak", "wide": "narrow",
}  # fmt: skip
CAPITALS = {
    "Egypt": "Cairo", "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima",
}  # fmt: skip
FACTS = {
    "name": r"(?:My name is|I am|They call me) ([A-Z]\w+)",
    "city": r"(?:I live in|My home is) (\w+)",
    "age": r"(?:I am|My age is) (\d+)",
    "color": r"color is (\w+)",
    "thing": r"I bought a (\w+)",
}
SHOWN = {"color": "blue", "shape": "star", "place": "top right"}
"""What the picture of `picture_judge` shows."""


def told(text: str, fact: str) -> str:
    """The last thing that a person has said about themselves."""
    return re.findall(FACTS[fact], text)[-1]


def record(text: str, names: str) -> str:
    """A JSON object of facts."""
    facts = {name: told(text, name) for name in re.findall(r"\w+", names.replace(" and ", " "))}
    return json.dumps({name: int(fact) if name == "age" else fact for name, fact in facts.items()})


def total(first: str, second: str) -> str:
    return f"{first} + {second} = {int(first) + int(second)}"


def compared(essay: str, dimension: str) -> str:
    """What `picture_judge` asks of each essay."""
    color, shape, place = re.findall(r"I see an? (\w+) (\w+) (?:in the|on the) ([a-z ]+)\.", essay)[0]
    said = {"color": color, "shape": shape, "place": place}[dimension]
    article = "a " if dimension == "shape" else ""
    return f"Essay: {article}{said}. Picture: {article}{SHOWN[dimension]}."


ANSWERS: dict[str, Any] = {
    r"capital of (\w+)\?": lambda prompt, country: f"The capital of {country} is {CAPITALS[country]}.",
    r"(?:does|home of) ([A-Z]\w+)(?: live)?\?": lambda prompt, name: re.findall(rf"{name} lives in \w+\.", prompt)[-1],
    r"(\d+) \+ (\d+)\?": lambda prompt, *numbers: total(*numbers),
    r"Add (\d+) and (\d+)\.": lambda prompt, *numbers: total(*numbers),
    r"Count from (\d+) to (\d+)\.": lambda prompt, *ends: ", ".join(map(str, range(int(ends[0]), int(ends[1]) + 1))),
    r"The code of (\w+) is (\d+)\.": lambda prompt, *fact: "The code of {} is {}.".format(*fact),
    r"phone number": lambda prompt: "I do not know.",
    r"Repeat: (.+)": lambda prompt, words: words,
    r"^Essay: (.+) Compare the (\w+)\.": lambda prompt, *asked: compared(*asked),
    r"Write color, shape": lambda prompt: json.dumps(SHOWN),
    r"(.+) Extract (.+) as JSON": lambda prompt, *asked: record(*asked),
    r"Where do I live\?": lambda prompt: f"You live in {told(prompt, 'city')}.",
    r"What is my name\?": lambda prompt: f"Your name is {told(prompt, 'name')}.",
    r"Which color do I like\?": lambda prompt: f"You like {told(prompt, 'color')}.",
    r"What did I buy\?": lambda prompt: f"You bought a {told(prompt, 'thing')}.",
    r"^My name is (\w+)\.": lambda prompt, name: f"Hello, {name}! How can I help you?",
    r"[Tt]hank": lambda prompt: "You are welcome!",
    r"": lambda prompt: "OK.",
}
"""What a question looks like, and its answer: of the prompt and of what the pattern finds in the question."""


def answer(prompt: str, gen: Gen | None = None) -> str:
    """The continuation of a prompt, in which the answer may have begun."""
    if "[user]" not in prompt:
        return f" {OPPOSITES[prompt.split()[-2]]}"
    question = prompt.rpartition("[user]")[2].partition("[/user]")[0].strip()
    begun = prompt.rpartition("[assistant]")[2]
    pattern, found = next((made, match) for shown, made in ANSWERS.items() if (match := re.search(shown, question)))
    return pattern(prompt, *found.groups()).removeprefix(begun)


def choose(prompt: str, select: Select) -> str:
    """The choice that is what the model would say, or a name or a place that was told, or as many as are shown."""
    begun = prompt.rpartition("[assistant]")[2]
    if begun == "You live in ":
        return told(prompt, "city")
    if begun == "The phone number of ":
        return re.findall(r"phone number of (\w+)\?", prompt)[-1]
    if "How many" in prompt:
        return "One."
    return next(choice for choice in select.choices if choice == answer(prompt))
