"""The invariants of the scheduler and of its parts, which their docstrings state."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from jsg.sched.joined import JoinedRequests
from jsg.sched.key_heap import Key
from jsg.sched.lifecycle import placement
from jsg.sched.longest import LongestFirst
from jsg.sched.policy import Order
from jsg.sched.request import Placement, RequestState, RunningRequest
from jsg.sched.scheduler import Scheduler
from jsg.sched.vision_store import NUM_FIXED_ROWS, VisionStore
from jsg.sched.waiting import WaitingQueue
from tests.cache.integrity import check_allocator


def check_scheduler(scheduler: Scheduler) -> None:
    """Asserts the invariants of the scheduler and of all its parts."""
    states = scheduler._requests
    states.table.check_integrity()
    check_waiting(states.waiting)
    _check_joins(states.joins)
    _check_waits(scheduler)
    check_vision(states.table.vision, map(placement, states.running))
    branches = [branch for join in states.joins for branch in join.branches]
    held = [*states.holds.values()]
    requests = [*states.live.values(), *branches, *held]
    for state, num_there in (
        (RequestState.WAITING, len(states.waiting)),
        (RequestState.JOINING, len(states.joins)),
        (RequestState.RUNNING, len(states.running)),
        (RequestState.KEPT, len(states.holds) + states.joins.num_kept),
    ):
        assert sum(r.state is state for r in requests) == num_there, f"a request that is {state.value} is lost"
    begun = {join.whole for join in states.joins if join.cached}
    never = [r for r in states.live.values() if r.admission is None and r not in begun]
    assert list(states.unadmitted) == never, "a request that was never admitted is lost"
    for running in requests:
        assert (running.watch is not None) == (running.state is RequestState.WAITING)
        assert (running.place is not None) == (running.state is RequestState.RUNNING)
        assert (running.kept is not None) == (running.state is RequestState.KEPT)
    assert all(r.state is RequestState.RUNNING for r in states.running)
    assert all(r.state is RequestState.KEPT for r in held)
    assert states.num_holds == len(held) + sum(r.request.hold for r in states.live.values())
    num_placed = sum(len(placement(r).before) for r in states.running)
    assert states.table.num_kept == len(held) + states.joins.num_kept + num_placed
    rows = [placement(r).row for r in states.running]
    assert len(set(rows)) == len(rows), "two requests share a row"


def _check_waits(scheduler: Scheduler) -> None:
    waits, live = scheduler._requests.waits, scheduler._requests.live.values()
    assert waits._waits.keys() == {r for r in live if r.state in (RequestState.WAITING, RequestState.JOINING)}
    assert waits._own == {r: wait.own for r, wait in waits._waits.items() if wait.own is not None}
    assert sum(scheduler.waits.values()) == scheduler.num_waiting and min(scheduler.waits.values()) >= 0
    unfinished = [
        j for j in scheduler.joins if j.num_made and j.whole not in scheduler.joins.ready | scheduler.joins.fresh
    ]
    begun = {j.whole for j in unfinished if any(b.state is not RequestState.WAITING for b in j.branches)}
    assert begun <= waits._joining <= {join.whole for join in unfinished}


def _check_joins(joins: JoinedRequests) -> None:
    computed = {join.whole for join in joins if len(join.computed) == len(join.spans)}
    assert joins.ready | joins.fresh == computed and not joins.ready & joins.fresh
    for join in joins:
        assert join.whole.state is RequestState.JOINING
        assert {*join.pending, *join.computed} == set(range(join.num_made)), "a branch is lost"
        assert all(b.state in (RequestState.WAITING, RequestState.RUNNING) for b in join.pending.values())
        assert all(b.state is RequestState.KEPT and b.kept is not None for b in join.computed.values())
        is_parked = join.whole in joins._parked
        assert bool(join.num_made) != is_parked
        has_all = join.num_made == len(join.spans)
        assert is_parked or has_all or any(b.state is RequestState.WAITING for b in join.pending.values())


def check_waiting(queue: WaitingQueue) -> None:
    """Asserts the invariants of the waiting queue."""
    waiting, order = queue._by_arrival.values(), queue._order
    first = queue.first()
    keys = keys_of(order, waiting)
    assert first is min(keys, key=lambda running: keys[running], default=None), "another request is the first"
    if isinstance(order, LongestFirst):
        assert order._num_waiting == len(queue) == sum(len(level.waiting) for level in order._priorities.values())
        assert all(level.waiting for level in order._priorities.values()), "a priority without requests is kept"


def keys_of(order: Order, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
    """The key of each request, from scratch."""
    keys: dict[RunningRequest, Key] = {}
    for running in waiting:
        assert running.watch is not None and running.watch.group is not None
        usable = order._cache.usable_of(running.watch.group) if isinstance(order, LongestFirst) else 0
        keys[running] = -running.request.priority, -usable, running.arrival
    return keys


def check_vision(store: VisionStore, places: Iterable[Placement]) -> None:
    """Asserts the invariants between steps, for requests with these placements."""
    assert store._pins.keys() <= set(places), "a request that does not run has a pin"
    check_allocator(store._rows)
    used = [row for stored in store._stored.values() for row in stored.rows.reshape(-1).tolist()]
    assert len(used) == len(set(used)) == store.num_used_rows, "a row has two owners, or none"
    assert not store._rows.is_free(np.array(used, np.int32) - (NUM_FIXED_ROWS - 1)).any(), "a row in use is free"
    assert store._stored.keys() >= {*store._pins.values(), *store._planned}, "a pinned or planned item has no rows"
    assert not store._encodings and not store._planned, "what a step needs encoded was not taken"
    users = Counter(key for keys in store._items.values() for key in keys)
    assert users == store._users and users.keys() == store._pixels.keys(), "pixels that nobody needs are kept"
    assert store.num_pixel_bytes == sum(pixels.nbytes for pixels in store._pixels.values())
