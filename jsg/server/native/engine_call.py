"""Questions to the engine from endpoints: answered between two steps, or not waited for any longer."""

import asyncio
from collections.abc import Awaitable

from jsg.errors import TimeLimitError
from jsg.server.front import Front


async def answer_in_time[T](front: Front, call: Awaitable[T]) -> T:
    """What the engine answers, if it does within `--health-timeout`: one that stands still must not hold clients up.

    Raises:
        TimeLimitError: It did not answer in time.
        JsgError: What the call raises.
    """
    timeout_s = front.server_config.health_timeout
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise TimeLimitError(
            f"the engine must answer within {timeout_s:g} s (--health-timeout), but did not; see /health"
        ) from None
