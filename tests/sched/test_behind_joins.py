"""What follows joined branches is cached: a path of its own, in a namespace that names branches and positions."""

import pytest

from jsg.types import Request
from tests.sched.simulated import SimulatedEngine
from tests.sched.test_joined import joined
from tests.sched.test_scheduler import make_engine, make_request


def run(engine: SimulatedEngine, *requests: Request) -> list[int]:
    """Runs requests at the same time; how many tokens of each were cached."""
    for request in requests:
        engine.add(request)
    engine.run_until_idle()
    return [engine.answers[request.rid].cached_tokens for request in requests]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("jumps", [(), ((3, 2), (18, 4), (32, 3), (33, 2), (34, 1))])
def test_what_is_behind_a_join_is_found_by_the_next_call(page_size: int, jumps: tuple[tuple[int, int], ...]):
    """Three calls of one stream: each finds all tokens but the last, of the prompt and of the answer before it."""
    engine = make_engine(num_pages=400, context_length=200, page_size=page_size)
    suffix, num_cached = (7, 1), [0]
    for number in range(3):
        request = joined(f"call {number}", suffix=suffix, max_new=9, position_jumps=jumps)
        (cached,) = run(engine, request)
        ends_of_branches = 0 if page_size == 1 else 1 + 3  # tokens that fill no page are always computed
        assert number == 0 or cached == num_cached[-1] - ends_of_branches
        suffix += (*engine.answers[request.rid].tokens, 5)
        num_cached.append((32 + len(suffix) - 2) // page_size * page_size)
    engine.check_answers()


def test_forks_behind_a_join_share_what_is_behind_it():
    """In the step that computes it, and later."""
    engine = make_engine(num_pages=400, context_length=200, max_running=4, chunk=64)
    common = (7, 1, 2, 3, 4, 5, 6)
    run(engine, joined("before", suffix=common[:2], max_new=0))
    assert run(engine, *(joined(f"fork {n}", suffix=(*common, n, n)) for n in range(3))) == [34, 39, 39]
    assert run(engine, joined("late", suffix=(*common, 6, 6))) == [39]
    engine.check_answers()


def test_pages_that_are_copied_from_branches_are_shared_by_joined_requests():
    """Of 8 pages before the suffix, 4 are the first branch's. Another suffix goes on within the last one."""
    engine = make_engine(num_pages=100, context_length=200, page_size=4)
    branches = ((1, 2), (3, 4, 5, 6, 7, 1, 2, 3), (5, 5, 5))  # the prompt ends at 29, the first branch at 18
    for rid, suffix, num_copied in (("first", (7,) * 8, 13), ("other", (6,) * 8, 1), ("again", (7,) * 8, 0)):
        engine.batches.clear()
        engine.add(joined(rid, branches=branches, suffix=suffix))
        engine.run_until_idle()
        assert sum(len(source) for batch in engine.batches for source, _ in batch.copies) == num_copied
    assert engine.answers["again"].cached_tokens == 36 - 2 - 3, "but for the ends of the first and the last branch"
    engine.check_answers()


def test_a_joined_prompt_that_generates_nothing_and_is_cached_needs_no_step():
    engine = make_engine()
    run(engine, joined("first", max_new=0))
    engine.batches.clear()
    assert run(engine, joined("again", max_new=0)) == [34] and not engine.batches
    engine.check_answers()


def test_behind_other_branches_nothing_is_shared():
    """Other tokens, another border or order of branches, another position, an empty branch, another namespace."""
    engine = make_engine(num_pages=400, context_length=200)
    branches, suffix = ((1, 2, 3), (1, 2)), (7, 1, 2)
    run(engine, joined("first", (3, 4), branches, suffix))
    others = {
        "stem": joined("stem", (3, 5), branches, suffix),
        "tokens": joined("tokens", (3, 4), ((1, 2, 3), (1, 3)), suffix),
        "border": joined("border", (3, 4), ((1, 2), (3, 1, 2)), suffix),
        "split": joined("split", (3, 4), ((1, 2), (3,), (1, 2)), suffix, position_jumps=((4, 2),)),  # equal positions
        "cut": joined("cut", (3, 4), ((1,), (2, 3), (1, 2)), suffix, position_jumps=((3, 1),)),  # again equal ones
        "order": joined("order", (3, 4), branches[::-1], suffix),
        "jump": joined("jump", (3, 4), branches, suffix, position_jumps=((4, 1),)),
        "behind": joined("behind", (3, 4), branches, suffix, position_jumps=((7, 1),)),
        "salt": joined("salt", (3, 4), branches, suffix, namespace="salt"),
    }
    for rid, request in others.items():
        assert run(engine, request)[0] <= request.joined[-1], rid
    jumps = ((7, 1), (8, 1))
    assert run(engine, joined("both", (3, 4), branches, suffix, position_jumps=jumps)) == [8]
    assert run(engine, joined("again", (3, 4), branches, suffix)) == [9]
    engine.check_answers()


def test_what_is_behind_a_join_is_locked_while_it_is_used_and_evicted_afterwards():
    engine = make_engine(num_pages=48)
    run(engine, joined("whole"))
    num_before, num_behind = 16 + 5 + 1 + 8, 2 + 2  # the second branch begins as the first; an answer's last never ran
    assert engine.cache.num_evictable == num_before + num_behind
    engine.add(joined("again", max_new=4))
    engine.step()
    assert engine.cache.num_protected == num_before + 2, "its prompt, and not the answer to the same one"
    engine.run_until_idle()
    run(engine, make_request("other", (5,) * 40, max_new=1))
    assert run(engine, joined("late")) < [33], "some of it was evicted"
    engine.check_answers()
