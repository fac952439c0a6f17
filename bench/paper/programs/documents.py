"""Documents that are computed apart and put side by side behind one prompt: `concate_and_append`."""

from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Need, Workload

NUM_BODIES, OFFSET = 4, 1000
NUM_DOCUMENTS = 10


@sgl.function
def beside(s, prefix, bodies, offsets, question):
    s += prefix
    forks = s.fork(len(bodies), offsets)
    forks += lambda index: bodies[index]
    forks.join("concate_and_append")
    s += question + sgl.gen("answer", max_tokens=16, temperature=0, ignore_eos=True)


def line_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """One document in four parts, to which all questions are asked."""
    prefix = f"A document of lines. {texts.text(40)}\n"
    bodies = [f"Part {part}:\n{texts.text(texts.between(700, 900))}\n" for part in range(NUM_BODIES)]
    offsets = [OFFSET * part for part in range(NUM_BODIES)]
    shared = {"prefix": prefix, "bodies": bodies, "offsets": offsets}
    return [shared | {"question": f"\nWhat is in line {n}? {texts.text(8)}\nAnswer:"} for n in range(count)]


def document_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Ten documents for each ten questions."""
    prefix = f"Remember these documents. {texts.text(20)}\n"
    sets = [
        [f"Document {number}: {texts.text(texts.length(220, 120, 360))}\n" for number in range(NUM_DOCUMENTS)]
        for _ in range((count + 9) // 10)
    ]
    shared = {"prefix": prefix, "offsets": None}
    return [
        shared | {"bodies": sets[n // 10], "question": f"\nQuestion {n}: {texts.text(15)}\nAnswer:"}
        for n in range(count)
    ]


JOINS = frozenset[Need]({"joins"})
WORKLOADS = (
    Workload(
        name="lines",
        title="line retrieval",
        program=beside,
        arguments=line_runs,
        count=10,
        needs=JOINS,
        branches=True,
    ),
    Workload(
        name="documents",
        title="questions to ten documents",
        program=beside,
        arguments=document_runs,
        count=100,
        needs=JOINS,
        branches=True,
    ),
)
