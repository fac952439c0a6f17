"""Makes expressions of numbers: the spellings that a grammar allows.

Every allowed spelling is one of a valid number, and the spelling that `json.dumps` gives a valid number is allowed.
Beyond that a grammar allows as little as possible. Where a number has bounds, one with an exponent has a single digit
before the point, which is not zero; then digits and exponent together say exactly whether it is within the bounds. An
integer has neither a point nor an exponent, and multiples have no exponent.

So that no number is endless, it has at most `MAX_WHOLE` digits before the point and, where it has bounds,
`MAX_FRACTION` after it. Multiples have at most `MAX_MULTIPLE` digits before the point. They may be longer only where
the automaton of the remainders and bounds has more than 190 states, as for a prime divisor above 190, or for the
divisor 97 with a minimum of five digits.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from decimal import Decimal

from jsg.constrained.ir import NEVER, ByteSet, Expr, Literal, Repeat, alt, any_of, literal, optional, seq
from jsg.constrained.limits import Limits
from jsg.constrained.schema.digits import Compared, Digits, Multiple, Relation, Tracker, numbers
from jsg.constrained.schema.shapes import Number
from jsg.errors import GrammarError

MAX_WHOLE = 100
MAX_FRACTION = 20
MAX_MULTIPLE = 30
MAX_DIVISOR = 10_000
"""The largest `multipleOf`, read without its decimal point. It is limited because each remainder is a state."""
_DOUBLE_DIGITS = 15
"""Decimal numbers of at most this many digits are different doubles where they differ."""
_NO_MULTIPLES = ((1, 15), (5, 11), (9, 7))
"""Sizes of numbers that must not be multiples, as (digits before the point, digits after it). With so few digits, a
number that is no integer does not become one when it is read as a double."""
_MAX_EXPONENT = 299
"""Keeps most numbers within what a double can hold."""
_DIGIT = ByteSet(((0x30, 0x39),))
_NOT_ZERO = ByteSet(((0x31, 0x39),))
_MINUS = Literal(b"-")
_MIRRORED: dict[Relation, Relation] = {
    operator.ge: operator.le,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.lt: operator.gt,
}
"""The relation of the negated number to the negated bound."""


@functools.lru_cache(maxsize=256)
def number_expr(shape: Number, limits: Limits) -> Expr:
    """The spellings of the numbers of a shape; NEVER where there are none.

    Raises:
        GrammarError: `multipleOf` is too large, a bound leaves no number, or the automaton is too large.
    """
    if shape == Number(is_integer=True):
        return alt(literal("0"), seq(optional(_MINUS), _long(1)))
    if shape == Number():
        return seq(optional(_MINUS), alt(literal("0"), _long(1)), optional(_fraction(MAX_WHOLE)), optional(_exponent()))
    shape = _tightened(shape)
    if shape == Number(min=Decimal(0)):
        whole = alt(literal("0"), _long(1))
        return alt(seq(whole, optional(_fraction(MAX_WHOLE)), optional(_exponent())), literal("-0.0"))
    return _limited(shape, limits)


def _long(least: int) -> Expr:
    """A whole number above zero with at least this many digits; NEVER where that is more than `MAX_WHOLE`."""
    if least > MAX_WHOLE:
        return NEVER
    return seq(_NOT_ZERO, Repeat(_DIGIT, least - 1, MAX_WHOLE - 1))


def _fraction(most: int) -> Expr:
    return seq(literal("."), Repeat(_DIGIT, 1, most))


def _exponent() -> Expr:
    """Any exponent up to `_MAX_EXPONENT`."""
    digits = seq(optional(ByteSet(((0x31, 0x32),))), _DIGIT, optional(_DIGIT))
    return seq(ByteSet(((0x45, 0x45), (0x65, 0x65))), optional(ByteSet(((0x2B, 0x2B), (0x2D, 0x2D)))), digits)


def _tightened(shape: Number) -> Number:
    """The same shape with bounds that hold for readers that use doubles. Bounds of integers are whole already.

    Such a reader would take a number just inside an exclusive bound for the bound itself. So the bound becomes the next
    double, inclusive.
    """
    low, high = shape.min, shape.max
    is_low_exclusive, is_high_exclusive = shape.is_min_exclusive, shape.is_max_exclusive
    if low and is_low_exclusive:
        low, is_low_exclusive = _next_double(low, math.inf), False
    if high and is_high_exclusive:
        high, is_high_exclusive = _next_double(high, -math.inf), False
    return dataclasses.replace(
        shape, min=low, max=high, is_min_exclusive=is_low_exclusive, is_max_exclusive=is_high_exclusive
    )


def _next_double(bound: Decimal, towards: float) -> Decimal:
    """The nearest double beyond an exclusive bound.

    Raises:
        GrammarError: There is no such double.
    """
    double = math.nextafter(float(bound), towards)
    if math.isinf(double):
        is_low = towards > 0
        keyword, other = ("exclusiveMinimum", "maximum") if is_low else ("exclusiveMaximum", "minimum")
        raise GrammarError(
            f"{keyword}, or {other} under `not`, must leave room for a number, but {bound:.3g} leaves none; "
            f"{'lower' if is_low else 'raise'} it"
        )
    return Decimal(repr(double))


def _limited(shape: Number, limits: Limits) -> Expr:
    comparisons = _comparisons(shape)
    bounds = [Compared.to(*comparison) for comparison in comparisons]
    whole = max([1, *(len(bound.whole) for bound in bounds)])
    fraction = max([0, *(len(bound.fraction) for bound in bounds)])
    if shape.multiple_of or shape.not_multiple_of:
        longest = max(MAX_MULTIPLE, whole + 1)
        trackers: list[Tracker] = [*bounds, *(_checked(Multiple.of(n, False)) for n in shape.not_multiple_of)]
        if shape.multiple_of:
            common = _common_multiple(shape)
            trackers.append(common)
            decimals = 0 if shape.is_integer else max(common.decimals, 1)
            sizes = [Digits(None, decimals, not shape.is_integer, longest)]
        elif shape.is_integer:
            sizes = [Digits(None, 0, has_minus_zero=False, longest=longest)]
        else:
            sizes = [Digits(max(whole, before), max(fraction, after)) for before, after in _NO_MULTIPLES]
        return any_of(numbers(size, trackers, limits) for size in sizes)
    if shape.is_integer:
        size = Digits(whole, 0, has_minus_zero=False)
    elif shape.excluded:
        # No number may be read as an excluded double. So it has too few digits to come that near to one.
        size = Digits(whole, max(fraction, _DOUBLE_DIGITS - whole))
    else:
        size = Digits(whole, max(fraction, MAX_FRACTION))
    longer = _long(whole + 1) if shape.is_integer else seq(_long(whole + 1), optional(_fraction(MAX_FRACTION)))
    options = [numbers(size, bounds, limits)]
    if shape.max is None:
        options.append(longer)
    if shape.min is None:
        options.append(seq(_MINUS, longer))
    if not shape.is_integer:
        most_digits = _DOUBLE_DIGITS if shape.excluded else MAX_FRACTION + 1
        mirrored = [(_MIRRORED.get(relation, relation), -value) for relation, value in comparisons]
        options.append(_scientific(comparisons, most_digits, limits))
        options.append(seq(_MINUS, _scientific(mirrored, most_digits, limits)))
    return any_of(options)


def _comparisons(shape: Number) -> list[tuple[Relation, Decimal]]:
    """What must hold for a number of the shape, each as (relation, the value on its right side)."""
    found: list[tuple[Relation, Decimal]] = [(operator.ne, value) for value in sorted(shape.excluded)]
    if shape.min is not None:
        found.append((operator.gt if shape.is_min_exclusive else operator.ge, shape.min))
    if shape.max is not None:
        found.append((operator.lt if shape.is_max_exclusive else operator.le, shape.max))
    return found


def _scientific(comparisons: list[tuple[Relation, Decimal]], most_digits: int, limits: Limits) -> Expr:
    """The numbers above zero that are written as one digit, perhaps a fraction, and an exponent.

    Where the exponent is that of a bound, the digits decide whether the number is within the bound. Every other
    exponent decides alone.
    """
    least, most = -_MAX_EXPONENT, _MAX_EXPONENT
    edges: dict[int, list[Compared]] = {}
    for relation, value in comparisons:
        if value > 0:
            exponent = value.adjusted()
            edges.setdefault(exponent, []).append(Compared.to(relation, value.scaleb(-exponent)))
            least = max(least, exponent) if relation in (operator.ge, operator.gt) else least
            most = min(most, exponent) if relation in (operator.le, operator.lt) else most
        elif relation in (operator.le, operator.lt):
            return NEVER
    exponent_sign = ByteSet(((0x45, 0x45), (0x65, 0x65)))
    free = seq(_NOT_ZERO, optional(_fraction(most_digits - 1)))
    options = [seq(free, exponent_sign, _exponents(least, most, edges, limits))]
    for exponent, bounds in edges.items():
        if least <= exponent <= most:
            size = Digits(1, max(most_digits - 1, *(len(bound.fraction) for bound in bounds)))
            digits = numbers(size, [Compared.to(operator.ge, Decimal(1)), *bounds], limits)
            options.append(seq(digits, exponent_sign, _exponents(exponent, exponent, (), limits)))
    return any_of(options)


def _exponents(least: int, most: int, without: Iterable[int], limits: Limits) -> Expr:
    """The exponents from `least` to `most` except some. A single digit may have a zero before it."""

    def spelled(sign: Expr, low: int, high: int, others: Iterable[int]) -> Expr:
        bounds = [Compared.to(operator.ge, Decimal(low)), Compared.to(operator.le, Decimal(high))]
        bounds.extend(Compared.to(operator.ne, Decimal(other)) for other in others)
        short, long = (numbers(Digits(size, 0, has_minus_zero=False), bounds, limits) for size in (1, 3))
        return seq(sign, any_of([long, seq(literal("0"), short)]))

    down = spelled(_MINUS, max(1, -most), -least, [-exponent for exponent in without if exponent < 0])
    up = spelled(optional(literal("+")), max(0, least), most, [exponent for exponent in without if exponent >= 0])
    return any_of([down, up])


def _common_multiple(shape: Number) -> Multiple:
    """The least common multiple of all factors of the shape, in place of them."""
    factors = [Multiple.of(factor) for factor in (*shape.multiple_of, *([Decimal(1)] if shape.is_integer else []))]
    decimals = max(factor.decimals for factor in factors)
    common = math.lcm(*(factor.numerator * 10 ** (decimals - factor.decimals) for factor in factors))
    while decimals and common % 10 == 0:
        common, decimals = common // 10, decimals - 1
    return _checked(Multiple(common, decimals))


def _checked(multiple: Multiple) -> Multiple:
    if multiple.numerator > MAX_DIVISOR:
        raise GrammarError(
            f"multipleOf must be at most {MAX_DIVISOR} when its decimal point is left out, but is {multiple.numerator} "
            "here; use a smaller one"
        )
    return multiple
