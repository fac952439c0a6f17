"""What `bench.tp` reads from a compiled program, and what it calculates from that."""

import argparse
import json
import pathlib

import pytest

from bench import plot_tp
from bench.tp import run
from bench.tp.compiled import collectives
from bench.tp.interconnect import NETWORK_LATENCY_S, PAIR_LATENCY_S, RING_BYTES_PER_S, Collective

HLO = """
  %a = bf16[32,4096]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}
  %b = bf16[32,4096]{1,0} all-reduce(%y), replica_groups={{0,1,2,3}}
  %c = (s32[2,32]{1,0}, s32[4,2,32]{2,1,0}) all-gather-start(%z), dimensions={0}
  %d = s32[4,2,32]{2,1,0} all-gather-done(%c)
  %e = f32[] add(%all-reduce.1, %f)
"""


def test_collectives_are_counted_by_what_they_result_in():
    assert collectives(HLO) == [Collective("all-reduce", 32 * 4096 * 2, 2), Collective("all-gather", 4 * 2 * 32 * 4, 1)]


def test_one_device_needs_no_time():
    assert Collective("all-reduce", 1000).seconds(1) == (0, 0)


@pytest.mark.parametrize(("kind", "rounds"), [("all-reduce", 2), ("all-gather", 1)])
def test_much_data_takes_what_a_ring_carries(kind: str, rounds: int):
    for seconds in Collective(kind, 10**12, 3).seconds(4):
        assert seconds == pytest.approx(3 * rounds * 3 / 4 * 1e12 / RING_BYTES_PER_S, rel=1e-4)


def test_two_hosts_exchange_inside_each_and_over_the_network_of_every_gpu():
    one_each = Collective("all-reduce", 47 * 10**9, 2).seconds_on_two_hosts(2)
    assert one_each == pytest.approx((2.0, 2.0), rel=1e-3)  # one second each, and nothing inside
    four_each = Collective("all-reduce", 47 * 10**9).seconds_on_two_hosts(8)
    inside = Collective("all-reduce", 47 * 10**9).seconds(4)
    assert four_each == pytest.approx([each + 0.25 + NETWORK_LATENCY_S for each in inside])


def test_little_takes_a_latency_which_grows_with_the_ring():
    (two, two_ring), (eight, eight_ring) = (Collective("all-reduce", 8).seconds(count) for count in (2, 8))
    assert two == pytest.approx(PAIR_LATENCY_S, rel=1e-3) and two_ring == two
    assert eight == pytest.approx(PAIR_LATENCY_S, rel=1e-3) and eight_ring == pytest.approx(5 * eight, rel=1e-3)


def test_whole_experts_want_several_devices_each_with_its_own():
    options = argparse.Namespace(model=None, devices=None)
    pairs = list(run.chosen(options))
    counts = {name: [count for other, count in pairs if other == name] for name in run.MODELS}
    assert counts.pop("Mixtral-8x7B by experts") == [2, 4, 8]
    assert set(map(tuple, counts.values())) == {(1, 2, 4, 8)}
    assert [run.MODELS[name].num_groups(4) for name in run.MODELS] == [1, 1, 1, 1, 4]


def figures(devices: int, kv_tokens: int) -> list[dict[str, object]]:
    facts = {"model": "M", "devices": devices}
    step = {"kind": "step", "step": "decode", "floor_ms": 8 / devices}
    return [
        {"samples": [8 / devices + 1, 8 / devices + 2], "facts": facts | step},
        {"samples": [1.0], "facts": facts | {"kind": "memory", "kv_tokens": kv_tokens}},
    ]


def test_the_plot_has_a_bar_for_each_number_of_devices(tmp_path: pathlib.Path):
    file, first, second = tmp_path / "run.json", tmp_path / "a.svg", tmp_path / "a2" / "a.svg"
    second.parent.mkdir()
    file.write_text(json.dumps({"figures": [*figures(1, 0), *figures(2, 100)]}))
    for output in (first, second):
        plot_tp.main([str(file), "-o", str(output)])
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    assert "M: decode" in text and ">10<" in text and ">6<" in text


def test_a_run_of_something_else_is_refused():
    with pytest.raises(ValueError, match="is it one of bench"):
        plot_tp.draw({"figures": []})
