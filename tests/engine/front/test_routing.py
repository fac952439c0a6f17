"""Who gets a request: by prefix, by load, and never one that was not offered."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.front.prefix_index import BLOCK_TOKENS, prefix_path
from jsg.engine.front.routing import FIRST_OUTPUT_LEN, OUTPUT_WEIGHT, Routed, Router
from jsg.types import Request, SamplingParams
from tests.engine.integrity import check_router

POOL = 100_000
PREFIX = tuple(range(1024))


def request(ids: tuple[int, ...], max_new_tokens: int = 16, **fields) -> Request:
    return Request(rid="r", input_ids=ids, sampling=SamplingParams(max_new_tokens=max_new_tokens), **fields)


def own(seed: int, size: int = 64) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(50_000) for _ in range(size))


def serve(router: Router, routed: Routed, cached_tokens: int | None = None, output: tuple[int, ...] = ()) -> None:
    """A request from its first output to its end."""
    router.begin(routed, routed.num_matched if cached_tokens is None else cached_tokens)
    router.end(routed, output)


def loads(router: Router) -> list[int]:
    """The load of each engine, in prompt tokens."""
    return router._loads.tolist()


class TestPrefix:
    def test_a_known_prefix_is_followed(self):
        router = Router([POOL] * 3)
        serve(router, first := router.route(request(PREFIX), [0, 1, 2]))
        for seed in range(20):
            routed = router.route(request(PREFIX + own(seed)), [0, 1, 2])
            assert (routed.engine, routed.num_matched) == (first.engine, len(PREFIX))
            serve(router, routed)
        assert loads(router) == [0, 0, 0]

    def test_answers_of_one_prompt_meet_before_any_has_begun(self):
        router = Router([POOL] * 2)
        assert len({router.route(request(PREFIX), [0, 1]).engine for _ in range(8)}) == 1

    def test_the_longest_wins(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX[:512]), [0]))
        serve(router, router.route(request(PREFIX), [1]))
        assert router.route(request(PREFIX[:512] + own(1)), [0, 1]).num_matched == 512
        assert router.route(request(PREFIX + own(1)), [0, 1]).engine == 1

    def test_a_chat_goes_where_its_answer_was_made(self):
        router = Router([POOL] * 2)
        answer = own(7, 100)
        for engine in (0, 1):  # both know the beginning
            serve(router, router.route(request(PREFIX), [engine]))
        serve(router, router.route(request(PREFIX + own(1)), [1]), output=answer)
        routed = router.route(request(PREFIX + own(1) + answer + own(2)), [0, 1])
        assert routed.engine == 1
        assert routed.num_matched == (len(PREFIX) + 64 + 99) // BLOCK_TOKENS * BLOCK_TOKENS

    def test_what_follows_a_join_goes_where_the_join_was_made(self):
        router = Router([POOL] * 2)
        prompt, at, answer = (*PREFIX, *own(1), *own(2), *own(3)), (1024, 1088, 1152), own(7, 100)
        for engine in (0, 1):  # both know prefix and branches
            serve(router, router.route(request(prompt[:1153], joined=at), [engine]))
        serve(router, router.route(request(prompt, joined=at), [1]), output=answer)
        routed = router.route(request(prompt + answer + own(4), joined=at), [0, 1])
        assert routed.engine == 1 and routed.num_matched == 1152 + (64 + 99) // BLOCK_TOKENS * BLOCK_TOKENS

    def test_branches_follow_the_prefix_that_is_held_and_the_joined_prompt_follows_them(self):
        router = Router([POOL] * 2)
        hold = dataclasses.replace(request(PREFIX, 0), hold=True)
        held = router.route(hold, [0, 1])
        router.begin(held, 0)
        assert loads(router) == [0, 0], "a hold is no work once it is there"
        branches = [own(seed, 96) for seed in range(3)]
        for branch in branches:
            routed = router.route(request(PREFIX + branch), [0, 1])
            assert routed.engine == held.engine
            serve(router, routed)
        starts = (len(PREFIX), len(PREFIX) + 96, len(PREFIX) + 192, len(PREFIX) + 288)
        joined = request((*PREFIX, *branches[0], *branches[1], *branches[2], 1), joined=starts)
        assert router.route(joined, [0, 1]).num_matched == len(PREFIX) + 288

    def test_a_hold_is_followed_however_much_comes_between_until_it_ends(self):
        router = Router([4096] * 2)
        held = router.route(dataclasses.replace(request(PREFIX, 0), hold=True), [0])
        router.begin(held, 0)
        for seed in range(40):
            routed = router.route(request(own(seed, 1000)), [0])
            serve(router, routed, output=own(-seed, 100))
        serve(router, router.route(request(own(39, 1000)), [0]), cached_tokens=0)  # all is evicted that can be
        branch = router.route(request(PREFIX + own(1)), [0, 1])
        assert (branch.engine, branch.num_matched) == (0, len(PREFIX))
        router.end(branch, ())
        router.end(held, ())
        router.forget(0)
        assert router.route(request(PREFIX + own(1)), [0, 1]).num_matched == 0, "it is known as others are"
        check_router(router)

    def test_other_namespaces_are_other_prefixes(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX), [0]))
        assert router.route(request(PREFIX, namespace="b"), [0, 1]).num_matched == 0

    def test_an_engine_without_a_cache_is_chosen_by_load(self):
        router = Router([0, 0])
        engines = [router.route(request(PREFIX), [0, 1]).engine for _ in range(10)]
        assert Counter(engines) == {0: 5, 1: 5}


class TestLoad:
    def test_a_hot_prefix_spreads_and_stays_on_both(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX), [0]))
        live = [router.route(request(PREFIX + own(seed)), [0, 1]) for seed in range(200)]
        engines = Counter(routed.engine for routed in live)
        assert abs(engines[0] - engines[1]) <= 30, engines
        assert [routed.reason for routed in live].count("overload") == 1, "from then on it is there as well"
        assert router.routed == {**dict.fromkeys(router.routed, 0), (0, "load"): 1}, "nothing else has begun"
        for routed in live:
            serve(router, routed)
        assert router.routed[1, "overload"] == 1
        assert loads(router) == [0, 0]

    def test_a_lukewarm_one_does_not(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX), [0]))
        live: list[Routed] = []
        for seed in range(208):
            live.append(router.route(request(PREFIX + own(seed)), [0, 1]))
            if len(live) > 8:
                serve(router, live.pop(0))
        assert router.routed[0, "prefix"] == 200

    @pytest.mark.parametrize("num_engines", [2, 3, 8])
    def test_without_shared_prefixes_engines_are_within_a_fifth_of_each_other(self, num_engines: int):
        """400 requests of many sizes, for engines that all work equally fast and together can do a little more."""
        router, rng = Router([POOL] * num_engines), random.Random(0)
        given: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        queues: list[list[tuple[int, Routed]]] = [[] for _ in range(num_engines)]
        progress = [0] * num_engines
        for seed in range(400):
            size, output_len = rng.randrange(16, 512), rng.randrange(1, 64)
            routed = router.route(request(own(seed, size), output_len), range(num_engines))
            work = size + OUTPUT_WEIGHT * output_len
            given[routed.engine] += work
            counts[routed.engine] += 1
            queues[routed.engine].append((work, routed))
            for engine, queue in enumerate(queues):
                progress[engine] = progress[engine] + 430 // num_engines if queue else 0
                while queue and queue[0][0] <= progress[engine]:
                    work, done = queue.pop(0)
                    progress[engine] -= work
                    serve(router, done, 0, tuple(range(done.request.sampling.max_new_tokens)))
        mean = sum(given.values()) / num_engines
        assert all(abs(work - mean) <= 0.2 * mean for work in given.values()), given
        assert all(abs(count - 400 / num_engines) <= 0.2 * 400 / num_engines for count in counts.values()), counts

    def test_equal_engines_take_turns(self):
        router = Router([POOL] * 3)
        engines = []
        for seed in range(6):
            routed = router.route(request(own(seed)), [0, 1, 2])
            serve(router, routed)
            engines.append(routed.engine)
        assert engines == [0, 1, 2, 0, 1, 2]

    def test_an_answer_counts_as_long_as_answers_have_been(self):
        router = Router([POOL])
        first = router.route(request(own(0, 64), 100_000), [0])
        assert loads(router) == [64 + OUTPUT_WEIGHT * FIRST_OUTPUT_LEN]
        for _ in range(500):  # ended by whatever: by a stop string, whose reader leaves
            serve(router, router.route(request(own(1), 10), [0]), output=tuple(range(10)))
        router.begin(first, 0)
        router.end(first, ())
        router.route(request(own(2, 64), 100_000), [0])
        assert loads(router) == [64 + OUTPUT_WEIGHT * 10]


class TestSeveralRouters:
    def test_what_others_have_sent_is_load_until_they_tell_that_it_has_ended(self):
        mine, other = Router([POOL] * 2), Router([POOL] * 2)
        serve(mine, mine.route(request(PREFIX), [0]))
        begun, waiting = other.route(request(own(1)), [0]), other.route(request(own(2, 3000)), [0])
        other.begin(begun, 0)
        assert other.told.tolist() == [[3000, 0], [2, 0]]
        mine.note_others(other.told)
        assert mine.route(request(PREFIX + own(3)), [0, 1]).engine == 1
        other.end(begun, ())
        other.end(waiting, ())
        assert not other.told.any()
        mine.note_others(other.told)
        assert mine.route(request(PREFIX + own(4)), [0]).num_matched == len(PREFIX)
        assert mine.route(request(PREFIX[:512]), [0, 1]).engine == 0

    def test_those_that_hear_the_same_do_not_all_choose_the_least_loaded_but_they_find_the_holder(self):
        chosen = Counter[int]()
        for seed in range(16):
            router = Router([POOL] * 64, rng=np.random.default_rng(seed))
            serve(router, router.route(request(PREFIX), [9]))
            router.note_others(np.array([range(64), [0] * 64]))
            assert router.route(request(PREFIX), range(64)).engine == 9
            chosen[router.route(request(own(seed)), range(64)).engine] += 1
        assert max(chosen.values()) <= 8 and max(chosen) < 48, "few are idle, and none of the busiest is taken"


class TestCorrection:
    def test_what_the_engine_did_not_find_is_forgotten_with_all_that_was_used_before(self):
        router = Router([POOL] * 2)
        old, other, new = own(1, 512), own(2, 512), own(3, 512)
        for ids in (old, other, new):
            serve(router, router.route(request(ids), [0]))
        serve(router, router.route(request(other), [0]), cached_tokens=0)  # it was evicted, and so was what is older
        matched = [router.route(request((*ids, 5)), [0]).num_matched for ids in (old, other, new)]
        assert matched == [0, 512, 512]

    @pytest.mark.parametrize("page_size", [1, 16, 32, 64, 256])
    def test_what_no_page_can_share_is_not_missed(self, page_size: int):
        """Chats of turns that end anywhere, in engines that cache whole pages and evict nothing."""
        router, rng = Router([POOL] * 2, page_size), random.Random(page_size)
        for chat in range(20):
            ids, num_known = own(chat, 512), 0
            for turn in range(4):
                routed = router.route(request(ids), [0, 1] if turn else [0])
                num_cached = num_known // page_size * page_size
                assert routed.engine == 0
                assert num_cached - max(page_size, BLOCK_TOKENS) < routed.num_matched <= num_cached
                serve(router, routed, num_cached, output=(answer := own(100 * chat + turn, 10)))
                num_known = len(ids) + len(answer) - 1
                ids += answer + own(7000 + 100 * chat + turn, rng.randrange(1, 300))

    def test_a_prefix_that_was_still_being_computed_is_no_sign(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(own(1, 512)), [0]))
        leader, follower = (router.route(request(PREFIX + own(seed)), [0]) for seed in (2, 3))
        router.begin(follower, 64)  # admitted while the first chunks of the leader ran
        router.begin(leader, 0)
        assert router.route(request((*own(1, 512), 5)), [0]).num_matched == 512

    def test_who_never_began_leaves_nothing(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX[:64]), [0]))
        router.end(router.route(request(PREFIX), [0]), ())
        assert router.route(request((*PREFIX, 1)), [0]).num_matched == 64

    def test_what_an_engine_says_is_known_until_it_says_otherwise(self):
        """As where other routers send to it too, and this one has sent nothing or much."""
        router = Router([4096] * 2)
        blocks = prefix_path(request(PREFIX)).stem
        router.note_stored(1, blocks)
        for seed in range(10):
            serve(router, router.route(request(own(seed, 1000)), [1]))
        routed = router.route(request(PREFIX + own(1)), [0, 1])
        assert (routed.engine, routed.num_matched) == (1, len(PREFIX))
        serve(router, routed)
        router.note_removed(1, blocks[: 16 - 1 : -1])
        assert router.route(request(PREFIX), [1]).num_matched == 16 * BLOCK_TOKENS
        router.forget(1)
        assert router.route(request(PREFIX), [1]).num_matched == 0
        check_router(router)

    def test_a_flushed_engine_holds_nothing(self):
        router = Router([POOL] * 2)
        serve(router, router.route(request(PREFIX), [0]))
        router.forget(0)
        assert router.route(request(PREFIX), [0]).num_matched == 0

    def test_scored_tokens_are_not_expected_to_be_found(self):
        router = Router([POOL])
        serve(router, router.route(request(PREFIX), [0]))
        scored = request(PREFIX, return_logprob=True, logprob_start_len=100)
        assert router.route(scored, [0]).num_matched == 99


@settings(max_examples=40)
@given(st.data())
def test_random_traffic(data: st.DataObject):
    """Only what was offered is chosen, the same calls choose the same, loads end at 0, indices stay in their bounds."""
    count = data.draw(st.integers(1, 4))
    pool_tokens = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    routers = [Router([blocks * BLOCK_TOKENS for blocks in pool_tokens]) for _ in range(2)]
    live: list[list[Routed]] = [[], []]
    for _ in range(data.draw(st.integers(1, 30))):
        if live[0] and data.draw(st.booleans()):
            which = data.draw(st.integers(0, len(live[0]) - 1))
            cached, output = data.draw(st.integers(0, 200)), tuple(data.draw(st.lists(st.integers(0, 3), max_size=90)))
            begins = data.draw(st.booleans())
            for router, mine in zip(routers, live, strict=True):
                routed = mine.pop(which)
                if begins:
                    router.begin(routed, cached)
                router.end(routed, output if begins else ())
        else:
            blocks = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
            ids = tuple(token for token in (*blocks, 7) for _ in range(BLOCK_TOKENS))
            among = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
            wanted = dataclasses.replace(request(ids, 0), hold=data.draw(st.booleans()))
            routed = [router.route(wanted, among) for router in routers]
            assert routed[0].engine == routed[1].engine and routed[0].engine in among
            for mine, one in zip(live, routed, strict=True):
                mine.append(one)
        for router in routers:
            check_router(router)
    for router, mine in zip(routers, live, strict=True):
        for routed in mine:
            router.end(routed, ())
        assert loads(router) == [0] * count
        assert not router.told.any()
