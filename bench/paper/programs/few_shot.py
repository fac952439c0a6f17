"""One call behind examples that many programs share."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Workload

SUBJECTS = 57


@sgl.function
def mmlu(s, examples, question):
    s += examples + question
    s += sgl.gen("answer", max_tokens=1, temperature=0, ignore_eos=True)


@sgl.function
def hellaswag(s, examples, question, choices):
    s += examples + question
    s += sgl.select("answer", choices=choices)


@sgl.function
def gsm8k(s, examples, question, num_tokens):
    s += examples + question
    s += sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True)


def mmlu_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Five examples for each of 57 subjects, at most 1536 tokens. Subjects follow each other, as in the data set."""
    subjects = [
        f"The following are questions about subject {number}.\n" + texts.text(texts.length(700, 300, 1536))
        for number in range(SUBJECTS)
    ]
    return [
        {
            "examples": subjects[index * SUBJECTS // count if count >= SUBJECTS else index],
            "question": f"\nQuestion {index}: {texts.text(texts.length(80, 20, 300))}\nAnswer:",
        }
        for index in range(count)
    ]


def hellaswag_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Twenty examples for all; four endings to each text."""
    examples = "\n".join(texts.text(texts.length(85, 40, 140)) for _ in range(20)) + "\n"
    return [
        {
            "examples": examples,
            "question": f"Text {index}: {texts.text(texts.length(45, 15, 100))}",
            "choices": [f" {texts.text(texts.length(22, 8, 45))}." for _ in range(4)],
        }
        for index in range(count)
    ]


def gsm8k_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Five examples for all; answers of a chain of thought."""
    examples = "\n\n".join(texts.text(texts.length(150, 90, 220)) for _ in range(5)) + "\n\n"
    return [
        {
            "examples": examples,
            "question": f"Question {index}: {texts.text(texts.length(60, 25, 150))}\nAnswer:",
            "num_tokens": texts.length(110, 40, 400),
        }
        for index in range(count)
    ]


WORKLOADS = (
    Workload(name="mmlu", title="MMLU, 5 shots", program=mmlu, arguments=mmlu_runs, count=14_042),
    Workload(
        name="hellaswag",
        title="HellaSwag, 20 shots",
        program=hellaswag,
        arguments=hellaswag_runs,
        count=200,
        needs=frozenset({"choices"}),
    ),
    Workload(name="gsm8k", title="GSM8K, 5 shots", program=gsm8k, arguments=gsm8k_runs, count=200),
)
