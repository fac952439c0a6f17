"""Sampling parameters in the bodies of requests: the fields and their names, from the table of parameters."""

from typing import Annotated, Any, Literal, assert_never

from pydantic import Field, create_model

from jsg.parameters import (
    Flag,
    Integer,
    Interface,
    Kind,
    LogitBias,
    Number,
    OneOf,
    Text,
    Texts,
    TokenIds,
    named,
)
from jsg.server.http.body import Body, Checked

_POWER = 2**16  # larger bounds are a power of two less one, and are shown as "below" the power


def with_sampling[B: Body](base: type[B], interface: Interface) -> type[B]:
    """A body like `base` with a field for each sampling parameter of an interface, as a base for the whole body.

    The whole body may declare a field again, where its interface takes other values.
    """
    fields: dict[str, Any] = {
        name: (_type_of(parameter.kind) | None, Field(None, description=parameter.help or _rule_of(parameter.kind)))
        for name, parameter in named(interface).items()
    }
    return create_model(f"{base.__name__}WithSampling", __base__=base, __module__=__name__, **fields)


def sampling_fields(body: Body, interface: Interface) -> dict[str, Any]:
    """Name in `SamplingParams` → the client's value; None where it gave none."""
    fields: dict[str, Any] = {}
    for name, parameter in named(interface).items():
        value = getattr(body, name)
        fields[parameter.name] = parameter.default if value == 0 and parameter.takes_zero else value
    return fields


def own_names(interface: Interface) -> dict[str, str]:
    """Name in `SamplingParams` → the name in an interface, for parameters whose names differ."""
    return {parameter.name: name for name, parameter in named(interface).items() if name != parameter.name}


def _rule_of(kind: Kind) -> str | None:
    return f"{kind.rule[0].upper()}{kind.rule[1:]}." if isinstance(kind, Integer | Number) else None


def _type_of(kind: Kind) -> Any:
    match kind:
        case Integer(low, high, also=None):
            return Annotated[int, Field(ge=low, lt=high + 1) if high >= _POWER else Field(ge=low, le=high)]
        case Integer():
            return int
        case Number():
            return float
        case Flag():
            return bool
        case Text():
            return str
        case OneOf(values):
            return Literal[values]
        case Texts():
            return str | Checked[str]
        case TokenIds():
            return Checked[int]
        case LogitBias():
            return dict[str, float]
        case _:
            assert_never(kind)
