"""Models that differ from one that was read from a file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jsg.models.spec import ModelSpec


def changed(
    spec: ModelSpec,
    *,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    copies: int = 1,
) -> ModelSpec:
    """The model with these fields in every layer, and with so many copies of its layers."""
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=dataclasses.replace(layer.attention, **(attention or {})),
            mlp=dataclasses.replace(layer.mlp, **(mlp or {})),
        )
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=layers * copies)
