"""How the kernels of a published checkpoint are quantised, by its `config.json` and the files beside it.

No JAX and no numpy.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jsg.errors import ModelError
from jsg.fields import MAX_INTEGER, Fields
from jsg.kernels_pallas.form import Form
from jsg.models.published.layout import Group, Layout

COMMON = (".scale",)
"""Marks that tensors of other kinds have, too. They count if the kernel is there."""
UNREAD = re.compile(r".*[._](input|activation|output|q|k|v|kv)_(global_)?(scale|zero_point)(_ub)?")
"""Names of tensors that say how activations and cached keys and values are rounded. jsg does not round them so."""


class KeptForm(NamedTuple):
    """How a kernel can be kept in few bits. Those that make one parameter must be equal.

    Attributes:
        form: The form.
        order: A word for the order of its inputs; empty if it has none.
        is_turned: The model has it as [..., in, out].
    """

    form: Form
    order: str
    is_turned: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How kernels are stored in few bits.

    Attributes:
        title: What they are, in words.
        where: The file and the field that say so.
        marks: The end of a name that only a part of such a kernel has → the end of the kernel's name.
        roles: The other ends, after the kernel's name or from a dot on after the module's.
        layout: The layout of a kernel.
        skips: The rule that says that a module of this name is not quantised; None if there is none.
    """

    title: str
    where: str = ""
    marks: Mapping[str, str]
    roles: tuple[str, ...]
    layout: Callable[[Group], Layout]
    skips: Callable[[str], str | None] = lambda name: None

    def sorted(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """The names of the kernels in few bits that these tensors make, and of the tensors that are read as they are.

        Raises:
            ModelError: There is no such kernel.
        """
        held = dict.fromkeys(names)
        found = dict.fromkeys(
            kernel
            for name in held
            for mark, end in self.marks.items()
            if name.endswith(mark) and ((kernel := name.removesuffix(mark) + end) in held or mark not in COMMON)
        )
        if held and not found:
            raise ModelError(
                f"{self.where} says that kernels are quantised ({self.title}), but the checkpoint holds none that is; "
                "remove the field, or download the checkpoint again"
            )
        parts = {Group(name, {}).full_name(role) for name in found for role in (*self.roles, "")}
        others = [name for name in held if name not in parts and not UNREAD.fullmatch(name)]
        return list(found), others

    def check_skips(self, kernels: Iterable[str], here: Callable[[str], str]) -> None:
        """Raises ModelError if one of these kernels is in few bits, but must not be."""
        for name in kernels:
            for each in dict.fromkeys((name, here(name))):
                if (rule := self.skips(Group(each, {}).module)) is not None:
                    raise ModelError(
                        f"{self.where} says that {name} is not quantised ({rule!r}), but the checkpoint holds it in "
                        "few bits; are config.json and the checkpoint of one model?"
                    )


def skips_of(patterns: Any) -> Callable[[str], str | None]:
    """Those that transformers skips by a list: beginnings and expressions up to the end of a module, or ends."""
    listed = [pattern for pattern in patterns or () if isinstance(pattern, str) and pattern]
    compiled = {pattern: expression_of(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))") for pattern in listed}
    ends = tuple(listed)

    def rule(name: str) -> str | None:
        if name.endswith(ends):
            return next(pattern for pattern in listed if name.endswith(pattern))
        return next((pattern for pattern, each in compiled.items() if each.match(name)), None)

    return rule


def skips_by_wildcards(patterns: Any) -> Callable[[str], str | None]:
    """Those that ModelOpt skips: names with wildcards, of a module or of one around it."""
    listed = [pattern for pattern in patterns or () if isinstance(pattern, str) and pattern]

    def rule(name: str) -> str | None:
        return next((each for each in listed if fnmatch.fnmatchcase(name, each) or name.startswith(each + ".")), None)

    return rule


def matches(name: str, pattern: str) -> bool:
    """Whether compressed-tensors means a module of this name by a pattern."""
    if not pattern.startswith("re:"):
        return name == pattern
    return expression_of(pattern.removeprefix("re:")).match(name) is not None


def expression_of(expression: str) -> re.Pattern[str]:
    """A regular expression of a file, or if it is none what is literally so."""
    try:
        return re.compile(expression)
    except re.error:
        return re.compile(re.escape(expression) + r"(?=\.|$)")


def require_one_of(config: Fields, name: str, *values: Any, default: Any = None) -> Any:
    """The value of a field, which must be one of these."""
    value = config.get(name, default)
    ok = any(value == each and type(value) is type(each) for each in values)
    config.require(ok, name, f"be {' or '.join(map(str, values))}", value)
    return value


def read_group(config: Fields, name: str) -> int | None:
    """How many inputs share a scale; None for all."""
    size = config.get(name, 128)
    return None if size == -1 else config.integer(name, default=128)


def read_block(config: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if the file does not say."""
    block = config.get(name)
    ok = block is None or (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= MAX_INTEGER for n in block)
    )
    config.require(ok, name, "be two positive integers", block)
    return None if block is None else (block[0], block[1])
