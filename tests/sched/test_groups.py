"""Groups of decoding requests: against all partitions, in random traffic, and in cases that can be said beforehand."""

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jsg.cache.node import INT_BYTES, Node, Root
from jsg.cache.radix import PrefixLock
from jsg.kernels_pallas.tile import GROUP_TILE, MIN_GROUP, MIN_SHARED_TOKENS
from jsg.sched import admission, groups
from jsg.sched.batch import PrefixGroup
from jsg.sched.buckets import make_buckets
from jsg.sched.groups import PrefixGrouping, find_groups
from jsg.sched.request import Placement
from jsg.types import Request, SamplingParams
from tests.sched import test_traffic
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_traffic import Traffic, check_wild, run_traffic
from tests.sched.token_model import VOCAB, TokenModel

# The partition.


class Tree:
    """Nodes without tokens: only how many pages they have counts."""

    def __init__(self) -> None:
        self.root = Root("")
        self.num_pages: dict[Node, int] = {self.root: 0}
        self.places: list[Placement] = []

    def add(self, parent: Node, num_pages: int, num_requests: int) -> Node:
        node = Node(parent, b"", bytes(INT_BYTES * num_pages), serial=len(self.num_pages), last_used=0)
        parent.children[len(self.num_pages).to_bytes(4, "big")] = node
        self.num_pages[node] = self.num_pages[parent] + num_pages
        for _ in range(num_requests):
            self.places.append(Placement(0, PrefixLock(node), self.num_pages[node], 1 << 20, is_prefilling=False))
        above = node
        while above.parent is not None:
            above.num_locks += num_requests
            above = above.parent
        return node


def random_tree(rng: random.Random, *, is_nested: bool) -> Tree:
    tree = Tree()
    for _ in range(rng.randrange(1, 10)):
        is_first = not is_nested or rng.random() < 0.3
        parent = tree.root if is_first else rng.choice(list(tree.num_pages)[-4:])
        num_pages = rng.choice([30, 300, 400, 1000]) if parent is tree.root else rng.choice([1, 10, 100, 300, 1000])
        tree.add(parent, num_pages, rng.choice([0, 1, 2, 3, 4, 5, 8, rng.randrange(40)]))
    rng.shuffle(tree.places)
    return tree


