"""Trees of thought: each thought is continued in several ways, without a look at how good it is."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Workload

ASKED = ("Write a plan.", "Carry the plan out.", "Is the answer right? Give it a score.", "Write the answer, no more.")
DEEP = tuple(f"\nUSER: {asked}\nASSISTANT:" for asked in ASKED)
WIDE = DEEP[:3]


def grow(s, turn, num_branches, num_tokens, temperature):
    """The branches of a state that continue it by one thought each."""
    s += turn
    forks = s.fork(num_branches)
    forks += sgl.gen("thought", max_tokens=num_tokens, temperature=temperature, ignore_eos=True)
    return forks


@sgl.function
def tree(s, question, turns, num_branches, num_tokens, temperature):
    """Never joined: what the leaves say is returned."""
    s += question
    level = [s]
    for turn, length in zip(turns, num_tokens, strict=True):
        level = [branch for state in level for branch in grow(state, turn, num_branches, length, temperature)]
    return [leaf["thought"] for leaf in level]


def runs(turns: tuple[str, ...], num_branches: int, temperature: float, texts: Texts, count: int):
    """Questions behind three examples that all share."""
    examples = "\n\n".join(texts.text(texts.length(150, 90, 220)) for _ in range(3)) + "\n\n"
    return [
        {
            "question": f"{examples}Question {index}: {texts.text(texts.length(60, 25, 150))}",
            "turns": turns,
            "num_branches": num_branches,
            "num_tokens": [texts.length(90, 40, 200) for _ in turns],
            "temperature": temperature,
        }
        for index in range(count)
    ]


def deep_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Two branches four times: 2 + 4 + 8 + 16 calls."""
    return runs(DEEP, 2, 0.001, texts, count)


def wide_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Three branches three times: 3 + 9 + 27 calls."""
    return runs(WIDE, 3, 0.3, texts, count)


WORKLOADS = (
    Workload(
        name="tree-deep", title="tree of thought, deep", program=tree, arguments=deep_runs, count=200, branches=True
    ),
    Workload(
        name="tree-wide", title="tree of thought, wide", program=tree, arguments=wide_runs, count=200, branches=True
    ),
)
