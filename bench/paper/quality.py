"""Whether answers are as good with each arm: the same programs on the embedded models, which know a few things.

    python -m bench.paper.quality --output FILE

What a program asks about is capitals, which the embedded model completes nearly always, and coloured shapes, which the
embedded vision model sees. An answer ends where a line ends, and not at a length. A score is the share of what a
program was asked that it has right; of a form it is whether the object can be read.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.__main__ import arm_targets, chosen
from bench.paper.arms import ARMS, FULL, Arm
from bench.paper.measure import measure
from bench.paper.programs import WORKLOADS
from bench.paper.workload import Need
from bench.peers import machine
from bench.peers.engines import Setting
from bench.report import ROOT, Report
from jsg.lang.program.state import ProgramState

PICTURE_SIDE = 60
ENDS = ("\n", ".", '"')
Score = Callable[[ProgramState], float]
Case = tuple[dict[str, Any], Score]
"""The arguments of a program, and how good its state is."""


class Facts:
    """Sentences that end before a capital. None comes twice before all have come: no prompt gives its answer away."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        with example("tiny_model"):
            self.capitals: dict[str, str] = importlib.import_module("words").CAPITALS
        self._left: list[str] = []

    def asked(self, count: int) -> list[tuple[str, str]]:
        """Sentences, and what comes next."""
        if len(self._left) < count:
            self._left = self.random.sample(sorted(self.capitals), len(self.capitals))
        chosen, self._left = self._left[:count], self._left[count:]
        return [(f"The capital of {country} is", f" {self.capitals[country]}") for country in chosen]

    def known(self, count: int) -> str:
        """Whole sentences, one in each line."""
        return "".join(f"{sentence}{capital}.\n" for sentence, capital in self.asked(count))


@contextlib.contextmanager
def example(name: str):
    """Lets the modules of an example be imported."""
    folder = str(ROOT / "examples" / name)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def right(*expected: str) -> Score:
    """The share of these answers that the text of a state has, in the order of its lines."""
    return lambda state: sum(answer in state.text() for answer in expected) / len(expected)


def returned(expected: str) -> Score:
    """The share of what a program returned that begins with this."""
    return lambda state: sum(each.startswith(expected) for each in state.ret_value) / len(state.ret_value)


def each_returned(pairs: Sequence[tuple[str, str]]) -> Score:
    """The share of what a program returned that begins with its own answer."""
    return lambda state: statistics.mean(
        said.startswith(answer) for said, (_, answer) in zip(state.ret_value, pairs, strict=True)
    )


def readable(state: ProgramState) -> float:
    """Whether the text ends with an object in JSON."""
    text = state.text()
    with contextlib.suppress(json.JSONDecodeError):
        return float(isinstance(json.loads(text[text.index("{") :]), dict))
    return 0.0


def mmlu(facts: Facts) -> Case:
    ((asked, answer),) = facts.asked(1)
    return {"examples": facts.known(5), "question": asked}, lambda state: float(answer.startswith(state["answer"]))


def hellaswag(facts: Facts) -> Case:
    pairs = facts.asked(4)
    choices = [f"{answer}." for _, answer in pairs]
    return {"examples": facts.known(20), "question": pairs[2][0], "choices": choices}, lambda state: float(
        state["answer"] == choices[2]
    )


def gsm8k(facts: Facts) -> Case:
    ((asked, answer),) = facts.asked(1)
    return {"examples": facts.known(5), "question": asked, "num_tokens": 16}, right(asked + answer)


def react(facts: Facts) -> Case:
    pairs = facts.asked(4)
    steps = [(f"Thought: {asked}", 16, f"{answer}.\n") for asked, answer in pairs]
    return {"examples": facts.known(6), "question": "", "steps": steps}, each_returned(pairs)


def town(facts: Facts) -> Case:
    pairs = facts.asked(5)
    calls = [(f"{facts.known(2)}{asked}", 16) for asked, _ in pairs]
    return {"calls": calls}, each_returned(pairs)


def tree(num_branches: int, depth: int) -> Callable[[Facts], Case]:
    def case(facts: Facts) -> Case:
        pairs = facts.asked(depth)
        turns = [f"\n{asked}" for asked, _ in pairs]
        sizes = {"num_branches": num_branches, "num_tokens": [16] * depth, "temperature": 0}
        return {"question": facts.known(3), "turns": turns} | sizes, returned(pairs[-1][1])

    return case


def tips(facts: Facts) -> Case:
    pairs = facts.asked(5)
    ((asked, answer),) = facts.asked(1)
    points = [(f"\n{sentence}", 16, 16) for sentence, _ in pairs]
    arguments = {"topic": "", "examples": facts.known(3), "points": points, "asked": f"\n{asked}"}
    return arguments, right(*(sentence + capital for sentence, capital in pairs), answer)


def judge(facts: Facts) -> Case:
    pairs = facts.asked(6)
    ways = [(f"\n{asked}", 16) for asked, _ in pairs]
    grade = "\none -> 1\ntwo -> 2\nthree -> 3\nfour ->"
    arguments = {"prompt": facts.known(12), "ways": ways, "temperature": 0, "asked": grade, "num_tokens": 2}
    judged = right(*(asked + answer for asked, answer in pairs))
    return arguments, lambda state: (judged(state) + state["answer"].strip().isdigit()) / 2


