"""Reads one schema's keywords about numbers and strings.

The `…_says` functions give the values that all of the keywords allow. The `…_denies` functions give the values that at
least one of them forbids.
"""

from decimal import Decimal

from jsg.constrained.schema.alternatives import Alternative, meet_numbers, number_of, string_of
from jsg.constrained.schema.formats import FORMATS, WIDER
from jsg.constrained.schema.keywords import Reader
from jsg.constrained.schema.patterns import Patterns
from jsg.constrained.schema.shapes import Number, String


def number_says(reader: Reader) -> Number | None:
    """The numbers that all keywords allow; None where they allow no number."""
    shape: Number | None = Number(multiple_of=(_step(reader),) if "multipleOf" in reader.keywords else ())
    for is_low, value, is_out in _bounds(reader):
        bound = Number(min=value, is_min_exclusive=is_out) if is_low else Number(max=value, is_max_exclusive=is_out)
        shape = shape and meet_numbers(shape, bound)
    return shape and number_of(shape)


def number_denies(reader: Reader) -> list[Alternative]:
    """The numbers that at least one keyword forbids, as alternatives."""
    shapes = [
        Number(max=value, is_max_exclusive=not is_exclusive)
        if is_low
        else Number(min=value, is_min_exclusive=not is_exclusive)
        for is_low, value, is_exclusive in _bounds(reader)
    ]
    if "multipleOf" in reader.keywords:
        shapes.append(Number(not_multiple_of=(_step(reader),)))
    return [Alternative(shape) for shape in shapes]


def _step(reader: Reader) -> Decimal:
    value = reader.number("multipleOf")
    if value <= 0:
        raise reader.fail("multipleOf", "above 0")
    return value


def _bounds(reader: Reader) -> list[tuple[bool, Decimal, bool]]:
    """For each bound: (whether it is a lower bound, its value, whether it is exclusive)."""
    bounds: list[tuple[bool, Decimal, bool]] = []
    for keyword, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = reader.keywords.get(exclusive)
        if keyword in reader.keywords:
            bounds.append((keyword == "minimum", reader.number(keyword), flag is True))
        if exclusive in reader.keywords and not isinstance(flag, bool):
            bounds.append((keyword == "minimum", reader.number(exclusive), True))
    return bounds


def string_says(reader: Reader, patterns: Patterns) -> String | None:
    """The strings that all keywords allow; None where they allow no string."""
    pattern, formats = _pattern(reader, patterns), _format(reader)
    return string_of(
        String(
            min_length=reader.count("minLength") or 0,
            max_length=reader.count("maxLength"),
            patterns=(pattern,) if pattern is not None else (),
            formats=(formats,) if formats else (),
        )
    )


def string_denies(reader: Reader, patterns: Patterns) -> list[Alternative]:
    """The strings that at least one keyword forbids, as alternatives."""
    alternatives: list[Alternative] = []
    least, most = reader.count("minLength"), reader.count("maxLength")
    if least:
        alternatives.append(Alternative(String(max_length=least - 1)))
    if most is not None:
        alternatives.append(Alternative(String(min_length=most + 1)))
    if (pattern := _pattern(reader, patterns)) is not None:
        alternatives.append(Alternative(String(not_patterns=(pattern,))))
    if (name := _format(reader)) in WIDER:
        alternatives.append(Alternative(String(not_patterns=(f"^(?:{WIDER[name]})$",))))
    elif name is not None:
        refusal = f"{reader.where('format')} stands under `not`, where {name!r} is not supported; remove it"
        alternatives.append(Alternative(String(), refusals=(refusal,)))
    return alternatives


def _pattern(reader: Reader, patterns: Patterns) -> str | None:
    if "pattern" not in reader.keywords:
        return None
    pattern = reader.text("pattern")
    patterns.check(pattern, reader.where("pattern"))
    return pattern


def _format(reader: Reader) -> str | None:
    if "format" not in reader.keywords:
        return None
    name = reader.text("format")
    return name if name in FORMATS else None