def num_spared(num_members: int) -> int:
    return num_members - -(-num_members // GROUP_TILE)


def most_saved(tree: Tree) -> int:
    """Reads of a token that the best of all partitions saves: for every number of requests that a node leaves over."""
    own = Counter(place.lock.node for place in tree.places)

    def solve(node: Node) -> dict[int, int]:
        best = {own[node]: 0}
        for child in node.children.values():
            sums: dict[int, int] = {}
            for left, saved in solve(child).items():
                for others, more in best.items():
                    sums[left + others] = max(sums.get(left + others, 0), saved + more)
            best = sums
        if tree.num_pages[node] >= MIN_SHARED_TOKENS:
            for left, saved in list(best.items()):
                for taken in range(MIN_GROUP, left + 1):
                    total = saved + num_spared(taken) * tree.num_pages[node]
                    best[left - taken] = max(best.get(left - taken, 0), total)
        return best

    return max(solve(tree.root).values())


def saved_by(found: tuple[PrefixGroup, ...]) -> int:
    return sum(num_spared(len(group.members)) * group.num_tokens for group in found)


def common_pages(tree: Tree, members: tuple[int, ...]) -> int:
    """Pages of the deepest node that is above all members."""
    paths = []
    for member in members:
        node, path = tree.places[member].lock.node, []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        paths.append(path)
    return max(tree.num_pages[node] for node in [*paths[0], tree.root] if all(node in path for path in paths[1:]))


def check_partition(tree: Tree, found: tuple[PrefixGroup, ...]) -> None:
    members = [member for group in found for member in group.members]
    assert len(set(members)) == len(members)
    for group in found:
        assert len(group.members) >= MIN_GROUP and list(group.members) == sorted(group.members)
        assert MIN_SHARED_TOKENS <= group.num_tokens <= common_pages(tree, group.members)
        assert len(group.members) % GROUP_TILE != 1, "one member has a tile for itself"
    assert [group.members[0] for group in found] == sorted(group.members[0] for group in found)


@pytest.mark.parametrize("seed", range(4))
def test_the_groups_save_nearly_as_much_as_the_best_partition(seed: int):
    rng = random.Random(seed)
    ratios = []
    for _ in range(100):
        tree = random_tree(rng, is_nested=True)
        found = find_groups(tree.places, 1)
        check_partition(tree, found)
        best = most_saved(tree)
        assert saved_by(found) <= best
        if best:
            ratios.append(saved_by(found) / best)
    assert len(ratios) > 50 and min(ratios) > 0.8 and float(np.mean(ratios)) > 0.99


def test_prefixes_that_are_not_nested_are_partitioned_as_well_as_can_be():
    rng = random.Random(0)
    for _ in range(200):
        tree = random_tree(rng, is_nested=False)
        found = find_groups(tree.places, 1)
        check_partition(tree, found)
        assert saved_by(found) == most_saved(tree)


@pytest.mark.parametrize(
    ("num_requests", "num_pages", "page_size", "expected"),
    [
        (MIN_GROUP, 256, 1, [(MIN_GROUP, 256)]),
        (MIN_GROUP - 1, 5000, 1, []),
        (MIN_GROUP, 255, 1, []),
        (MIN_GROUP, 16, 16, [(MIN_GROUP, 256)]),
        (MIN_GROUP, 15, 16, []),
        (MIN_GROUP, 5, 60, [(MIN_GROUP, 300)]),  # 4 pages of 60 tokens would be too few
        (MIN_GROUP, 4, 60, []),
        (GROUP_TILE + 1, 300, 1, [(GROUP_TILE, 300)]),  # the last would have a tile for itself
        (GROUP_TILE + 2, 300, 1, [(GROUP_TILE + 2, 300)]),
    ],
)
def test_who_is_worth_a_group(num_requests: int, num_pages: int, page_size: int, expected: list[tuple[int, int]]):
    tree = Tree()
    tree.add(tree.root, num_pages, num_requests)
    found = find_groups(tree.places, page_size)
    assert [(len(group.members), group.num_tokens) for group in found] == expected


def test_a_deep_group_is_kept_where_that_saves_more_and_dissolved_where_it_does_not():
    for own_pages, expected in ((3000, [(4, 300), (4, 3300)]), (50, [(8, 300)])):
        tree = Tree()
        shared = tree.add(tree.root, 300, 4)
        tree.add(shared, own_pages, 4)
        found = find_groups(tree.places, 1)
        assert [(len(group.members), group.num_tokens) for group in found] == expected


def test_who_has_no_place_in_a_full_tile_joins_those_above():
    tree = Tree()
    above = tree.add(tree.root, 300, MIN_GROUP - 1)
    tree.add(above, 10, GROUP_TILE + 1)
    found = find_groups(tree.places, 1)
    assert [(len(group.members), group.num_tokens) for group in found] == [(MIN_GROUP, 300), (GROUP_TILE, 310)]


def test_the_order_of_members_is_that_of_the_batch():
    tree = Tree()
    left, right = (tree.add(tree.root, 300, 0) for _ in range(2))
    for number in range(10):
        tree.add(right if number % 2 else left, 20, 1)
    assert find_groups(tree.places, 1) == (PrefixGroup((0, 2, 4, 6, 8), 300), PrefixGroup((1, 3, 5, 7, 9), 300))


def test_locks_of_requests_that_do_not_decode_make_no_group():
    tree = Tree()
    tree.add(tree.root, 1000, 10)
    assert find_groups(tree.places[:3], 1) == ()
    assert find_groups([Placement(1, PrefixLock(Root("")), 0, 5)] * 4, 1) == (), "nothing is cached of them"


# The scheduler.


def make_engine(**changes: Any) -> SimulatedEngine:
    shape = EngineShape(num_pages=3000, max_running=8, chunk=1000, context_length=400, shares_prefixes=True)
    return SimulatedEngine(dataclasses.replace(shape, **changes), TokenModel(broken_every=10**9))


PREFIX = tuple(number % 5 for number in range(300))


def make_request(rid: str, tokens: tuple[int, ...], max_new: int = 8) -> Request:
    return Request(rid=rid, input_ids=tokens, sampling=SamplingParams(max_new_tokens=max_new, ignore_eos=True))


def shared_by(engine: SimulatedEngine) -> list[tuple[set[str], int]]:
    """Which requests share how many tokens in the last planned step."""
    batch = engine.batches[-1]
    rids = [entry.running.request.rid for entry in batch.entries]
    return [({rids[member] for member in group.members}, group.num_tokens) for group in batch.groups]


def test_requests_join_and_leave_their_group(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    num_found = Counter[int]()

    def counted(places: list[Placement], page_size: int) -> tuple[PrefixGroup, ...]:
        num_found[len(places)] += 1
        return find_groups(places, page_size)

    monkeypatch.setattr(groups, "find_groups", counted)
    for number, max_new in enumerate((8, 8, 8, 8, 20)):
        engine.add(make_request(f"r{number}", (*PREFIX, 5, number), max_new))
    engine.add(make_request("other", (6, *PREFIX), 20))
    engine.step()
    assert not shared_by(engine), "a step that prefills reads no prefix for a group"
    everybody = {f"r{number}" for number in range(5)}
    for _ in range(3):
        engine.step()
        assert shared_by(engine) == [(everybody, 301)]
    assert num_found == {6: 1}, "the same requests have the same groups"
    engine.abort("r0")
    engine.step()
    assert shared_by(engine) == [(everybody - {"r0"}, 301)] and num_found == {6: 1, 5: 1}
    engine.add(make_request("late", (*PREFIX, 6, 6), 20))
    engine.step()
    assert not shared_by(engine)
    engine.step()
    assert shared_by(engine) == [(everybody - {"r0"} | {"late"}, 300)], "an edge was split: there are fewer in common"
    while engine.answers["r1"].finish is None:
        engine.step()
    engine.step()
    assert not shared_by(engine), "three are left"
    engine.run_until_idle()
    engine.check_answers()


def test_equal_requests_share_all_that_is_in_the_tree():
    engine = make_engine(page_size=16, num_pages=400)
    for number in range(5):
        engine.add(make_request(f"r{number}", PREFIX[:288]))
    engine.step()
    engine.step()
    assert shared_by(engine) == [({f"r{number}" for number in range(5)}, 288)]
    engine.run_until_idle()
    engine.check_answers()


def test_retracted_members_leave_their_group():
    engine = make_engine(num_pages=340, context_length=340, chunk=400, conservativeness=0.02)
    for number in range(6):
        engine.add(make_request(f"r{number}", (*PREFIX[:298], number), 30))
    seen = []
    while engine.has_work:
        engine.step()
        seen += [len(members) for members, _ in shared_by(engine)]
    assert engine.scheduler.totals.num_retracts > 0
    assert {6, 5, 4} <= set(seen), "members leave one by one"
    engine.check_answers()


def family_prompt(rng: random.Random, longest: int) -> tuple[int, ...]:
    """One of two prefixes, sometimes the longer one of their members, and a few tokens of its own."""
    family = [rng.randrange(2)] * rng.choice([3, 3, 8])
    return tuple([*family, *rng.choices(range(VOCAB), k=rng.randrange(1, 4))][:longest])


@pytest.mark.parametrize("num_runs", [7, pytest.param(50, marks=pytest.mark.slow)])
def test_groups_of_random_traffic_read_what_their_members_would(num_runs: int, monkeypatch: pytest.MonkeyPatch):
    """The simulated device looks at every group: see `SimulatedDevice`."""
    monkeypatch.setattr(admission, "DECAY_STEPS", 5)
    monkeypatch.setattr(groups, "MIN_SHARED_TOKENS", 3)
    monkeypatch.setattr(test_traffic, "random_prompt", family_prompt)
    happened: Counter[str] = Counter()
    rng = random.Random(0)
    for seed in range(num_runs):
        shape = EngineShape(
            page_size=rng.choice([1, 1, 2, 4]),
            num_pages=rng.choice([20, 60, 200]),
            context_length=rng.choice([24, 40]),
            max_running=rng.choice([8, 24, 24]),
            chunk=24,
            overlaps=seed % 2 == 0,
            has_cache=rng.random() < 0.9,
            conservativeness=0.1,
            shares_prefixes=True,
        )
        engine = run_traffic(shape, Traffic(seed, num_requests=60, burst=20, abort_rate=0.1))
        happened["groups"] += sum(len(batch.groups) for batch in engine.batches)
        happened["several"] += sum(len(batch.groups) > 1 for batch in engine.batches)
        happened["retracts"] += engine.scheduler.totals.num_retracts
        happened["evictions"] += engine.cache.stats().evicted_tokens
    check_wild(happened, ("groups", "several", "retracts", "evictions"), 10)


def test_a_trace_replays_with_the_same_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "MIN_SHARED_TOKENS", 3)
    monkeypatch.setattr(test_traffic, "random_prompt", family_prompt)
    shape = EngineShape(num_pages=400, max_running=24, chunk=24, shares_prefixes=True, conservativeness=0.1)

    def record(seed: int) -> list[object]:
        engine = run_traffic(shape, Traffic(seed, num_requests=30, burst=30, abort_rate=0.1))
        return [batch.groups for batch in engine.batches]

    first = record(1)
    assert sum(map(bool, first)) > 5 and first == record(1) != record(2)


@pytest.mark.parametrize("changes", [{"shares_prefixes": False}, {"has_decode": False}, {"has_cache": False}])
def test_without_room_for_groups_or_a_tree_there_are_none(changes: dict[str, bool]):
    engine = make_engine(num_pages=4000, **changes)
    for number in range(5):
        engine.add(make_request(f"r{number}", (*PREFIX, number)))
    engine.run_until_idle()
    assert len(engine.batches) > 5 and not any(batch.groups for batch in engine.batches)


def test_the_same_places_are_not_grouped_again():
    tree = Tree()
    tree.add(tree.root, 300, 6)
    grouping = PrefixGrouping(1)
    first = grouping.update(list(tree.places))
    assert len(first) == 1 and grouping.update(list(tree.places)) is first
    assert grouping.update(tree.places[1:]) == (PrefixGroup((0, 1, 2, 3, 4), 300),)
    assert grouping.update([]) == ()


# Shapes.


def test_the_default_of_a_gpu_has_at_most_24_forward_programs():
    buckets = make_buckets(256, 8192, row_multiple=8, shares_prefixes=True)
    assert len(set(buckets.all)) == len(buckets.all) <= 24, "design: at most 24 forward executables"
    assert [(key.num_rows, key.num_groups) for key in buckets.grouped] == [(32, 8), (64, 16), (128, 32), (256, 64)]
    assert set(buckets.grouped) <= set(buckets.all) and not any(key.num_groups for key in buckets.decode)


def test_shapes_with_groups_exist_only_where_there_can_be_one():
    assert make_buckets(256, 8192).grouped == () == make_buckets(MIN_GROUP - 1, 64, shares_prefixes=True).grouped
    assert [key.num_rows for key in make_buckets(40, 64, shares_prefixes=True).grouped] == [32, 40]


@pytest.mark.parametrize("num_requests", [4, 7, 32, 33, 100, 255, 256])
def test_every_partition_fits_the_shape_that_is_picked(num_requests: int):
    buckets = make_buckets(256, 8192, shares_prefixes=True)
    key = buckets.pick_grouped(num_requests)
    assert key is not None and key == min(key for key in buckets.grouped if key.num_tokens >= num_requests)
    rng = random.Random(num_requests)
    for size in (4, 5, 7, 17, 18, 19, 33, num_requests):
        tree = Tree()
        for start in range(0, num_requests, size):
            tree.add(tree.root, 256 + rng.randrange(100), min(size, num_requests - start))
        found = find_groups(tree.places, 1)
        assert sum(-(-len(group.members) // GROUP_TILE) for group in found) <= key.num_groups
    assert buckets.pick_grouped(257) is None
