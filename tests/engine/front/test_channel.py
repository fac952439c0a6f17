"""The channel between two processes, with both ends here."""

import asyncio
from pathlib import Path

import pytest

from jsg.engine.front.channel import Channel

NUM = 300


@pytest.mark.parametrize("listener_sends_first", [True, False])
async def test_all_arrives_in_order_whoever_begins(tmp_path: Path, listener_sends_first: bool):
    address = f"ipc://{tmp_path}/c"
    first = Channel(address, listens=listener_sends_first)
    for number in range(NUM):  # before there is another end
        first.send([b"%d" % number, bytes(number)])
    second = Channel(address, listens=not listener_sends_first)
    for number in range(NUM):
        assert await second.receive() == [b"%d" % number, bytes(number)]
        second.send([b"%d" % number])  # which may use up what the descriptor has told
    for number in range(NUM):
        assert await first.receive() == [b"%d" % number]
    waiting = asyncio.create_task(first.receive())
    await asyncio.sleep(0.01)
    waiting.cancel()
    second.send([b"last"])
    assert await first.receive_within(10) == [b"last"]
    assert await first.receive_within(0.01) == []
    first.close()
    second.close()
    second.send([b"late"])
