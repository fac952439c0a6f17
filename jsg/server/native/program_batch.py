"""The list form of `/v1/programs`: one graph that runs once for each item of a list of arguments."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from jsg.errors import JsgError, RequestError
from jsg.lang.executor.arguments import ArgumentValue
from jsg.server.http.failures import INTERNAL_ERROR, MAX_MESSAGE_CHARS
from jsg.server.loop_share import PER_UNIT

logger = logging.getLogger(__name__)

Item = dict[str, ArgumentValue] | JsgError
"""The arguments of an item, or what is wrong with them."""


async def run_items(
    items: list[Item], run: Callable[[Mapping[str, ArgumentValue]], Awaitable[dict[str, Any]]], at_once: int
) -> AsyncGenerator[list[dict[str, Any]]]:
    """Runs the items side by side. The failure of one is reported for that one. Closing the generator ends all.

    Args:
        items: The items.
        run: Runs an item; gives its answer.
        at_once: So many run at a time.

    Yields:
        `{"item": index, "result": answer}` or `{"item": index, "failure": {"type", "message"}}` for each that has
        ended, up to `PER_UNIT` of them together.
    """
    ended: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    places = asyncio.Semaphore(at_once)

    async def run_one(index: int, item: Item) -> None:
        try:
            if isinstance(item, JsgError):
                raise item
            async with places:
                answer = {"result": await run(item)}
        except JsgError as error:
            answer = {"failure": _failure(error)}
        except Exception:
            logger.exception("an item of a batch of programs failed")
            answer = {"failure": _failure(JsgError(INTERNAL_ERROR))}
        ended.put_nowait({"item": index, **answer})

    tasks = [asyncio.create_task(run_one(index, item)) for index, item in enumerate(items)]
    try:
        left = len(tasks)
        while left:
            some = [await ended.get()]
            while len(some) < PER_UNIT and not ended.empty():
                some.append(ended.get_nowait())
            left -= len(some)
            yield some
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(error: JsgError) -> dict[str, Any]:
    param = {"param": error.param} if isinstance(error, RequestError) and error.param else {}
    return {"type": type(error).__name__, "message": str(error)[:MAX_MESSAGE_CHARS], **param}
