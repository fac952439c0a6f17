"""A plugin that checks the shapes and types in signatures while the tests run, and JAX traces."""

import pathlib

import jaxtyping
from beartype import BeartypeConf, beartype

ROOT = pathlib.Path(__file__).parent.parent
MACHINE_CODE = ROOT / "jsg" / "kernels_pallas" / "native"
"""It emits an instruction per call, so checks would take longer than LLVM. `ops` has the shapes of its functions."""

# By default beartype looks at an item of a list that `random` picks. Then a verdict would depend on chance, and an
# engine's thread would advance the generator whose state hypothesis compares before and after each draw.
checked = beartype(conf=BeartypeConf(is_random=False))
"""Signatures with shapes are checked while the tests run, and no verdict depends on chance."""


def modules_with_shapes() -> list[str]:
    """The modules of jsg that are checked: those with a shape, because each checked call takes 20 µs."""
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sorted((ROOT / "jsg").rglob("*.py"))
        if file.parent != MACHINE_CODE and '[Array, "' in file.read_text(encoding="utf-8")
    ]


jaxtyping.install_import_hook(modules_with_shapes(), "tests.shape_checker.checked")
