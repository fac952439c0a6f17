"""The events of the radix tree over real sockets: a subscriber who loses some of them still finds the tree's blocks."""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from jsg.cache.allocator import PageAllocator
from jsg.cache.node import Node, Root
from jsg.cache.radix import RadixCache
from jsg.engine.child import kv_events
from jsg.engine.child.kv_events import END, KvEventPublisher
from jsg.engine.child.protocol import KvEvents
from jsg.errors import ConfigError
from jsg.types import namespace_digest

TOPIC = "kv@here@model"
BLOCK = 16
DEADLINE_MS = 20_000
MOST_TRIES = 100
Path = tuple[str, bytes]


@pytest.fixture
def where() -> KvEvents:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
    return KvEvents(
        address=f"tcp://127.0.0.1:{ports[0]}", replay_address=f"tcp://127.0.0.1:{ports[1]}", topic=TOPIC, rank=3
    )


class Subscriber:
    """Reads batches, and asks again where some are missing. It knows blocks by all tokens up to their end."""

    def __init__(self, new_socket: Callable[[int], zmq.Socket], where: KvEvents):
        self.live, self.past = new_socket(zmq.SUB), new_socket(zmq.DEALER)
        self.live.rcvhwm, self.live.rcvbuf = 4, 4096
        self.live.subscribe("kv@")
        self.live.connect(where.address)
        self.past.connect(where.replay_address)
        self.blocks: dict[int, Path] = {}
        self.next = 0
        self.num_missed = 0

    def wait_until_subscribed(self, publisher: KvEventPublisher, cache: RadixCache) -> None:
        """Changes the tree until a batch arrives, since those before the subscription are lost."""
        while not self.live.poll(10):
            cache.reset()
            publisher.publish()

    def read(self, until: int) -> None:
        """Reads and repairs until the batch with this number is known.

        A batch that a replay brought before is no try: any number of them may wait in the buffers of the sockets.
        """
        for _ in range(MOST_TRIES):
            number = 0
            while number <= self.next <= until and self.live.poll(200):
                topic, numbered, payload = self.live.recv_multipart()
                assert topic.decode() == TOPIC
                number = int.from_bytes(numbered, "big")
                if number == self.next:
                    self.take(payload)
            if self.next > until:
                return
            self.ask_again()
        raise AssertionError(f"batch {until} does not come")

    def ask_again(self) -> None:
        self.past.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            empty, topic, number, payload = self.past.recv_multipart()
            assert empty == b""
            if number == END:
                return
            assert topic.decode() == TOPIC
            if int.from_bytes(number, "big") == self.next:
                self.num_missed += 1
                self.take(payload)

    def take(self, payload: bytes) -> None:
        self.next += 1
        at_s, events, rank = msgspec.msgpack.decode(payload)
        assert (type(at_s), rank) == (float, 3)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self.store(event)
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        del self.blocks[name]
                case "AllBlocksCleared":
                    self.blocks.clear()

    def store(self, event: dict) -> None:
        parent, names, tokens = (event[key] for key in ("parent_block_hash", "block_hashes", "token_ids"))
        assert event["block_size"] == BLOCK and len(tokens) == BLOCK * len(names)
        namespace, path = ("", b"") if parent is None else self.blocks[parent]
        if event["extra_keys"] is not None:
            assert parent is None and event["extra_keys"][1:] == [None] * (len(names) - 1)
            ((namespace,),) = event["extra_keys"][:1]
        for number, name in enumerate(names):
            path += np.array(tokens[number * BLOCK : (number + 1) * BLOCK], np.uint32).tobytes()
            self.blocks[name] = namespace, path


def blocks_of(cache: RadixCache) -> set[Path]:
    """The whole blocks of a tree, found by a walk."""
    found: set[Path] = set()

    def walk(node: Node, path: Path) -> None:
        for child in node.children.values():
            below = path[0], path[1] + child.tokens
            lengths = range(4 * BLOCK, len(below[1]) + 1, 4 * BLOCK)
            found.update((below[0], below[1][:length]) for length in lengths if length > len(path[1]))
            walk(child, below)

    for name, root in cache._roots.items():
        assert isinstance(root, Root)
        walk(root, (namespace_digest(name) if name else "", b""))
    return found


@pytest.fixture
def new_socket() -> Iterator[Callable[[int], zmq.Socket]]:
    """Makes sockets that are closed at the end."""
    made, sockets = zmq.Context(), []

    def socket_of(kind: int) -> zmq.Socket:
        sockets.append(made.socket(kind))
        sockets[-1].rcvtimeo = DEADLINE_MS
        return sockets[-1]

    yield socket_of
    for each in sockets:
        each.close(linger=0)
    made.term()


def test_a_hybrid_that_keeps_no_states_is_refused(where: KvEvents):
    publisher = KvEventPublisher(where)
    with pytest.raises(ConfigError, match="with --max-states 0 nothing is cached"):
        publisher.observe(RadixCache(1, PageAllocator(9), enabled=False))
    publisher.close()


