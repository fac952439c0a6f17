"""Branches that are merged: a judge by dimensions, several chains of thought, and a skeleton that is written out."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Workload

DIMENSIONS = ("clarity", "originality", "evidence", "structure", "tone", "length")
WAYS = ("First,", "Step by step,", "Backwards,", "By numbers,", "In other words,")
NUM_TIPS = 5


@sgl.function
def merge(s, prompt, ways, temperature, asked, num_tokens):
    """Branches, whose answers follow each other behind the prompt, and an answer that comes of them."""
    s += prompt
    forks = s.fork(len(ways))
    for fork, (way, length) in zip(forks, ways, strict=True):
        fork += way + sgl.gen("part", max_tokens=length, temperature=temperature, ignore_eos=True)
    forks.join()
    for fork, (way, _) in zip(forks, ways, strict=True):
        s += way + fork["part"]
    s += asked + sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True)


@sgl.function
def expand(s, examples, tip, asked, num_tokens):
    s += examples + tip + asked
    s += sgl.gen("paragraph", max_tokens=num_tokens, temperature=0, ignore_eos=True)


@sgl.function
def tips(s, topic, examples, points, asked):
    """Five tips, each written out by a program of its own while the next one is thought of."""
    s += topic
    paragraphs = []
    for number, (point, short, long) in enumerate(points):
        s += point + sgl.gen(f"tip_{number}", max_tokens=short, temperature=0, ignore_eos=True)
        paragraphs.append(expand(examples, s[f"tip_{number}"], asked, long))
    for paragraph in paragraphs:
        s += "\n" + paragraph["paragraph"]


def judge_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Articles of several hundred tokens."""
    return [
        {
            "prompt": f"You judge articles.\nArticle {index}: {texts.text(texts.length(700, 400, 1200))}",
            "ways": [(f"\nJudge its {dimension}:", texts.length(90, 30, 256)) for dimension in DIMENSIONS],
            "temperature": 0,
            "asked": "\nAll in all, from 1 to 10:",
            "num_tokens": 2,
        }
        for index in range(count)
    ]


def chain_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Questions without examples, five chains for each."""
    return [
        {
            "prompt": f"Question {index}: {texts.text(texts.length(60, 25, 150))}",
            "ways": [(f"\nAnswer: {way}", texts.length(110, 40, 256)) for way in WAYS],
            "temperature": 0.3,
            "asked": "\nSo the answer is",
            "num_tokens": 16,
        }
        for index in range(count)
    ]


def tip_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Three examples of written-out tips for all."""
    intro = texts.text(60)
    examples = "\n\n".join(texts.text(90) for _ in range(3)) + "\n\nTip:"
    return [
        {
            "topic": f"{intro}\nTips for topic {index}, {texts.text(6)}:",
            "examples": examples,
            "points": [
                (f"\n{number}.", texts.between(8, 24), texts.length(80, 30, 128)) for number in range(1, NUM_TIPS + 1)
            ],
            "asked": "\nParagraph:",
        }
        for index in range(count)
    ]


WORKLOADS = (
    Workload(name="tips", title="skeleton of thought", program=tips, arguments=tip_runs, count=100, branches=True),
    Workload(name="judge", title="LLM judge", program=merge, arguments=judge_runs, count=20, branches=True),
    Workload(name="chains", title="several chains", program=merge, arguments=chain_runs, count=50, branches=True),
)
