"""The table of sampling parameters, against the signatures beside it and against what is derived from it."""

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pytest

from jsg.lang.program.primitives import gen, gen_int, gen_string
from jsg.lang.program.run_args import RunArgs
from jsg.lang.words.ir import SamplingArgs
from jsg.parameters import (
    PARAMETERS,
    Flag,
    Integer,
    Interface,
    Kind,
    Number,
    OneOf,
    Text,
    Texts,
    TokenIds,
    named,
)
from jsg.types import SamplingParams
from tests.made_up_parameter import HELP, NAME

GIVEN: Mapping[type, Any] = {
    Integer: int,
    Number: float,
    Flag: bool,
    Text: str,
    Texts: str | Sequence[str],
    TokenIds: Sequence[int],
}
"""What an editor shows for each kind of a parameter of `gen`."""
RICHER = {"dtype": type | str, "json_schema": str | Mapping[str, Any]}
"""Parameters that `gen` also takes as Python has them."""
NOT_SAMPLED = {"name", "choices", "choices_method"}
"""Parameters of `gen` that say what is appended and not how it is sampled."""


def declared(cls: type) -> list[str]:
    """The fields that stand in the source of a class."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    return [line.target.id for line in definition.body if isinstance(line, ast.AnnAssign)]  # pyright: ignore[reportAttributeAccessIssue]


def given_as(kind: Kind, name: str) -> Any:
    return RICHER.get(name) or GIVEN[type(kind)]


def test_an_editor_sees_every_parameter_of_a_request():
    sampled = {parameter.name: parameter for parameter in PARAMETERS if parameter.role == "sampling"}
    assert set(declared(SamplingParams)) == sampled.keys() | {"grammar"}
    hints = typing.get_type_hints(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        if field.name != "grammar":
            parameter = sampled[field.name]
            assert field.default == parameter.default
            kind = typing.Literal[parameter.kind.values] if isinstance(parameter.kind, OneOf) else parameter.kind.type
            assert hints[field.name] == (kind if parameter.default is not None else kind | None)


@pytest.mark.parametrize("function", [gen, gen_int, gen_string])
def test_an_editor_sees_the_parameters_of_a_gen(function: Callable[..., Any]):
    hints = typing.get_type_hints(function)
    names = inspect.signature(function).parameters.keys() - NOT_SAMPLED
    if function is gen:
        assert names == named("gen").keys()
    for name in names:
        assert hints[name] == given_as(named("gen")[name].kind, name) | None


def test_an_editor_sees_the_parameters_of_a_run():
    parameters = named("run")
    hints = typing.get_type_hints(RunArgs)
    assert hints.keys() == parameters.keys()
    for name, hint in hints.items():
        assert hint in (kind := given_as(parameters[name].kind, name), kind | None)


def test_what_a_gen_keeps_has_the_types_of_the_table():
    hints = typing.get_type_hints(SamplingArgs)
    assert hints.keys() == named("gen").keys()
    for name, parameter in named("gen").items():
        kind = typing.Literal[parameter.kind.values] if isinstance(parameter.kind, OneOf) else parameter.kind.type
        assert hints[name] == kind | None


@pytest.mark.parametrize("interface", get_args(Interface))
def test_a_name_means_one_parameter(interface: Interface):
    assert len(named(interface)) == sum(interface in parameter.interfaces for parameter in PARAMETERS)


def test_one_more_parameter_in_the_table_is_everywhere():
    done = subprocess.run(
        [sys.executable, "-m", "tests.made_up_parameter"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "language": {
            "gen": {NAME: 2},
            "gen refuses": f"{NAME} must be a number, but got 'very'",
            "run": {NAME: 3},
            "run with the neutral value": {},
            "graph": {NAME: 4.0},
            "graph refuses": f"sampling_params: {NAME} must be a number, but got 'very'",
            "session": {NAME: 2},
        },
        "others": {
            **{api: {NAME: 2} for api in ("openai", "compatible", "jsg", "sglang", "vllm", "anthropic")},
            "shares a call": True,
        },
        "bodies": {
            "chat": 2.0,
            "completions": 3.0,
            "responses": 4.0,
            "messages": 5.0,
            "generate": 6,
            "described": HELP,
            "generate refuses": f"{NAME} must be in [0, 9], but got 10; leave it out for the default",
        },
        "steps": {"step": 7.0, "models": 1.0, "page": [NAME, "Sharpness", {"min": 0, "max": 9, "step": 0.01}]},
    }