def chains(facts: Facts) -> Case:
    ((asked, answer),) = facts.asked(1)
    ways = [(f"\n{way} {asked}", 16) for way in ("First,", "By numbers,", "Backwards,", "Again,", "At last,")]
    fixed = {"temperature": 0, "num_tokens": 16}
    arguments = {"prompt": facts.known(3), "ways": ways, "asked": f"\n{asked}"} | fixed
    return arguments, lambda state: float(state["answer"].startswith(answer))


def character(facts: Facts) -> Case:
    return {"intro": f"{facts.known(3)}A character as JSON:\n", "num_tokens": 600}, readable


def city(facts: Facts) -> Case:
    return {"page": f"{facts.known(10)}A city as JSON:\n"}, readable


def country(facts: Facts) -> Case:
    return {"page": "".join(facts.known(20) for _ in range(8)) + "A country as JSON:\n"}, readable


def rag(facts: Facts) -> Case:
    ((asked, answer),) = facts.asked(1)
    arguments = {"demos": facts.known(8), "passages": facts.known(3), "question": asked, "num_tokens": 16}
    return arguments, right(asked + answer)


def chat(facts: Facts) -> Case:
    pairs = facts.asked(4)
    turns = [(f"\n{asked}", 16) for asked, _ in pairs]
    return {"turns": turns}, right(*(asked + answer for asked, answer in pairs))


def beside(num_bodies: int) -> Callable[[Facts], Case]:
    def case(facts: Facts) -> Case:
        bodies = [facts.known(4) for _ in range(num_bodies)]
        ((asked, answer),) = facts.asked(1)
        body = facts.random.randrange(num_bodies)
        bodies[body] += f"{asked}{answer}.\n"
        return {"prefix": "Some facts.\n", "bodies": bodies, "offsets": None, "question": asked}, lambda state: float(
            state["answer"].startswith(answer)
        )

    return case


def picture(facts: Facts) -> Case:
    with example("tiny_model"), example("tiny_vision"):
        questions = importlib.import_module("questions")
        scenes = importlib.import_module("scenes")
    scene, question = facts.random.choice(questions.held_out_cases("color", 40))
    file = io.BytesIO()
    scenes.draw(scene, PICTURE_SIDE).save(file, "PNG")
    arguments = {"file": file.getvalue(), "question": question.prompt, "num_tokens": 8}
    return arguments, right(question.answer.removesuffix("."))


CASES: Mapping[str, Callable[[Facts], Case]] = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "gsm8k": gsm8k,
    "react": react,
    "agents": town,
    "tree-deep": tree(2, 4),
    "tree-wide": tree(3, 3),
    "tips": tips,
    "judge": judge,
    "chains": chains,
    "json": character,
    "json-parts": city,
    "json-long": country,
    "rag": rag,
    "chat-short": chat,
    "chat-long": chat,
    "lines": beside(4),
    "documents": beside(10),
}
"""How the programs of each workload are asked about what the embedded model knows."""
PICTURES: Mapping[str, Callable[[Facts], Case]] = {"pictures": picture}
"""The same for the embedded vision model. It was not trained on films."""


def add_scores(
    report: Report, model: str, cases: Mapping[str, Callable[[Facts], Case]], arms: Mapping[str, Arm], count: int
) -> None:
    """Adds the mean score of each workload with each arm."""
    setting = Setting(
        model=Path(model),
        dtype="float32",
        quantization="none",
        logs=Path(tempfile.mkdtemp(prefix="bench-quality-")),
        num_threads=max(machine.thread_counts()),
        context_length=0,
    )
    can = frozenset[Need]({"choices", "forms", "joins", "pictures"})
    with contextlib.ExitStack() as stack:
        targets = arm_targets(stack, report, setting, arms, can)
        for name, case in cases.items():
            workload = WORKLOADS[name]
            made = [case(Facts(number)) for number in range(count)]
            for target in targets:
                if not ARMS[target.name].concerns(workload):
                    continue
                asked = dataclasses.replace(target, ways=dataclasses.replace(target.ways, ends_at=ENDS))
                states = measure(workload, asked, [arguments for arguments, _ in made], []).states
                scores = [score(state) for state, (_, score) in zip(states, made, strict=True)]
                report.add(f"{name}: {target.name}", "score", [statistics.mean(scores)], workload=name, arm=target.name)


def differing(report: Report) -> list[str]:
    """The workloads and arms whose score is not that of `full`."""
    scores = {(figure.facts["workload"], figure.facts["arm"]): figure.median for figure in report.figures}
    return [f"{name}: {arm}" for (name, arm), score in scores.items() if score != scores[name, FULL]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"workloads, separated by commas, of {', '.join([*CASES, *PICTURES])}")
    parser.add_argument("--arms", help=f"arms beside {FULL}, separated by commas, of {', '.join(ARMS)}")
    parser.add_argument("--count", type=int, default=20, help="programs of each workload")
    parser.add_argument("--output", type=Path, help="JSON file with every score")
    options = parser.parse_args(arguments)
    report = Report("bench.paper.quality", arguments, options.output, count=options.count)
    names, arms = chosen(options.only, {**CASES, **PICTURES}, "--only"), chosen(options.arms, ARMS, "--arms")
    for model, cases in (("tiny", CASES), ("tiny-vision", PICTURES)):
        asked = {name: case for name, case in cases.items() if name in names}
        if asked:
            add_scores(report, model, asked, arms, options.count)
    report.close()
    if found := differing(report):
        print(f"not the score of {FULL}: {', '.join(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
