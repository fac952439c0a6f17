"""Routers: the blocks of a real engine's cache, and the tokens by which a router looks for them."""

import msgspec
import pytest
import zmq

from jsg.engine.child.kv_events import END
from jsg.free_ports import free_ports
from tests.server.running import ProcessMaker, wait_until


@pytest.mark.slow
def test_events_name_the_blocks_of_a_rendered_prompt(make_real_server: ProcessMaker):
    port = free_ports(count=2)  # past events are at the next one
    with (
        make_real_server("--kv-events-endpoint", f"tcp://127.0.0.1:{port}") as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as past,
    ):
        past.linger, past.rcvtimeo = 0, 20_000
        past.connect(f"tcp://127.0.0.1:{port + 1}")
        body = {"prompt": "so many words " * 20, "max_tokens": 4}
        (rendered,) = server.http.post("/v1/completions/render", json=body).json()
        assert server.http.post("/v1/completions", json=body).status_code == 200
        assert server.http.post("/flush_cache").status_code == 200
        events: list[dict] = []

        def is_flushed() -> bool:
            events.clear()
            past.send_multipart([b"", bytes(8)])
            while (frames := past.recv_multipart())[2] != END:
                events.extend(msgspec.msgpack.decode(frames[3])[1])
            return bool(events) and events[-1]["type"] == "AllBlocksCleared"

        wait_until(is_flushed)  # it is told after it was answered
        stored = events[:-1]
        assert [event["type"] for event in stored] == ["BlockStored"] * len(stored)
        tokens = [token for event in stored for token in event["token_ids"]]
        whole = len(rendered["token_ids"]) // 16 * 16
        assert whole >= 32
        assert tokens[:whole] == rendered["token_ids"][:whole]
        names = [name for event in stored for name in event["block_hashes"]]
        assert len(names) == len(set(names)) == len(tokens) // 16
        assert stored[0]["parent_block_hash"] is None
