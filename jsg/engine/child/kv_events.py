"""The events of the radix tree for routers outside: vLLM's wire format on ZeroMQ (vllm/distributed/kv_events.py).

A batch is three frames: the topic, its number in 8 bytes, big-endian, counted from 0, and msgpack. PUB drops what a
slow subscriber does not read. A subscriber sees the gap in the numbers and asks the replay socket (ROUTER) for the
batches from a number on; `END` follows the last one. Both sockets belong to a thread, so that no step waits for a
network.
"""

import time
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import final

import msgspec
import numpy as np
import zmq

from jsg.cache.block_events import (
    BlockEvent,
    BlockRecorder,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    block_tokens_of,
)
from jsg.engine.child.protocol import KvEvents
from jsg.errors import ConfigError
from jsg.types import namespace_digest

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
REPLAY_BYTES = 64 * 2**20
MOST_KEPT = 50_000
"""The bytes and the number of batches that are kept for those who ask again."""
MOST_UNREAD = 1000
"""The batches that wait for one subscriber."""
QUEUE = "inproc://kv-events"
MEDIUM = "GPU"  # what vLLM calls the memory in which steps read keys and values, whatever the device


class _Event(msgspec.Struct, tag=True, tag_field="type", kw_only=True):
    """A map with the name of its class under `type`."""


class BlockStored(_Event):
    """Blocks that can be found now. `extra_keys` has for each block what its name depends on besides tokens."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event):
    """Blocks that are gone."""

    block_hashes: Sequence[int]
    medium: str = MEDIUM


class AllBlocksCleared(_Event):
    """All blocks are gone."""


@final
class KvEventPublisher:
    """Publishes how a tree changes, after each step."""

    def __init__(self, where: KvEvents) -> None:
        """Listens at both addresses. Raises ConfigError where one is not free."""
        self._rank = where.rank
        self._recorder: BlockRecorder | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._queue = self._context.socket(zmq.PAIR)
        self._queue.set_hwm(0)
        self._queue.bind(QUEUE)
        publisher = self._listening(zmq.PUB, where.address, MOST_UNREAD)
        # Twice, because ZeroMQ drops what is beyond, and nobody may wait for an end that was dropped.
        replay = self._listening(zmq.ROUTER, where.replay_address, 2 * MOST_KEPT)
        arguments = (self._context, publisher, replay, where.topic.encode())
        self._thread = Thread(target=_publish, args=arguments, daemon=True)
        self._thread.start()

    def recorder(self, page_size: int) -> BlockRecorder:
        """What must observe the tree, which is empty, so that its changes are published."""
        self._recorder = BlockRecorder(block_tokens_of(page_size))
        return self._recorder

    def publish(self) -> None:
        """Sends one batch with the events since the last one, if there are any."""
        if self._recorder is not None and (events := self._recorder.take()):
            shown = [_shown(event, self._recorder.block_tokens) for event in events]
            self._queue.send(self._encoder.encode((time.time(), shown, self._rank)))

    def _listening(self, kind: int, url: str, most_waiting: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = most_waiting
        socket.zap_domain = b"jsg"  # where it has one, ZeroMQ refuses ZMTP 1, in which any bytes can be a message
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-endpoint must be free addresses of this machine, but {url} gave: {error.strerror}; "
                "choose another port"
            ) from None
        return socket

    def close(self) -> None:
        """Sends what is left and ends the thread."""
        self.publish()
        self._queue.send(b"")
        self._thread.join()
        self._queue.close()
        self._context.term()


def _shown(event: BlockEvent, block_tokens: int) -> _Event:
    match event:
        case BlocksStored(hashes, parent, tokens, namespace):
            first = [namespace_digest(namespace)] if namespace and parent is None else None
            return BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=np.frombuffer(tokens, np.uint32).tolist(),
                block_size=block_tokens,
                extra_keys=None if first is None else [first, *[None] * (len(hashes) - 1)],
            )
        case BlocksRemoved(hashes):
            return BlockRemoved(block_hashes=hashes)
        case BlocksCleared():
            return AllBlocksCleared()


def _publish(
    context: zmq.Context[zmq.Socket[bytes]], publisher: zmq.Socket[bytes], replay: zmq.Socket[bytes], topic: bytes
) -> None:
    """Sends what comes from the queue, and answers those who missed something, until the queue says stop."""
    queue = context.socket(zmq.PAIR)
    queue.connect(QUEUE)
    kept: deque[tuple[int, bytes]] = deque()
    kept_bytes = number = 0
    poller = zmq.Poller()
    for socket in (queue, replay):
        poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if queue in ready:
            if not (payload := queue.recv()):
                break
            publisher.send_multipart((topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
            kept.append((number, payload))
            kept_bytes += len(payload)
            while kept_bytes > REPLAY_BYTES or len(kept) > MOST_KEPT:
                kept_bytes -= len(kept.popleft()[1])
            number += 1
        if replay in ready:
            _replay(replay, kept, topic)
    for socket in (queue, publisher, replay):
        socket.close()


def _replay(replay: zmq.Socket[bytes], kept: deque[tuple[int, bytes]], topic: bytes) -> None:
    """Answers one request. What is no request is ignored."""
    frames = replay.recv_multipart()
    if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
        return
    client, first = frames[0], int.from_bytes(frames[2], "big")
    for number, payload in kept:
        if number >= first:
            replay.send_multipart((client, b"", topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
    replay.send_multipart((client, b"", b"", END, b""))
