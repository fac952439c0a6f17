"""Curves of the language and of an answer on its way to the client: long answers, many gens, forks, variables."""

from collections.abc import Callable
from typing import Any

import jsg as sgl
from bench.growth.curve import Calls, Curve
from bench.lang.null_backend import NullBackend
from jsg.constrained.stop_patterns import stop_patterns
from jsg.processing.tokenizer import load_tokenizer
from jsg.prompt_ids import PromptIds
from jsg.sources import resolve_model
from jsg.speech.answers.answer import Answer
from jsg.speech.answers.tool_calls import ToolCallParser
from jsg.speech.dialects import DIALECTS
from jsg.types import Request, RequestOutput, SamplingParams

TOKENS = (4000, 16_000, 64_000, 256_000)


def _answer(**sampling: Any) -> Callable[[int], Calls]:
    """The front takes an answer token by token, and shows what is new."""

    def calls(size: int) -> Calls:
        tokenizer = load_tokenizer(resolve_model("tiny"))
        words = tokenizer.encode("some words that an answer repeats, ")
        sampled = SamplingParams(max_new_tokens=size, **sampling)
        request = Request(rid="r", input_ids=PromptIds.of((1,)), sampling=sampled)
        answer = Answer(request, tokenizer, patterns=stop_patterns(sampled))
        for number in range(size):
            output = RequestOutput(rid="r", token_ids=(words[number % len(words)],))
            yield lambda output=output: answer.push(output)
        yield answer.result

    return calls


def _call(size: int) -> Calls:
    """The front reads a call of a tool whose argument has so many characters, which come eight at a time."""
    parser = ToolCallParser(DIALECTS["hermes"], {"write"}, str)
    head = '<tool_call>{"name": "write", "arguments": {"text": "'
    text = head + "a" * size + '"}}</tool_call>'
    for start in range(0, len(text), 8):
        yield lambda start=start: parser.push(text[start : start + 8])
    assert parser.num_calls == 1


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


def _joined_forks(s: Any, n: int) -> None:
    groups: list[Any] = []
    for _ in range(n):
        groups.append((groups[-1][0] if groups else s).fork(1))
    groups[-1][0].extend(sgl.gen("last", max_tokens=1))
    for group in reversed(groups):
        group.join()
    s.sync()


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
    Curve("an answer of n tokens, held for a stop pattern", TOKENS[:-1], _answer(stop_regex=("s.*never said",))),
    Curve("a call of a tool with n characters", TOKENS, _call),
    Curve("a program of n gens", (500, 2000, 8000, 32_000), _program(_gens), max_stall_ms=None),
    Curve("n forks inside of each other", (100, 400, 1600, 6400), _program(_nested_forks), max_stall_ms=None),
    Curve("n forks inside of each other, joined", (100, 400, 1600, 6400), _program(_joined_forks), max_stall_ms=None),
    Curve("fork(n) of n variables", (100, 400, 1600), _program(_forks_of_variables), max_stall_ms=None),
)
