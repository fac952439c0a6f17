"""Agents: a recorded trace whose prompt grows, and the functions of an agent that lives in a small town."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Workload


@sgl.function
def react(s, examples, question, steps):
    """What the model writes is dropped; the recorded thought, action and observation take its place."""
    s += examples + question
    thoughts = []
    for asked, num_tokens, recorded in steps:
        s += asked
        branches = s.fork(1)
        branches[0] += sgl.gen("thought", max_tokens=num_tokens, temperature=0, ignore_eos=True)
        thoughts.append(branches[0])
        branches.join()
        s += recorded
    return [branch["thought"] for branch in thoughts]


@sgl.function
def town(s, calls):
    """Five functions one after another. Each waits for the one before, and has a short prompt of its own."""
    answers = []
    for prompt, num_tokens in calls:
        step = s.fork(1)[0]
        step += prompt + sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True)
        answers.append(step["answer"])
    return answers


def react_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Six examples for all; three to seven steps."""
    examples = "\n".join(texts.text(texts.length(230, 120, 360)) for _ in range(6)) + "\n"

    def recorded(number: int) -> str:
        thought, action, seen = (texts.text(texts.length(mean, 4, 3 * mean)) for mean in (25, 8, 70))
        return f" {thought}\nAction {number}: {action}\nObservation {number}: {seen}\n"

    return [
        {
            "examples": examples,
            "question": f"Question {index}: {texts.text(texts.length(22, 10, 50))}\n",
            "steps": [
                (f"Thought {number}:", texts.length(45, 20, 120), recorded(number))
                for number in range(1, texts.between(3, 7) + 1)
            ],
        }
        for index in range(count)
    ]


TOWN = {"poignancy": (180, 2), "triple": (150, 20), "emoji": (60, 6), "sector": (260, 10), "object": (120, 5)}
"""For each function the tokens of its template, and of its answer."""


def town_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Each function has a template of its own; what a call says about the event comes behind it."""
    templates = {name: f"{name}: {texts.text(num_tokens)}\n" for name, (num_tokens, _) in TOWN.items()}
    return [
        {
            "calls": [
                (templates[name] + f"Event {index}: {texts.text(texts.length(35, 12, 80))}\nAnswer:", num_answer)
                for name, (_, num_answer) in TOWN.items()
            ]
        }
        for index in range(count)
    ]


WORKLOADS = (
    Workload(name="react", title="ReAct, traces", program=react, arguments=react_runs, count=100),
    Workload(name="agents", title="generative agents", program=town, arguments=town_runs, count=10),
)
