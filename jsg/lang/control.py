"""Branches and loops that a graph can hold. They do the same in an interpreted program.

cond(s, equals(s["verdict"], "yes"), then=accept, otherwise=revise)
loop(s, improve, until=lambda s: contains(s["review"], "done"), max_rounds=3)
"""

import inspect
from collections.abc import Callable
from typing import Any

from jsg.errors import ProgramError
from jsg.lang.executor.conditions import holds
from jsg.lang.graphs.nodes import AllOf, AnyOf, Condition, Contains, Equals, Matches, Not, TextValue
from jsg.lang.tracing import scope
from jsg.lang.tracing.traced_state import OrderFree, TracedState
from jsg.lang.tracing.tracer import Tracer
from jsg.lang.words.ir import Expr, ExprList, parts_of

MAX_ROUNDS = 1000


def equals(value: Any, text: Any) -> Condition:
    """Holds where `value` is `text`, white space around both aside."""
    return Equals(_text(value), _text(text))


def contains(value: Any, text: Any) -> Condition:
    """Holds where `text` is somewhere in `value`."""
    return Contains(_text(value), _text(text))


def matches(value: Any, pattern: str) -> Condition:
    """Holds where all of `value` matches a regular expression, in the dialect of `gen(regex=...)`."""
    if not isinstance(pattern, str):
        raise ProgramError(f"the pattern of matches() must be constant text, but got {type(pattern).__name__}")
    return Matches(_text(value), pattern)


def not_(condition: Condition) -> Condition:
    """Holds where `condition` does not."""
    return Not(_condition(condition))


def all_of(*conditions: Condition) -> Condition:
    """Holds where each of `conditions` does."""
    return AllOf(tuple(map(_condition, conditions)))


def any_of(*conditions: Condition) -> Condition:
    """Holds where at least one of `conditions` does."""
    return AnyOf(tuple(map(_condition, conditions)))


def cond(
    s: Any,
    condition: Condition,
    then: Callable[[Any], object],
    otherwise: Callable[[Any], object] | None = None,
) -> None:
    """Runs `then(s)` where the condition holds, else `otherwise(s)`.

    In a traced program both functions become part of the graph, and the run chooses. They may extend `s` and its forks,
    and set variables. A variable that only one of them sets keeps its value where the other one runs.

    Args:
        s: The state: that of the program, or a fork of it.
        condition: What `equals`, `contains`, `matches`, `not_`, `all_of` or `any_of` gives.
        then: Extends the state that it is given.
        otherwise: Does the same; None appends nothing.

    Raises:
        ProgramError: `condition` was not made by one of these functions, or a body is no plain function.
    """
    _condition(condition)
    _check_body("then", then)
    if otherwise is not None:
        _check_body("otherwise", otherwise)
    if isinstance(s, TracedState):
        s.cond(condition, then, otherwise)
    elif _holds(condition):
        then(s)
    elif otherwise is not None:
        otherwise(s)


def loop(
    s: Any,
    body: Callable[[Any], object],
    *,
    until: Callable[[Any], Condition] | None = None,
    max_rounds: int,
) -> None:
    """Runs `body(s)` at least once, until a condition holds, and at most `max_rounds` times.

    In a traced program the body is traced once; it reads of a variable the value that the round before left.

    Args:
        s: The state, as in `cond`.
        body: Extends the state that it is given.
        until: Gives the condition on which the loop ends after a round; None runs all rounds.
        max_rounds: The largest number of rounds.

    Raises:
        ProgramError: `max_rounds` is not between 1 and 1000, `until` gives no condition, or a body is no plain
            function.
    """
    if not isinstance(max_rounds, int) or not 1 <= max_rounds <= MAX_ROUNDS:
        raise ProgramError(f"max_rounds must be a known number between 1 and {MAX_ROUNDS}, but got {max_rounds!r}")
    _check_body("body", body)
    if until is not None:
        _check_body("until", until, "gives a condition: until=lambda s: jsg.contains(s['review'], 'done')")
    if isinstance(s, TracedState):
        s.loop(body, None if until is None else lambda s: _condition(until(s)), max_rounds)
        return
    for _ in range(max_rounds):
        body(s)
        if until is not None and _holds(_condition(until(s))):
            return


def unordered(*parts: Expr | str) -> Expr:
    """Appends parts of text, pictures and videos, whose order means nothing, in the order given.

    A graph may put them into another order, so that the parts that are equal in many runs come first and are computed
    once.
    """
    tracing = scope.active()
    if tracing is not None:
        return ExprList((OrderFree(tuple(ExprList(parts_of(part)) for part in parts)),))
    return ExprList(tuple(item for part in parts for item in parts_of(part)))


def _check_body(what: str, body: Any, does: str = "extends it: def more(s): s += 'text'") -> None:
    """Raises ProgramError for a body that is no plain function."""
    if inspect.iscoroutinefunction(body):
        raise ProgramError(f"{what} must be a plain function, but {body.__name__} is async, and nothing would await it")
    if not callable(body) or isinstance(body, Expr):
        raise ProgramError(f"{what} must be a function that is given the state and {does}; but got {body!r}")


def _text(value: Any) -> TextValue:
    tracing = scope.active()
    if isinstance(tracing, Tracer):
        return TextValue(tracing.pieces(value))
    if not isinstance(value, str):
        raise ProgramError(f"a condition compares text, but got {type(value).__name__}")
    return TextValue((value,))


def _holds(condition: Condition) -> bool:
    return holds(condition, lambda value: "".join(map(str, value.pieces)))


def _condition(condition: Any) -> Condition:
    if isinstance(condition, Equals | Contains | Matches | Not | AllOf | AnyOf):
        return condition
    raise ProgramError(
        f"a condition is made by equals, contains, matches, not_, all_of or any_of, but got {type(condition).__name__}"
    )
