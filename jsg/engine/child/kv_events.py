"""The events of the radix tree for routers outside: vLLM's wire format on ZeroMQ (vllm/distributed/kv_events.py).

A batch is three frames: the topic, its number in 8 bytes, big-endian, counted from 0, and msgpack. PUB drops what a
slow subscriber does not read. A subscriber sees the gap in the numbers and asks the replay socket (ROUTER) for the
batches from a number on; `END` follows the last one that there was then. A client gets them as fast as it reads, so
that one who does not read costs little. Both sockets belong to a thread, so that no step waits for a network.
"""

import time
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
from jsg.cache.radix import RadixCache
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
MOST_REPLAYED_UNREAD = 16
MOST_REPLAYED_BYTES = 2**18
"""The past batches that wait in a queue for one client, and the bytes beside them in its socket."""
MOST_REPLAYS = 64
"""The clients who are sent past batches at once. For a further one, the one that has read nothing for longest loses the
rest."""
REPLAYS_AT_ONCE = 256
"""The batches that are sent to one client before the newest batch has its turn."""
RETRY_MS = 20
"""Nothing says when a client of a ROUTER has read something, so the thread tries again after this time."""
MOST_REQUEST_BYTES = 4096
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
        replay = self._listening(zmq.ROUTER, where.replay_address, MOST_REPLAYED_UNREAD)
        arguments = (self._context, publisher, replay, where.topic.encode())
        self._thread = Thread(target=_publish, args=arguments, daemon=True)
        self._thread.start()

    def observe(self, cache: RadixCache) -> None:
        """Publishes the changes of a tree, which is empty.

        Raises:
            ConfigError: Nothing is ever cached in it.
        """
        if not cache.enabled:
            raise ConfigError(
                "--kv-events-endpoint tells what the prefix cache has, but with --max-states 0 nothing is cached of "
                "this model; leave one of them out"
            )
        assert not cache.num_nodes, "who publishes a tree must see it grow from its beginning"
        usable_at = cache.usable_at if cache.kinds else None
        self._recorder = BlockRecorder(block_tokens_of(cache.page_size), usable_at)
        cache.observe(self._recorder)

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
    replays = _Replays(replay, topic)
    number = 0
    poller = zmq.Poller()
    for socket in (queue, replay):
        poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(replays.send()))
        if queue in ready:
            if not (payload := queue.recv()):
                break
            publisher.send_multipart((topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
            replays.keep(payload)
            number += 1
        if replay in ready:
            replays.take_request()
    for socket in (queue, publisher, replay):
        socket.close()


@final
class _Replays:
    """The last batches, and how far each client has got who asked for them."""

    def __init__(self, socket: zmq.Socket[bytes], topic: bytes) -> None:
        socket.router_mandatory = True  # sending says whether a client can take more, and whether it is there
        socket.rcvhwm = MOST_REPLAYED_UNREAD
        socket.sndbuf = MOST_REPLAYED_BYTES
        socket.maxmsgsize = MOST_REQUEST_BYTES
        self._socket = socket
        self._topic = topic
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0
        self._end = 0  # the number of the next batch
        # The next batch of each client and the end of its replay; who has read nothing for longest is the first.
        self._wanted: dict[bytes, tuple[int, int]] = {}

    def keep(self, payload: bytes) -> None:
        """Keeps the next batch, and as many before it as the bounds allow."""
        self._kept[self._end] = payload
        self._kept_bytes += len(payload)
        self._end += 1
        while self._kept_bytes > REPLAY_BYTES or len(self._kept) > MOST_KEPT:
            self._kept_bytes -= len(self._kept.pop(self._first))

    @property
    def _first(self) -> int:
        return self._end - len(self._kept)

    def take_request(self) -> None:
        """Takes one request. What is no request is ignored. Who asks again gets only what it asked for last."""
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        self._wanted.pop(frames[0], None)
        if len(self._wanted) >= MOST_REPLAYS:
            del self._wanted[next(iter(self._wanted))]
        self._wanted[frames[0]] = int.from_bytes(frames[2], "big"), self._end

    def send(self) -> int | None:
        """Sends each client what it can take. Gives the milliseconds after which to send more; None if nothing is left.

        A client that has left loses the rest.
        """
        wait_ms = RETRY_MS if self._wanted else None
        for client, (wanted, end) in list(self._wanted.items()):
            number = min(max(wanted, self._first), end)
            reached = self._send_some(client, number, end)
            if reached == number:
                continue
            wait_ms = 0
            del self._wanted[client]
            if reached is not None:
                self._wanted[client] = reached, end
        return wait_ms

    def _send_some(self, client: bytes, number: int, end: int) -> int | None:
        """Sends batches as long as the client can take them. Gives its next batch; None if it has all or has left."""
        try:
            for batch in range(number, min(end, number + REPLAYS_AT_ONCE)):
                numbered = batch.to_bytes(SEQUENCE_BYTES, "big"), self._kept[batch]
                self._socket.send_multipart((client, b"", self._topic, *numbered), zmq.NOBLOCK)
                number = batch + 1
            if number < end:
                return number
            self._socket.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)
        except zmq.Again:
            return number
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return None
