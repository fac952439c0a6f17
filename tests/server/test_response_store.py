"""Stored responses: bounded in number, bytes and age, and each tenant's own."""

import pytest

from jsg.server.openai import response_store
from jsg.server.openai.response_store import ResponseStore, StoredResponse, Turn, compact


def response(name: str, text: str = "") -> StoredResponse:
    return StoredResponse(f"resp_{name}", b"{}", (Turn(f"msg_{name}_0", "user", text), Turn(f"msg_{name}", "user", "")))


def names(store: ResponseStore, tenant: str = "") -> list[str]:
    return [name for name in "abcdef" if store.get(tenant, f"resp_{name}")]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(response_store.time, "monotonic", lambda: now[0])
    return now


def test_what_is_put_in_is_found_by_its_own_tenant_only():
    store = ResponseStore(2)
    assert store.put("mine", response("a")) and store.get("mine", "resp_a") == response("a")
    assert store.get("mine", "resp_b") is None and store.get("other", "resp_a") is None
    assert store.turn("other", "msg_a") is None and not store.remove("other", "resp_a")
    assert store.remove("mine", "resp_a") and not store.remove("mine", "resp_a")
    assert store.get("mine", "resp_a") is None and store.num_bytes("mine") == 0


@pytest.mark.parametrize(
    ("item_id", "is_there"),
    [("msg_a", True), ("msg_a_0", True), ("msg_a_1", False), ("msg_b", False), ("resp_a", False)],
)
def test_turns_are_found_by_their_names(item_id, is_there):
    store = ResponseStore()
    store.put("", response("a"))
    turn = store.turn("", item_id)
    assert (turn is not None) == is_there
    assert turn is None or turn.item_id == item_id


def test_the_least_recently_used_gives_way():
    store = ResponseStore(max_responses=3)
    for name in "abc":
        store.put("", response(name))
    store.get("", "resp_a")
    store.put("", response("d"))
    assert names(store) == ["a", "c", "d"]


def test_bytes_are_bounded():
    size = response("a", "x" * 1000).num_bytes
    store = ResponseStore(max_bytes=3 * size)
    for name in "abcde":
        assert store.put("", response(name, "x" * 1000)) and store.num_bytes("") <= 3 * size
    assert names(store) == ["c", "d", "e"]
    assert store.num_bytes("") == 3 * size and not store.put("", response("f", "x" * 20_000))
    assert names(store) == ["c", "d", "e"], "what does not fit pushes nothing out"


def test_everything_that_is_kept_is_counted():
    empty = response("a").num_bytes
    assert response("a", "x" * 1000).num_bytes == empty + 1000
    tokens = Turn("msg_a", "assistant", "", compact(range(1000)))
    assert 4000 <= tokens.num_bytes - Turn("msg_a", "assistant", "").num_bytes <= 4200
    long = StoredResponse("resp_a", b"x" * 1000, ())
    assert long.num_bytes - StoredResponse("resp_a", b"", ()).num_bytes == 1000


def test_tenants_have_equal_shares_of_the_room():
    store = ResponseStore(2, max_responses=4)
    store.put("mine", response("a"))
    for name in "bcdef":
        store.put("other", response(name))
    assert names(store, "mine") == ["a"] and names(store, "other") == ["e", "f"]


def test_old_responses_are_forgotten(clock):
    store = ResponseStore(max_age_s=100)
    store.put("", response("a"))
    clock[0] += 60
    store.put("", response("b"))
    store.get("", "resp_a")
    clock[0] += 60
    assert names(store) == ["b"], "however recently it was used"
    clock[0] += 60
    assert names(store) == []
    assert store.num_bytes("") == 0
