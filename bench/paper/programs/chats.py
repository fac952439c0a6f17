"""Conversations of several turns, with short and with long answers, and answers from retrieved passages."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Workload

NUM_TURNS = 4


@sgl.function
def chat(s, turns):
    for number, (said, num_tokens) in enumerate(turns):
        s += said
        s += sgl.gen(f"answer_{number}", max_tokens=num_tokens, temperature=0, ignore_eos=True)


@sgl.function
def rag(s, demos, passages, question, num_tokens):
    """What DSPy sends for a chain of thought over retrieved passages, with demonstrations of its compiler."""
    s += demos + passages + question
    s += sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True)


def chats(least: int, most: int, texts: Texts, count: int) -> list[dict[str, Any]]:
    """Four turns of 256 to 512 tokens."""
    return [
        {
            "turns": [
                (f"\nUSER: {index}. {texts.text(texts.between(256, 512))}\nASSISTANT:", texts.between(least, most))
                for _ in range(NUM_TURNS)
            ]
        }
        for index in range(count)
    ]


def short_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Answers of 4 to 8 tokens."""
    return chats(4, 8, texts, count)


def long_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Answers of 256 to 512 tokens."""
    return chats(256, 512, texts, count)


def rag_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Four demonstrations for all, and three passages for each question."""
    demos = "\n---\n".join(texts.text(260) for _ in range(4)) + "\n---\n"
    return [
        {
            "demos": demos,
            "passages": "\n".join(f"[{n}] {texts.text(texts.length(100, 50, 160))}" for n in range(1, 4)),
            "question": f"\nQuestion {index}: {texts.text(texts.length(20, 8, 40))}\nReasoning:",
            "num_tokens": texts.length(60, 25, 120),
        }
        for index in range(count)
    ]


WORKLOADS = (
    Workload(name="rag", title="DSPy RAG", program=rag, arguments=rag_runs, count=150),
    Workload(name="chat-short", title="chat, short answers", program=chat, arguments=short_runs, count=20),
    Workload(name="chat-long", title="chat, long answers", program=chat, arguments=long_runs, count=20),
)
