"""How a server ends in order: what signals ask for, the delay in which it still takes requests, and the drain.

After a first signal `/ready` answers 503 at once. For `--drain-delay` requests are still taken, so that proxies notice
before any is refused. Then the server takes no new requests, gives those under way `--shutdown-timeout`, and ends the
rest with an error. A second signal ends the delay; one more, or a second one where there is no delay, ends the server
at once.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import final

from jsg.config import ServerConfig
from jsg.engine.front.children import EngineChild
from jsg.server.front import FrontDoor
from jsg.server.service_manager import STOPPING, notify

DRAIN_POLL_S = 0.02
SIGNALLED = 128  # exit status after a signal that ends the server at once, with its number added


@final
class EndRequest:
    """What signals have asked of the server so far.

    Attributes:
        is_made: Is set once the server shall end.
        is_urgent: Is set once nothing new shall be taken any more: from the start where `--drain-delay` is 0.
    """

    def __init__(self, server: ServerConfig) -> None:
        """Nothing was asked."""
        self.is_made = asyncio.Event()
        self.is_urgent = asyncio.Event()
        if not server.drain_delay:
            self.is_urgent.set()

    def repeat(self) -> bool:
        """Notes one more signal. Gives False where nothing is left to ask for but the end at once."""
        for event in (self.is_made, self.is_urgent):
            if not event.is_set():
                event.set()
                return True
        return False


def on_signals(told_to_end: EndRequest, children: Sequence[EngineChild]) -> EndRequest:
    """Notes each SIGINT and SIGTERM. The last one that can be noted is followed by one that kills all processes."""
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        if not told_to_end.repeat():
            for child in children:
                child.kill()
                child.remove_directory()
            os._exit(SIGNALLED + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    return told_to_end


async def drain(told_to_end: EndRequest, door: FrontDoor, has_requests: Callable[[], bool]) -> None:
    """Waits for the delay and then until the requests under way have ended, and ends those that take too long.

    The listener stays open meanwhile, so that `/ready` answers 503 and no connection is refused.
    """
    assert door.front is not None
    admission, client = door.front.generator.admission, door.front.client
    door.is_ending = True
    notify(STOPPING)
    await _pass(admission.config.drain_delay, told_to_end.is_urgent.is_set)
    told_to_end.is_urgent.set()
    admission.close()
    await _pass(admission.config.shutdown_timeout, lambda: not has_requests())
    admission.end()
    client.abort_all(error=admission.shutting_down())


async def _pass(seconds: float, is_over: Callable[[], bool]) -> None:
    """Lets a time pass, or less of it where it is over before."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not is_over():
                await asyncio.sleep(DRAIN_POLL_S)
