"""Makes shapes of the alternatives of arrays. An item that `some` asks for is in the prefix or after it."""

import dataclasses
import itertools
from collections.abc import Iterator

from jsg.constrained.schema.formulas import Formulas
from jsg.constrained.schema.shapes import NEVER, Array, NodeName
from jsg.errors import GrammarError


def finish_array(formulas: Formulas, shape: Array, where: NodeName) -> Iterator[Array]:
    """The shapes whose values are those of the alternative.

    Raises:
        GrammarError: The alternative has more than one `some`.
    """
    if len(shape.some) > 1:
        raise GrammarError(
            f"items at {where}: the array must be valid for more than one schema with `not` over its items, which is "
            "not supported; remove one of them"
        )
    for alternative in _placed(formulas, shape, *shape.some[0]) if shape.some else (shape,):
        array = _clipped(formulas, alternative)
        if array is not None:
            yield array


def _placed(formulas: Formulas, shape: Array, node: NodeName, start: int) -> Iterator[Array]:
    """An alternative for each location of the item that is valid for the node: each in the prefix, and after it."""
    conjoin = formulas.context.nodes.conjoin
    prefix = shape.prefix + (shape.items,) * (start - len(shape.prefix))
    array = dataclasses.replace(shape, prefix=prefix, some=())
    for i in range(start, len(prefix)):
        chosen = (*prefix[:i], conjoin(prefix[i], node), *prefix[i + 1 :])
        yield dataclasses.replace(array, prefix=chosen, min_items=max(shape.min_items, i + 1))
    yield dataclasses.replace(array, some=((conjoin(shape.items, node), len(prefix)),))


def _clipped(formulas: Formulas, array: Array) -> Array | None:
    """The array with its length limited to what its nodes allow; None where no array is valid."""
    is_never = formulas.judge.is_never
    prefix = tuple(itertools.takewhile(lambda node: not is_never(node), array.prefix))
    most = array.max_items
    items = array.items if len(prefix) == len(array.prefix) and not is_never(array.items) else NEVER
    if items == NEVER:
        most = len(prefix) if most is None else min(most, len(prefix))
    if array.some and (is_never(array.some[0][0]) or (most is not None and most <= len(prefix))):
        return None
    if most is not None:
        prefix = prefix[:most]
        if array.min_items > most:
            return None
    return Array(prefix, items, array.min_items, most, array.some)
