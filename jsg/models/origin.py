"""What a parameter is made of: whole tensors of the checkpoint, or parts of them. No JAX.

A tensor of the file may hold several projections side by side, the kernels of all experts, or rows in another order. A
`Part` says which of its numbers a source is. Reading, sharing out, rounding and joining see sources only, each an
ordinary projection [out, in] or vector [out]; `PartReader` finds its numbers in the file.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jsg.models.block_spec import StackSpec


class Part(NamedTuple):
    """Which numbers of a tensor of the file a source is. Rows are the first axis of the source.

    Attributes:
        stored: The tensor's shape in the file.
        expert: The index of its first axis, if that is the axis of experts; else None.
        is_transposed: Without the axis of experts the tensor is [in, out].
        first: The first row.
        step: The distance of a row from the one before it.
        order: For each row of a head the row of the same head in the file; None if all are as they are in the file.
        head: Rows of a head in the file, if the source has only those of `order`.
    """

    stored: tuple[int, ...]
    expert: int | None = None
    is_transposed: bool = False
    first: int = 0
    step: int = 1
    order: tuple[int, ...] | None = None
    head: int | None = None

    @property
    def rows_of_head(self) -> tuple[int, int]:
        """How many rows of the source, and of the file, are read together: those of a head, if some are reordered."""
        rows = 1 if self.order is None else len(self.order)
        return rows, self.head or rows


class Source(NamedTuple):
    """One tensor of the checkpoint, or a part of one.

    Attributes:
        name: Its name.
        shape: Its shape, or that of the part. A projection is [out, in].
        repeats: How many times each of its heads is in the parameter, one after another. It is more than 1 if
            there are fewer key-value heads than devices.
        part: Which part of the tensor it is; None for all of it, as it is in the file.
    """

    name: str
    shape: tuple[int, ...]
    repeats: int = 1
    part: Part | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the file."""
        return self.shape if self.part is None else self.part.stored


class Origin(NamedTuple):
    """How a parameter is made of tensors of the checkpoint.

    Each source is transposed if `transposed`, and takes the parameter's shape except along `join_axis`. All are joined
    along that axis. If a source repeats heads, they are the axis in front of it.

    Attributes:
        sources: The tensors in order.
        join_axis: The axis of the parameter on which they are joined.
        transposed: Whether the sources are transposed.
        split_axis: The axis of the parameter that devices share out; None if each device has all of it.
        expert_axis: The axis of experts, each made of one source. Each group of devices has its own experts, and the
            devices of a group share out `split_axis`. None for a parameter without experts.
    """

    sources: tuple[Source, ...]
    join_axis: int = 0
    transposed: bool = False
    split_axis: int | None = None
    expert_axis: int | None = None


def side_by_side(
    names: Sequence[str],
    widths: Sequence[int],
    inputs: tuple[int, ...],
    repeats: Sequence[int],
    orders: Sequence[tuple[int, ...] | None],
) -> tuple[Source, ...]:
    """Projections, or biases, of which those of one name follow one another in one tensor.

    Args:
        names: The tensor of each.
        widths: Rows of each.
        inputs: The other axis of the tensors: none for biases.
        repeats: `Source.repeats` of each.
        orders: `Part.order` of each.
    """
    rows, first, sources = Counter[str](), Counter[str](), []
    for name, width in zip(names, widths, strict=True):
        rows[name] += width
    for name, width, times, order in zip(names, widths, repeats, orders, strict=True):
        shape, stored = (width, *inputs), (rows[name], *inputs)
        part = None if shape == stored and order is None else Part(stored, first=first[name], order=order)
        first[name] += width
        sources.append(Source(name, shape, times, part))
    return tuple(sources)


def of_experts(
    name: str, count: int, shape: tuple[int, ...], stack: StackSpec | None = None, *, turn: int = 0, turns: int = 1
) -> tuple[Source, ...]:
    """The kernel of each expert, [out, in], or its bias, [out].

    Args:
        name: The tensor without its suffix, with `{expert}` for the number of the expert unless all are in one.
        count: Experts.
        shape: The shape for one expert.
        stack: How one tensor has all experts; None if each has its own.
        turn: Which of the projections in a tensor it is, from 0.
        turns: How many there are.
    """
    is_bias, form = len(shape) == 1, stack or StackSpec()
    name += form.bias_suffix if is_bias else form.suffix
    if stack is None and turns == 1:
        return tuple(Source(name.format(expert=expert), shape) for expert in range(count))
    is_transposed = form.is_transposed and not is_bias
    stored = (shape[0] * turns, *shape[1:])[:: -1 if is_transposed else 1]
    first, step = (turn, turns) if form.is_interleaved else (turn * shape[0], 1)
    if stack is None:
        part = Part(stored, first=first)
        return tuple(Source(name.format(expert=expert), shape, part=part) for expert in range(count))
    parts = [Part((count, *stored), expert, is_transposed, first, step) for expert in range(count)]
    return tuple(Source(name, shape, part=part) for part in parts)
