"""A cache that is bounded by bytes."""

from jsg.byte_cache import ByteCache
from tests.engine.integrity import check_bytes


def test_the_least_recently_used_are_dropped_and_never_the_newest():
    cache = ByteCache[str, int](100, int)
    assert [cache.put(key, 40) for key in "abc"] == [[], [], ["a"]]
    assert "a" not in cache and cache.get("a") is None
    assert cache.get("b") == 40 and cache.put("d", 40) == ["c"]
    check_bytes(cache)
    assert cache.put("huge", 1000) == ["b", "d"] and cache.get("huge") == 1000
    check_bytes(cache)
    assert cache.put("e", 1) == ["huge"]
    assert cache.put("e", 99) == [] and cache.num_bytes == 99
    check_bytes(cache)
