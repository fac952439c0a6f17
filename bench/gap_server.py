"""The server that `bench.gaps` measures: `python -m bench.gap_server MODEL_DIRECTORY [embeds | sees]`.

Front and engine are the real ones. The model computes nothing, so what is measured is work of the host. For each line
on stdin a line of JSON on stdout says what the loops did since the last.
"""

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench import null_model
from jsg.config import EngineConfig, ServerConfig
from jsg.engine.child.protocol import Call, Refusal
from jsg.engine.core import EngineCore
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import EngineClient
from jsg.server.ending import EndRequest
from jsg.server.garbage import collect_garbage
from jsg.server.progress import StartDisplay
from jsg.server.run import Directories, serve_until

TICK_S = 0.002


class WatchedCore(EngineCore):
    """An engine whose `stats` have the longest turn of the step loop since the last time, in processor seconds."""

    def __init__(self, config: EngineConfig, **fields: Any) -> None:
        with null_model.registered():
            super().__init__(config, **fields)
        self._turned_s = time.thread_time()
        self._longest_s = 0.0

    def refuse_overdue(self) -> list[Refusal]:
        """Is called once in each turn."""
        now_s = time.thread_time()
        self._longest_s, self._turned_s = max(self._longest_s, now_s - self._turned_s), now_s
        return super().refuse_overdue()

    def answer(self, call: Call) -> bool | dict[str, Any]:
        value = super().answer(call)
        if isinstance(value, dict):
            value["longest_turn_s"], self._longest_s = self._longest_s, 0.0
        return value


@dataclasses.dataclass(slots=True)
class Longest:
    """The longest of the front's event loop.

    Attributes:
        turn_s: Processor time of a turn.
        gap_s: By how much a task was late that wants to run every `TICK_S`; at most the processor time of all threads
            of the front meanwhile, because what other processes take does not count.
    """

    turn_s: float = 0.0
    gap_s: float = 0.0


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes its longest turn."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = Longest()

    def _run_once(self) -> None:
        began_s = time.thread_time()
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]
        self.longest.turn_s = max(self.longest.turn_s, time.thread_time() - began_s)


async def _tick(longest: Longest) -> None:
    while True:
        began_s, worked_s = time.monotonic(), time.process_time()
        await asyncio.sleep(TICK_S)
        late_s = time.monotonic() - began_s - TICK_S
        longest.gap_s = max(longest.gap_s, min(late_s, time.process_time() - worked_s))


async def _tell(client: EngineClient, longest: Longest, told_to_end: EndRequest) -> None:
    """Answers lines of stdin until its end."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        stats = await client.stats()
        found = dataclasses.asdict(longest) | {"engine_turn_s": stats["longest_turn_s"]}
        longest.turn_s = longest.gap_s = 0.0
        print(json.dumps(found), flush=True)
    told_to_end.is_made.set()


async def _serve(loop: WatchedLoop, config: EngineConfig, *, sees: bool) -> None:
    child = EngineChild.spawn(config, core="bench.gap_server:WatchedCore")
    server, directory = ServerConfig(port=0), Path(config.model_path)
    directories, told_to_end = Directories(directory, directory if sees else None), EndRequest(server)
    with StartDisplay() as display:
        client = EngineClient(child, config, display.show)
        tasks: list[asyncio.Task[None]] = []

        def greet(text: str) -> None:
            print(json.dumps(text), flush=True)
            tasks.append(loop.create_task(collect_garbage(lambda: client.num_under_way)))
            tasks.append(loop.create_task(_tick(loop.longest)))
            tasks.append(loop.create_task(_tell(client, loop.longest, told_to_end)))

        await serve_until(told_to_end, client, config, server, directories, time.monotonic(), greet)
        for task in tasks:
            task.cancel()


def main(arguments: list[str]) -> None:
    directory, *flavour = arguments
    config = EngineConfig(
        model_path=directory,
        load_format="dummy",
        max_total_tokens=2**19,
        max_running_requests=256,
        task="embed" if flavour == ["embeds"] else "generate",
    )
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, WatchedLoop)
        runner.run(_serve(loop, config, sees=flavour == ["sees"]))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to be done


if __name__ == "__main__":
    main(sys.argv[1:])
