"""Measures how calibrated decisions of the embedded model are: `python -m bench.decisions [--output FILE]`.

Each held-out case of the model's tasks becomes a question with up to four choices: the right answer, and the answers of
other cases of the task. It is put in two ways: as `decide` and `/v1/decisions` put it, with the choices in the prompt,
and as `select` puts it, with the choices as the model's own answers. Nothing is sampled, so the figures do not depend
on chance or on the load of the machine. Their last digits depend on the kind of processor.

The Brier score is the sum over the choices of the squared difference between probability and truth, from 0 to 2, and
the expected calibration error is over ten bins of the probability of the likeliest choice. The temperature is the one
with the least logarithmic loss on every second case, and is judged on the others.
"""

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsg as sgl
from bench.report import ROOT, Report
from jsg.lang.words.backend import Selection
from jsg.lang.words.decisions import Decision

NUM_CHOICES = 4
NUM_BINS = 10
TEMPERATURES = [2 ** (step / 8) for step in range(-24, 65)]
INSTRUCTIONS = "Which answer is right?"


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """The answer to a question.

    Attributes:
        probabilities: The probability of each choice.
        right: The number of the right choice.
        mass: The label mass.
    """

    probabilities: tuple[float, ...]
    right: int
    mass: float

    def at(self, temperature: float) -> "Judged":
        """The same, calibrated."""
        decision = Decision.of("choice", Selection("", self.probabilities, {}), temperature)
        return dataclasses.replace(self, probabilities=decision.probabilities)


def brier(judged: Sequence[Judged]) -> float:
    """The mean Brier score."""
    return math.fsum(
        (p - (index == each.right)) ** 2 for each in judged for index, p in enumerate(each.probabilities)
    ) / len(judged)


def calibration_error(judged: Sequence[Judged]) -> float:
    """The expected calibration error."""
    bins: list[list[float]] = [[] for _ in range(NUM_BINS)]
    for each in judged:
        best = max(each.probabilities)
        bins[min(int(best * NUM_BINS), NUM_BINS - 1)].append(best - (each.probabilities.index(best) == each.right))
    return math.fsum(abs(math.fsum(errors)) for errors in bins) / len(judged)


def accuracy(judged: Sequence[Judged]) -> float:
    """The share of questions whose likeliest choice is right."""
    return sum(each.probabilities.index(max(each.probabilities)) == each.right for each in judged) / len(judged)


def fitted(judged: Sequence[Judged]) -> float:
    """The temperature with the least logarithmic loss."""
    return min(
        TEMPERATURES, key=lambda t: sum(-math.log(max(each.at(t).probabilities[each.right], 1e-30)) for each in judged)
    )


@sgl.function
def decided(s: Any, prompt: Any, choices: list[str]) -> None:
    """Asks as `/v1/decisions` does: the question ends the user's last turn."""
    if isinstance(prompt, str):
        s += prompt
    else:
        for message in prompt[:-1]:
            s += getattr(sgl, message["role"])(message["content"])
        s += sgl.user_begin() + prompt[-1]["content"]
    s += sgl.decide("answer", INSTRUCTIONS, choices)


@sgl.function
def selected(s: Any, prompt: Any, choices: list[str]) -> None:
    """Lets the model answer with one of the choices."""
    if isinstance(prompt, str):
        s += prompt + sgl.select("answer", [f" {choice}" for choice in choices])
    else:
        for message in prompt:
            s += getattr(sgl, message["role"])(message["content"])
        s += sgl.assistant(sgl.select("answer", choices))


@sgl.function
def asked_whether(s: Any, prompt: Any, choices: list[str]) -> None:
    """Asks a closed question as a predicate. Of a task whose answers are yes and no."""
    s += sgl.user_begin()
    s += sgl.decide("answer", prompt[-1]["content"])


def questions(task: str, count: int) -> list[tuple[Any, list[str], int]]:
    """The prompt of each held-out case, its choices, and the number of the right one."""
    sys.path.insert(0, str(ROOT / "examples" / "tiny_model"))
    from tasks import held_out_cases  # pyright: ignore[reportMissingImports]

    cases = held_out_cases(task, count)
    rng = random.Random(task)
    made = []
    for case in cases:
        others = sorted({other.answer.strip() for other in cases} - {case.answer.strip()})
        choices = [case.answer.strip(), *rng.sample(others, min(NUM_CHOICES - 1, len(others)))]
        rng.shuffle(choices)
        made.append((case.prompt, choices, choices.index(case.answer.strip())))
    return made


def judge(engine: Any, program: Any, asked: Sequence[tuple[Any, list[str], int]]) -> list[Judged]:
    """Asks all questions."""
    states = program.run_batch([{"prompt": prompt, "choices": choices} for prompt, choices, _ in asked], backend=engine)
    metas = [state.get_meta_info("answer") for state in states]
    return [
        Judged(tuple(meta["probabilities"]), right, meta["label_mass"])
        for meta, (_, _, right) in zip(metas, asked, strict=True)
    ]


def add(report: Report, name: str, judged: Sequence[Judged], **facts: float) -> None:
    """Adds a row."""
    more = {
        "calibration_error": round(calibration_error(judged), 4),
        "accuracy": round(accuracy(judged), 4),
        "label_mass": round(math.fsum(each.mass for each in judged) / len(judged), 4),
        "num_questions": len(judged),
    }
    report.add(name, "Brier", [brier(judged)], **more, **facts)


def main(arguments: list[str]) -> None:
    from jsg.engine.offline.engine import Engine

    sys.path.insert(0, str(ROOT / "examples" / "tiny_model"))
    from tasks import EVALUATED  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--per-task", type=int, default=200, help="number of held-out cases of each task")
    parser.add_argument("--tasks", nargs="*", default=EVALUATED)
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    with Engine(max_running_requests=32, deterministic=True) as engine:
        yes_no = [
            (prompt, [], int(choices[right] == "No."))
            for prompt, choices, right in questions("yes_no", options.per_task)
        ]
        report = Report("bench.decisions", arguments, options.output, model="tiny", device="cpu")
        for name, program in (("select", selected), ("decide", decided)):
            all_judged: list[Judged] = []
            for task in options.tasks:
                asked = questions(task, options.per_task)
                if len(asked[0][1]) < 2:  # a task with one answer asks nothing
                    continue
                judged = judge(engine, program, asked)
                add(report, f"{name}: {task}", judged)
                all_judged += judged
            add(report, f"{name}: all", all_judged)
            temperature, rest = fitted(all_judged[::2]), all_judged[1::2]
            add(report, f"{name}: every second", rest)
            add(
                report,
                f"{name}: every second, calibrated",
                [each.at(temperature) for each in rest],
                temperature=temperature,
            )
        add(report, "predicate: yes_no", judge(engine, asked_whether, yes_no))
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
