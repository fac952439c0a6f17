"""The programs that the page of `jsg serve` offers: `python examples/page/programs.py` compiles them into the package.

The page sends them whole to `POST /v1/programs`, so their parts do not depend on what Python reads on the way. The
questions are those that the embedded model can answer; others may be typed in their place.
"""

import json
from pathlib import Path
from typing import Any

import jsg as sgl

FILE = Path(__file__).parents[2] / "jsg/server/page/static/programs.json"
QUESTIONS = ("Which color do I like?", "What did I buy?", "What is my name?")
SUMMARY = r'\{"name": "[A-Za-z]+", "city": "[A-Za-z]+", "color": "[a-z]+"\}'


@sgl.function
def judge(s, essay):
    """An essay is read once. Branches judge it at the same time, and a summary keeps to a form."""
    s += sgl.user(essay) + sgl.assistant("OK.")
    s += sgl.user("Which city do I live in?")
    s += sgl.assistant("You live in " + sgl.select("city", choices=["Oslo", "Rome", "Cairo", "Lima"]))
    branches = s.fork(len(QUESTIONS))
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += sgl.user(question)
        branch += sgl.assistant(sgl.gen("judgment", max_tokens=24, temperature=0))
    branches.join()
    s += sgl.user(f"{essay} Extract name, city and color as JSON.")
    s += sgl.assistant(sgl.gen("summary", max_tokens=64, temperature=0, regex=SUMMARY))


@sgl.function
def vote(s, question):
    """Five answers to one question are drawn at the same time; each finds the question in the cache."""
    s += sgl.user(question)
    branches = s.fork(5)
    branches += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0.8))
    branches.join()


@sgl.function
def expand(s, point):
    """One point of a guide."""
    s += sgl.user(f"What is the capital of {point}?")
    s += sgl.assistant(sgl.gen("paragraph", max_tokens=24, temperature=0))


@sgl.function
def guide(s, first, second, third):
    """A program that calls another one for each point, all at the same time."""
    s += sgl.user(f"Repeat: {first} {second} {third}")
    s += sgl.assistant(sgl.gen("plan", max_tokens=24, temperature=0))
    return [expand(point)["paragraph"] for point in (first, second, third)]


@sgl.function
def documents(s, first, second, question):
    """Two documents are read side by side, joined without computing them again, and asked about."""
    s += sgl.user_begin()
    s += "Remember this:"
    branches = s.fork(2)
    for branch, document in zip(branches, (first, second), strict=True):
        branch += document
    branches.join("concate_and_append")
    s += f" {question}"
    s += sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


OFFERED: dict[str, tuple[Any, dict[str, str]]] = {
    "Judge an essay": (
        judge,
        {"essay": "My name is Nina. I live in Oslo. My favorite color is red. I bought a lamp."},
    ),
    "Draw five answers": (vote, {"question": "What is 17 + 25?"}),
    "Write a guide": (guide, {"first": "France", "second": "Japan", "third": "Egypt"}),
    "Read documents side by side": (
        documents,
        {"first": " Nina lives in Oslo.", "second": " Oscar lives in Rome.", "question": "Where does Oscar live?"},
    ),
}
"""Title → the program, and the arguments that its form begins with."""


def compiled() -> list[dict[str, Any]]:
    """What the page gets."""
    return [
        {
            "title": title,
            "about": (program.__doc__ or "").strip(),
            "arguments": arguments,
            "graph": json.loads(program.compile().to_json()),
        }
        for title, (program, arguments) in OFFERED.items()
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(compiled(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
