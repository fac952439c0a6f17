"""`bench.scale`: its model of replicas, what policies choose, and that a run depends on nothing but its arguments."""

import itertools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest

from bench.scale.__main__ import POLICIES, main
from bench.scale.policies import HashOfKey, Jsg, MakePolicy, RoundRobin, Setting
from bench.scale.published import SGLANG_ABS, Dynamo, LlmD, SGLang
from bench.scale.replicas import CHUNK, ROW_S, STEP_S, TOKEN_S, BlockCache, Live, Replica
from bench.scale.simulation import Fleet, pool, simulate
from bench.scale.traces import WORKLOADS, Call, Shape, read_mooncake


def chain(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "little") for number in numbers)


def call(prompt: Sequence[int], key: int = 0) -> Call:
    return Call(key, 0.0, None, chain(*prompt), chain(1000 + key))


def policy(make: MakePolicy, num_replicas: int = 4, *, has_events: bool = False):
    replicas = [Replica(100) for _ in range(num_replicas)]
    return make(Setting(replicas, 100, np.random.default_rng(0), has_events, {}, []))


class TestReplica:
    def test_a_cache_drops_the_end_of_the_oldest_chain_and_says_so(self):
        cache = BlockCache(4)
        cache.use(chain(1, 2, 3))
        assert cache.take_changes() == (chain(3, 2, 1), ())
        cache.use(chain(4, 5))
        assert cache.take_changes() == (chain(5, 4), chain(3))
        assert (cache.match(chain(1, 2, 3)), cache.match(chain(4, 5))) == (2, 2)

    def test_a_step_takes_as_long_as_its_tokens(self):
        replica = Replica(1000)
        replica.add(Live(call(range(100)), 0, 0.0))  # 3200 tokens: two steps
        seconds, begun, _ = replica.step()
        assert (seconds, begun) == (pytest.approx(STEP_S + CHUNK * TOKEN_S), [])
        _, begun, _ = replica.step()
        assert len(begun) == 1 and begun[0].cached == 0
        seconds, _, _ = replica.step()
        assert seconds == pytest.approx(STEP_S + ROW_S)
        replica.add(Live(call(range(100)), 0, 0.0))
        assert replica.step()[1][0].cached == 3199, "the last token runs"


class TestTraces:
    @pytest.mark.parametrize("name", WORKLOADS)
    def test_as_many_calls_come_as_there_are_replicas_in_each_turn(self, name: str):
        calls = WORKLOADS[name](Shape(32, 20, seed=1))
        assert 0.8 * 32 * 20 < len(calls) < 1.25 * 32 * 20
        assert all(first.at <= second.at for first, second in itertools.pairwise(calls))
        for each in calls:
            if each.follows is not None:
                said = each.follows.prompt + each.follows.answer
                assert each.prompt[: len(said)] == said and each.at >= each.follows.at

    def test_ids_of_mooncake_are_prefixes(self, tmp_path: pathlib.Path):
        lines = [
            {"timestamp": 0, "input_length": 1024, "output_length": 40, "hash_ids": [0, 1]},
            {"timestamp": 3000, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
        ]
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        first, second = read_mooncake(tmp_path / "trace.jsonl", 1)
        assert (len(first.prompt), len(second.prompt)) == (32, 34)
        assert second.prompt[:32] == first.prompt and first.key == second.key


class TestPolicies:
    @pytest.mark.parametrize("make", [Jsg, SGLang, LlmD])
    @pytest.mark.parametrize("has_events", [False, True])
    def test_a_prefix_is_followed(self, make: MakePolicy, has_events: bool):
        router = policy(make, has_events=has_events)
        first = call(range(90))  # long, so that two live calls are no reason to compute it again
        chosen = router.choose(first, 0.0)
        router.begin(first, 0)
        router.end(first)
        if has_events:
            router.note_stored(chosen, first.prompt)
        assert {router.choose(call(range(90), key), 0.0) for key in range(1, 4)} == {chosen}

    def test_sglang_takes_the_shortest_queue_when_queues_differ(self):
        router = policy(SGLang, 2)
        chosen = [router.choose(call(range(20), key), 0.0) for key in range(SGLANG_ABS + 3)]
        assert len(set(chosen[: SGLANG_ABS + 1])) == 1 and chosen[-1] != chosen[0]

    def test_dynamo_weighs_blocks_to_compute_and_blocks_in_use(self):
        router = policy(Dynamo, 2)
        first, cold = call(range(20), 0), call(range(100, 120), 1)
        chosen = router.choose(first, 0.0)
        assert router.choose(cold, 0.0) != chosen
        assert router.choose(call(range(20), 2), 0.0) == chosen, "it shares the blocks in use"
        router.begin(first, 0)
        router.end(first)

    def test_who_knows_nothing_spreads_or_sticks(self):
        turns = policy(RoundRobin)
        assert sorted(turns.choose(call([key]), 0.0) for key in range(4)) == [0, 1, 2, 3]
        assert len({policy(HashOfKey).choose(call([n], key=7), 0.0) for n in range(5)}) == 1


def test_a_run_is_a_function_of_its_arguments_and_events_make_routers_agree():
    calls = WORKLOADS["chats"](Shape(8, 12))
    results = {}
    for name, fleet in {
        "one": Fleet(8, 2048),
        "blind": Fleet(8, 2048, num_routers=4),
        "told": Fleet(8, 2048, num_routers=4, event_delay_s=0.05),
        "again": Fleet(8, 2048, num_routers=4, event_delay_s=0.05),
    }.items():
        results[name] = simulate(calls, fleet, pool(calls, fleet), POLICIES["jsg"])
    assert np.array_equal(results["told"].ttft_s, results["again"].ttft_s)
    assert results["blind"].hit_rate < results["told"].hit_rate <= 1.05 * results["one"].hit_rate


@pytest.mark.slow
def test_quick(tmp_path: pathlib.Path):
    main(["--quick", "--output", str(tmp_path / "scale.json")])
    figures = json.loads((tmp_path / "scale.json").read_text())["figures"]
    assert {figure["unit"] for figure in figures} == {"us", "hit rate", "of pooled"}
    of_pooled = [figure for figure in figures if figure["unit"] == "of pooled"]
    assert len(of_pooled) == 4 * (7 + 7 + 4) + 2 * 3
    assert all(0 < figure["min"] < 1.1 for figure in of_pooled)
