"""Curves of the language and of an answer on its way to the client: long answers, many gens, forks, variables."""

from collections.abc import Callable
from typing import Any

import jsg as sgl
from bench.growth.curve import Calls, Curve
from bench.lang.null_backend import NullBackend
from jsg.processing.answer import Answer
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.types import Request, RequestOutput, SamplingParams

TOKENS = (4000, 16_000, 64_000, 256_000)


def _answer(**sampling: Any) -> Callable[[int], Calls]:
    """The front takes an answer token by token, and shows what is new."""

    def calls(size: int) -> Calls:
        tokenizer = load_tokenizer(resolve_model("tiny"))
        words = tokenizer.encode("some words that an answer repeats, ")
        request = Request(rid="r", input_ids=(1,), sampling=SamplingParams(max_new_tokens=size, **sampling))
        answer = Answer(request, tokenizer)
        for number in range(size):
            output = RequestOutput(rid="r", token_ids=(words[number % len(words)],))
            yield lambda output=output: answer.push(output)
        yield answer.result

    return calls


def _program(body: Callable[[Any, int], None]) -> Callable[[int], Calls]:
    """A program runs to its end on a backend that answers at once."""

    def calls(size: int) -> Calls:
        backend = NullBackend()
        program = sgl.function(body)
        yield lambda: program.run(n=size, backend=backend).text()

    return calls


def _gens(s: Any, n: int) -> None:
    for number in range(n):
        s += "Q: " + sgl.gen(f"a{number}", max_tokens=1)


def _nested_forks(s: Any, n: int) -> None:
    branch = s
    for _ in range(n):
        branch = branch.fork(1)[0]
    branch += sgl.gen("last", max_tokens=1)
    branch.sync()


def _forks_of_variables(s: Any, n: int) -> None:
    for number in range(n):
        s[f"v{number}"] = number
    forks = s.fork(n)
    for branch in forks:
        branch["own"] = 1
    forks.join()


CURVES = (
    Curve("an answer of n tokens", TOKENS, _answer()),
    Curve("an answer of n tokens, with stop strings", TOKENS, _answer(stop=("never said", "nor this"))),
    Curve("a program of n gens", (500, 2000, 8000, 32_000), _program(_gens), max_stall_ms=None),
    Curve("n forks inside of each other", (100, 400, 1600, 6400), _program(_nested_forks), max_stall_ms=None),
    Curve("fork(n) of n variables", (100, 400, 1600), _program(_forks_of_variables), max_stall_ms=None),
)
