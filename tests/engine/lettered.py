"""The small model with a tokenizer of 96 tokens, grammars for it, and random traffic of which a part has a grammar."""

import contextlib
import dataclasses
import pathlib
import re

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jsg.constrained.compiler import compile_tables
from jsg.engine.core import EngineCore
from jsg.step_reports import ConstraintReport
from jsg.types import GrammarSpec, JumpForward, Request, RequestOutput, SamplingParams
from tests.engine import small

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-Ġ'
MERGES = (
    *(("n", "a"), ("m", "e"), ("na", "me"), ("a", "g"), ("ag", "e"), ('"', ":"), ('"', ","), ("Ġ", "{"), ("Ġ", '"')),
    *(("{", '"'), ("t", "r"), ("u", "e"), ("tr", "ue"), ("f", "a"), ("l", "s"), ("fa", "ls"), ("fals", "e")),
    *(("o", "r"), ("a", "n"), ("r", "e"), ("re", "d"), ("b", "l"), ("bl", "ue")),
)
"""Longer tokens, each made of two others. Ġ is a space in byte-level tokenizers."""

PATTERNS = (
    r'\{"name": "[a-z]{1,6}", "age": [0-9]{1,2}, "alive": (true|false)\}',
    r"(red|green|blue)(-(red|green|blue)){2,}",
    r"[a-z ]*",
    r"x(name age ){3}.",
)
GRAMMARS = tuple(GrammarSpec("regex", pattern) for pattern in PATTERNS)


def write_model(directory: pathlib.Path, **changes: object) -> pathlib.Path:
    """The small model with a byte-level tokenizer; no token has the last ids of the model."""
    small.write_model(directory, **changes)
    tokens = ["<pad>", "<eos>", *LETTERS, *map("".join, MERGES)]
    assert len(set(tokens)) == len(tokens) < small.VOCAB
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def make_core(directory: pathlib.Path, cache_dir: str, **knobs: object) -> EngineCore:
    """An engine of such a model that knows all grammars. In default mode one program samples whatever a batch needs."""
    with contextlib.nullcontext() if knobs.get("deterministic") else small.few_variants():
        return teach(small.make_core(directory, cache_dir, **knobs))  # pyright: ignore[reportArgumentType]


def teach(core: EngineCore) -> EngineCore:
    """The core, knowing all grammars."""
    for grammar in GRAMMARS:
        core.grammars.add_grammar(grammar.key, compile_tables(grammar).to_bytes())
    return core


@dataclasses.dataclass
class Outcome(small.Outcome):
    """The result of a request with a grammar."""

    kept_mass: list[float] = dataclasses.field(default_factory=list)
    num_forced: int = 0
    is_complete: bool = False

    def add(self, output: RequestOutput) -> None:
        super().add(output)
        report = output.constraint
        assert (report is not None) <= bool(output.token_ids)
        if isinstance(report, ConstraintReport):
            assert len(report.kept_mass) == len(output.token_ids) == len(report.is_forced)
            self.kept_mass += report.kept_mass
            self.num_forced += sum(report.is_forced)
            self.is_complete = report.is_complete


def with_jump(request: Request, jump: JumpForward) -> Request:
    if request.sampling.grammar is None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, jump_forward=jump))


def traffic(seed: int, count: int = 8, jump: JumpForward = "draft") -> list[tuple[int, Request]]:
    """`small.traffic`, with grammars for two requests of three."""
    rng = np.random.default_rng(seed + 77)
    arrivals = []
    for when, request in small.traffic(seed, count):
        if rng.random() < 0.67:
            changes = {"grammar": GRAMMARS[rng.integers(len(GRAMMARS))], "jump_forward": jump}
            if rng.random() < 0.7:
                changes |= {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
            sampling = dataclasses.replace(request.sampling, **changes, return_constraint=bool(rng.random() < 0.7))
            request = dataclasses.replace(request, sampling=sampling)
        arrivals.append((when, request))
    return arrivals


def greedy(pattern: int = 0, **fields: object) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 80, "temperature": 0, "grammar": GRAMMARS[pattern]} | fields))  # pyright: ignore[reportArgumentType]


def matches(request: Request, text: bytes) -> bool:
    grammar = request.sampling.grammar
    assert isinstance(grammar, GrammarSpec)
    return re.fullmatch(grammar.text, text.decode()) is not None
