"""The invariants of the engine's parts that are host code, which their docstrings state."""

import itertools

from jsg.byte_cache import ByteCache
from jsg.engine.front.prefix_index import PrefixIndex
from jsg.engine.front.routing import Router
from jsg.engine.grammars.store import GrammarStore


def check_store(store: GrammarStore) -> None:
    assert all(each.key == key and (each.is_known or each.num_users) for key, each in store._grammars.items())
    assert store._table_bytes == sum(len(each.tables) for each in store._grammars.values())
    assert store._machine_bytes == sum(each.num_bytes for each in store._grammars.values())
    assert store._machines == {key: each for key, each in store._grammars.items() if each.machine is not None}


def check_index(index: PrefixIndex) -> None:
    assert len(index._times) <= index._max_blocks
    assert all(a <= b for a, b in itertools.pairwise(index._times.values()))
    assert all(count > 0 for count in index._held.values())
    known = {*index._times, *index._held, *index._stored}
    assert known == {block for block, mask in index._holders._masks.items() if mask >> index._engine & 1}


def check_router(router: Router) -> None:
    """Asserts the invariants of all indices, and that no load is negative."""
    for lane in router._lanes:
        check_index(lane.index)
    assert router._loads.min(initial=0) >= 0


def check_bytes(cache: ByteCache) -> None:
    assert cache.num_bytes == sum(map(cache._size_of, cache._values.values()))
    assert cache.num_bytes <= cache._max_bytes or len(cache._values) == 1
