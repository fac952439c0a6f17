"""The arguments that a run gives to the gens of its program, interpreted or compiled."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jsg.lang.program.primitives import checked, sampling_args
from jsg.lang.words.ir import GEN, SamplingArgs
from jsg.parameters import named


class RunArgs(TypedDict, total=False):
    """The arguments of a run for each `gen` of the program that does not give them itself.

    Without them a gen has at most 128 new tokens and temperature 1. A name that is also a parameter of the program is
    always an argument of the program, so a run of that program cannot give it to the gens.
    """

    max_new_tokens: int
    min_new_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_regex: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    seed: int
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


Where = Literal["auto", "here", "server"]
"""Where a compiled program runs: in this process, or on the server that is sent its graph."""


class BatchArgs(RunArgs, total=False):
    """What a batch of runs is given for all of them. Only a compiled program takes `where`."""

    where: Where


_RUN_ARGS = {name: parameter.name_in("gen") or name for name, parameter in named("run").items()}
"""The names of `RunArgs`, with the names of the same parameters of a gen."""


def take_run_args(kwargs: Mapping[str, Any], own: frozenset[str] = frozenset()) -> tuple[SamplingArgs, dict[str, Any]]:
    """Splits arguments into those for the gens and the rest.

    Args:
        kwargs: All arguments.
        own: The names of the program's parameters, which are never for the gens.
    """
    names = _RUN_ARGS.keys() - own
    asked = {name: value for name, value in kwargs.items() if name in names and value is not None}
    given = {_RUN_ARGS[name]: checked(name, GEN[_RUN_ARGS[name]].kind, value) for name, value in asked.items()}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return (sampling_args(**given).asked() if given else SamplingArgs()), rest
