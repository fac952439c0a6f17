"""What an asynchronous method gives: a coroutine that says so where somebody forgot to await it."""

import functools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn, final

from jsg.errors import ProgramError


@final
class Awaited[T](Coroutine[Any, Any, T]):
    """A coroutine. Using it as if it were its result raises an error that says to await it."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        """Goes on with it."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error in it."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Ends it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _refuse(self, *_: Any) -> NoReturn:
        name = self._coroutine.__qualname__
        raise ProgramError(f"what {name}(...) gives must be awaited: write await {name.rpartition('.')[2]}(...)")

    __getitem__ = __contains__ = __iter__ = __format__ = __str__ = __add__ = __radd__ = _refuse
    text = messages = get_meta_info = get_var = sync = error = usage = text_iter = _refuse
    ret_value = property(_refuse)


def awaited[**P, T](method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Awaited[T]]:
    """Decorates an `async def` that people forget to await."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Awaited[T]:
        return Awaited(method(*args, **kwargs))

    return call
