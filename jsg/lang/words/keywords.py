"""Keyword arguments that do not fit: which name the same parameter has where it was given, or where it belongs."""

import functools
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Literal, cast, get_args

from jsg.errors import RequestError, near
from jsg.parameters import PARAMETERS, Interface


def checked_keywords[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a primitive, so that an unknown keyword is an error which names the right one."""
    code = cast(FunctionType, function).__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:  # Python's own refusal of a keyword; a call that fits pays for no check
            name = next((name for name in kwargs if name not in known), None)
            if name is None:
                raise
        what = _ELSEWHERE.get(name) or advice([name], "gen", known)
        what = what or f"{near(name, known)}; it takes {', '.join(known)}"
        raise RequestError(f"{code.co_name} has no argument {name}{what}", param=name)

    return call


_ELSEWHERE: dict[str, str] = dict.fromkeys(
    ("tools", "tool_choice"),
    "; tools belong to chats: send them to POST /v1/chat/completions of a jsg server, or describe the call that you "
    "want by json_schema=",
)


def advice(unknown: Collection[str], at: Literal["gen", "run"], known: Collection[str] | None = None) -> str:
    """Gives the end of a message about unknown arguments; "" if there is nothing to advise.

    Args:
        unknown: The names that were given.
        at: Where they were given.
        known: The names that are taken there; None means all of the table.
    """
    for parameter in PARAMETERS:
        names = {parameter.name, *map(parameter.name_in, get_args(Interface))}
        if names.isdisjoint(unknown):
            continue
        here = parameter.name_in(at)
        if here is not None and here not in unknown and (known is None or here in known):
            return f"; here it is called {here}"
        in_gen = parameter.name_in("gen")
        if at == "run" and here is None and in_gen is not None:
            return f"; give {in_gen} to the gens of the program"
    return ""


def unknown_in_batch(unknown: Collection[str], run_args: Collection[str]) -> str:
    """Gives the message about arguments that a batch does not take; `run_args` are some that it takes."""
    what = advice(unknown, "run") or f"{near(min(unknown), run_args)}; arguments are given per item"
    return f"run_batch has no argument {', '.join(sorted(unknown))}{what}"
