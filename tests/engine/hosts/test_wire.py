import json
import socket
import struct
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.engine.hosts.wire import MAX_MESSAGE_BYTES, CallCodec, WireError, receive_message, send_message

SCHEMA = {
    ("forward", 1): (jax.ShapeDtypeStruct((5,), jnp.int32),),
    ("write",): (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2, 3), jnp.float32)),
    ("large",): (jax.ShapeDtypeStruct((300, 300), jnp.uint32),),
    ("nothing",): (),
}


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(60)
        yield left, right


def arrays_of(name: tuple) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [np.asarray(rng.integers(0, 1000, each.shape), each.dtype) for each in SCHEMA[name]]


def test_calls_arrive_as_they_were_made_and_then_the_end(ends):
    left, right = ends
    codec = CallCodec(SCHEMA)

    def send() -> None:
        for name in SCHEMA:
            codec.send([left], name, arrays_of(name))
        codec.send_end([left])

    thread = threading.Thread(target=send)
    thread.start()
    for name in SCHEMA:
        call = CallCodec(SCHEMA).receive(right)
        assert call is not None and call[0] == name
        for got, sent in zip(call[1], arrays_of(name), strict=True):
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(got, sent)
    assert codec.receive(right) is None
    thread.join()


def test_an_array_of_columns_is_sent_in_its_order(ends):
    left, right = ends
    codec = CallCodec({"a": (jax.ShapeDtypeStruct((2, 3), jnp.int32),)})
    array = np.arange(6, dtype=np.int32).reshape(3, 2).T
    codec.send([left], "a", [array])
    call = codec.receive(right)
    assert call is not None
    np.testing.assert_array_equal(call[1][0], array)


@pytest.mark.parametrize("wrong", [np.zeros(4, np.int32), np.zeros(5, np.int64), np.zeros((5, 1), np.int32)])
def test_arrays_that_the_program_does_not_take_are_never_sent(ends, wrong: np.ndarray):
    left, right = ends
    with pytest.raises(ValueError, match="takes"):
        CallCodec(SCHEMA).send([left], ("forward", 1), [wrong])
    left.shutdown(socket.SHUT_WR)
    assert right.recv(1) == b""


@pytest.mark.parametrize("number", [-2, len(SCHEMA), 2**31 - 1])
def test_a_program_that_does_not_exist_is_an_error(ends, number: int):
    left, right = ends
    left.sendall(struct.pack("<i", number))
    with pytest.raises(WireError, match="names"):
        CallCodec(SCHEMA).receive(right)


def test_a_call_that_is_cut_off_is_an_error(ends):
    left, right = ends
    left.sendall(struct.pack("<i", 0) + b"123")
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match="closed"):
        CallCodec(SCHEMA).receive(right)


def test_messages(ends):
    left, right = ends
    send_message(left, {"a": [1, "ü"]})
    assert receive_message(right) == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (struct.pack("!I", MAX_MESSAGE_BYTES + 1), "at most"),
        (struct.pack("!I", 4) + b"\x80\x04N.", "must be JSON"),
        (struct.pack("!I", 2) + b"[]", "JSON object"),
        (b"GET / HTTP/1.1\r\n\r\n", "at most"),
        (struct.pack("!I", 100) + json.dumps({}).encode(), "closed"),
    ],
)
def test_what_is_no_message_is_an_error(ends, data: bytes, what: str):
    left, right = ends
    left.sendall(data)
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=what):
        receive_message(right)
