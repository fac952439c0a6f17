"""What a run of a program gives for its gens, whether the program is interpreted or compiled."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jsg.lang.ir import SamplingArgs
from jsg.lang.primitives import sampling_args
from jsg.parameters import named


class RunArgs(TypedDict, total=False):
    """What a run gives for every `gen` of the program that does not say otherwise, as `gen` takes them.

    Where a run gives nothing: at most 128 new tokens, temperature 1, and nothing else. A name that is also a parameter
    of the program is an argument of the program and of nothing else: a run of that program cannot give it to the gens.
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
    """What a batch of runs is given for all of them."""

    where: Where


_RUN_ARGS = {name: parameter.name_in("gen") or name for name, parameter in named("run").items()}
"""The names of `RunArgs` and what a gen calls the same."""


def take_run_args(kwargs: Mapping[str, Any], own: frozenset[str] = frozenset()) -> tuple[SamplingArgs, dict[str, Any]]:
    """What is for the gens, and the rest.

    Args:
        kwargs: Both.
        own: Names of the program's parameters, which are never for the gens.
    """
    names = _RUN_ARGS.keys() - own
    given = {_RUN_ARGS[name]: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return (sampling_args(**given).asked() if given else SamplingArgs()), rest