@contextlib.contextmanager
def publishing(where: KvEvents, page_size: int) -> Iterator[tuple[KvEventPublisher, RadixCache, PageAllocator]]:
    publisher, allocator = KvEventPublisher(where), PageAllocator(4001)
    cache = RadixCache(page_size, allocator)
    publisher.observe(cache)
    try:
        yield publisher, cache, allocator
    finally:
        publisher.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_who_loses_batches_finds_the_blocks_of_the_tree(where, new_socket, monkeypatch, page_size):
    monkeypatch.setattr(kv_events, "MOST_UNREAD", 4)
    rng = random.Random(page_size)
    with publishing(where, page_size) as (publisher, cache, allocator):
        subscriber = Subscriber(new_socket, where)
        subscriber.wait_until_subscribed(publisher, cache)
        # Nobody reads yet, so that most batches are dropped.
        for _ in range(400):
            tokens = np.repeat(np.array(rng.choices([0, 1, -7], k=rng.randrange(1, 200)), np.int32), page_size)
            if allocator.num_free < 200:
                cache.evict(rng.randrange(200, 2000))
            pages = allocator.allocate(len(tokens) // page_size)
            assert pages is not None
            result = cache.insert(tokens, pages, rng.choice(["", "salted"]))
            allocator.free(pages[: result.num_existing])
            if rng.random() < 0.01:
                cache.reset()
            publisher.publish()
        cache.insert(np.full(BLOCK, 5, np.int32), allocator.allocate(BLOCK // page_size))
        publisher.publish()
        wanted = blocks_of(cache)
        while set(subscriber.blocks.values()) != wanted:  # the thread may not have published all of them yet
            subscriber.ask_again()
        assert subscriber.num_missed > 100
        # It goes on with what comes live, after any number of batches that it has got by now.
        for token in (6, 7):
            cache.insert(np.full(BLOCK, token, np.int32), allocator.allocate(BLOCK // page_size))
            publisher.publish()
            subscriber.read(subscriber.next)
            assert set(subscriber.blocks.values()) == blocks_of(cache)
        assert {path for path, _ in wanted} == {"", namespace_digest("salted")}


def test_past_batches_are_kept_within_a_bound(where, new_socket, monkeypatch):
    monkeypatch.setattr(kv_events, "REPLAY_BYTES", 4096)
    with publishing(where, 1) as (publisher, cache, allocator):
        for token in range(100):
            cache.insert(np.full(BLOCK, token, np.int32), allocator.allocate(BLOCK))
            publisher.publish()
        past = new_socket(zmq.DEALER)
        past.connect(where.replay_address)
        for stray in ([b"", b"short"], [b"x", bytes(8)], [b""], [b"", bytes(8), b""]):
            past.send_multipart(stray)
        numbers: list[int] = []
        while not numbers or numbers[-1] < 99:  # the last batch may still be on its way to the thread
            numbers.clear()
            past.send_multipart([b"", (2).to_bytes(8, "big")])
            while (frames := past.recv_multipart())[2] != END:
                numbers.append(int.from_bytes(frames[2], "big"))
        assert numbers == list(range(numbers[0], 100)) and 50 < numbers[0] < 98


class Counting(zmq.Socket):
    """A socket that counts the batches that it has taken to send."""

    num_sent = 0

    def send_multipart(self, *args, **kwargs):
        super().send_multipart(*args, **kwargs)
        self.num_sent += 1


def test_clients_who_read_nothing_cost_little_and_hold_up_nobody(new_socket, monkeypatch):
    """Neither many of them, nor what they asked for, nor that one of them leaves."""
    monkeypatch.setattr(kv_events, "MOST_REPLAYS", 8)
    num_batches, batch = 400, bytes(2**16)
    with zmq.Context() as context, context.socket(zmq.ROUTER, socket_class=Counting) as router:
        replays = kv_events._Replays(router, b"topic")
        router.sndhwm, router.linger = kv_events.MOST_REPLAYED_UNREAD, 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(num_batches):
            replays.keep(batch)

        def asking() -> zmq.Socket:
            client = new_socket(zmq.DEALER)
            client.rcvhwm, client.rcvbuf, client.linger = 1, 4096, 0
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send_multipart([b"", bytes(8)])
            assert router.poll(DEADLINE_MS)
            replays.take_request()
            return client

        silent = [asking() for _ in range(20)]
        while replays.send() == 0:
            pass
        assert len(replays._wanted) == 8
        assert router.num_sent < 8 * 50
        silent[-1].close()
        reader, numbers = asking(), []
        while not numbers or numbers[-1] != END:
            replays.send()
            while reader.poll(1):
                numbers.append(reader.recv_multipart()[2])
        assert numbers == [*(number.to_bytes(8, "big") for number in range(num_batches)), END]


def test_an_address_that_is_taken_is_named(where):
    with publishing(where, 1), pytest.raises(ConfigError, match=f"{where.address} gave: Address already in use"):
        KvEventPublisher(where)
