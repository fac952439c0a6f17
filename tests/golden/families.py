"""One variant of each family, for what every family must keep and no two variants of one keep differently.

A family joins by having a variant in `VARIANTS`. Families differ in which parts their layers have, and few of them have
every part: a test that compiles a model runs on these in CI, and on the others where time is long.
"""

import dataclasses
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jsg.errors import ConfigError, ModelError
from jsg.models.config import read_spec
from jsg.models.registry import FAMILIES, WRAPPERS
from jsg.models.spec import ModelSpec
from tests.golden.variants import VARIANTS


def one_of_each(
    architectures: Collection[str] = (*FAMILIES, *WRAPPERS), *, is_sparse: bool = False
) -> dict[str, ModelSpec]:
    """The first variant of each architecture that two devices can share; only those with experts, if so asked."""
    found: dict[str, tuple[str, ModelSpec]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        for variant, config in VARIANTS.items():
            architecture = config["architectures"][0]
            if architecture in found or architecture not in architectures:
                continue
            file.write_text(json.dumps(config))
            spec = read_spec(Path(folder))
            try:
                spec.over_devices(2, 2 if is_sparse else 1)  # refuses groups of what has no experts
            except (ConfigError, ModelError):
                continue
            found[architecture] = variant, spec
    return dict(found.values())


def covering(specs: Mapping[str, ModelSpec]) -> list[str]:
    """Few of these variants that have between them every trait that any of them has."""
    traits = {variant: set(_traits(spec)) for variant, spec in specs.items()}
    left, chosen = set[Trait]().union(*traits.values()), list[str]()
    while left:
        chosen.append(max(traits, key=lambda variant: len(traits[variant] & left)))
        left -= traits[chosen[-1]]
    return chosen


def mark(variant: str, fast: Collection[str], slow: Collection[str]) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a variant's test, which is long where it is neither fast nor slow."""
    return () if variant in fast else (pytest.mark.slow,) if variant in slow else (pytest.mark.slow, pytest.mark.long)


type Trait = tuple[str, str, object]
"""The name of a record and of its field, and the field's value."""


def _traits(record: Any) -> Iterator[Trait]:
    """What a model and its records are. Of numbers and names it is whether they are the usual ones."""
    name = type(record).__name__
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        parts = [part for part in (value if isinstance(value, tuple) else (value,)) if dataclasses.is_dataclass(part)]
        for part in parts if field.compare else ():
            yield name, field.name, type(part).__name__
            yield from _traits(part)
        if parts or not field.compare:
            continue
        if value is None or isinstance(value, bool):
            yield name, field.name, value
        elif isinstance(value, tuple):
            yield name, field.name, len(value)
        elif field.default is not dataclasses.MISSING:
            yield name, field.name, value == field.default
