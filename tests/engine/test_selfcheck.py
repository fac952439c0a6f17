"""The check of a step against the device: a step's least cost, what is timed, and that the check changes nothing."""

import dataclasses
import functools
import itertools
import statistics
import time

import jax
import numpy as np
import pytest

from jsg.engine import selfcheck
from jsg.engine.core import EngineCore
from jsg.engine.selfcheck import Cost, DecodeSteps, Rates, SelfCheck, StepTime
from jsg.errors import JsgError
from jsg.types import Request, SamplingParams
from jsg.window import Window
from tests.engine import small
from tests.engine.small import check_core
from tests.golden.variants import VARIANTS
from tests.models.sizes import num_parameters
from tests.models.test_config import read

REQUEST = Request(rid="r", input_ids=(2, 3, 4, 5), sampling=SamplingParams(max_new_tokens=8, temperature=0))


@pytest.fixture
def core(core_of) -> EngineCore:
    return core_of()


@pytest.fixture
def steps(core: EngineCore) -> DecodeSteps:
    return core._decode_steps


def test_products_and_attention_come_one_after_the_other():
    rates = Rates(copy_bytes_per_s=1e3, matmul_flops_per_s=1e6)
    by_memory = Cost(weight_bytes=10, kv_bytes=5, matmul_flops=1, attention_flops=1)
    by_arithmetic = Cost(weight_bytes=10, kv_bytes=5, matmul_flops=20_000, attention_flops=10_000)
    assert by_memory.floor_ms(rates) == pytest.approx(15)
    assert by_arithmetic.floor_ms(rates) == pytest.approx(30)


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize(("cached", "new", "length"), [(0, 5, None), (7, 1, None), (3, 4, 5), (9, 4, 5), (0, 3, 1)])
def test_tokens_outside_the_window_cost_nothing(cached: int, new: int, length: int | None, *, is_aligned: bool):
    window, most = length and Window(length, is_aligned), length or 99
    firsts = [last // most * most if is_aligned else max(0, last + 1 - most) for last in range(cached, cached + new)]
    seen = [range(first, last + 1) for last, first in enumerate(firsts, cached)]
    expected = (len({key for keys in seen for key in keys}), sum(map(len, seen)))
    assert selfcheck._keys_and_pairs(cached, new, window) == expected


def test_of_several_experts_those_count_that_tokens_choose(tmp_path):
    config = read(tmp_path, VARIANTS["mixtral_three_of_five"])
    num_experts, chosen, layers = (
        config.layers[0].mlp.count,
        config.layers[0].mlp.router.choice.per_token,
        config.num_layers,
    )
    block = 3 * config.hidden_size * config.layers[0].mlp.inner
    outside = config.vocab_size * config.hidden_size + (2 * layers + 1) * config.hidden_size  # the embedding, norms
    all_weights = num_parameters(config) - outside

    def weights(rows: int) -> float:
        return selfcheck.step_cost(config, 1, rows=rows, cached=0, new=1).weight_bytes

    assert weights(1) == all_weights - layers * (num_experts - chosen) * block
    assert weights(10_000) == all_weights
    sets = [set(each) for each in itertools.combinations(range(num_experts), chosen)]
    touched = statistics.mean(len(one | other) for one in sets for other in sets)
    assert weights(2) == pytest.approx(all_weights - layers * (num_experts - touched) * block, abs=1)
    in_8_bits = selfcheck.step_cost(config, 4, rows=1, cached=0, new=1, kernel_itemsize=1)
    head_and_routers = config.hidden_size * (config.vocab_size + layers * num_experts)
    assert in_8_bits.weight_bytes == weights(1) + 3 * head_and_routers
    flops = selfcheck.step_cost(config, 1, rows=7, cached=0, new=1).matmul_flops
    assert flops == 7 * 2 * weights(1), "whatever runs beside it, a token runs its own experts"


def test_each_device_reads_its_part_and_the_busiest_one_counts(tmp_path):
    config = read(tmp_path, VARIANTS["mixtral"])  # two of four experts
    cost = functools.partial(selfcheck.step_cost, config, 1, cached=0, new=1, kv_bytes_per_token=16)
    routers = config.num_layers * config.hidden_size * config.layers[0].mlp.count  # which every device has
    block = config.num_layers * 3 * config.hidden_size * config.layers[0].mlp.inner
    for rows in (1, 2, 999):
        whole, half = cost(rows=rows), cost(rows=rows, num_devices=2)
        assert half.weight_bytes - routers == pytest.approx((whole.weight_bytes - routers) / 2, abs=1)
        assert half.kv_bytes == whole.kv_bytes / 2 and half.attention_flops == whole.attention_flops / 2
        assert half.matmul_flops == (whole.matmul_flops + 2 * rows * routers) / 2
    one, own = cost(rows=1, num_devices=4), cost(rows=1, num_devices=4, num_groups=4)
    assert own.weight_bytes - one.weight_bytes == pytest.approx(block - 2 * block / 4), (
        "one whole expert, not two quarters"
    )
    assert own.matmul_flops - one.matmul_flops == pytest.approx(2 * (block - 2 * block / 4))
    many, many_own = cost(rows=999, num_devices=4), cost(rows=999, num_devices=4, num_groups=4)
    assert many_own.weight_bytes == many.weight_bytes, "all are chosen"
    assert 1 < many_own.matmul_flops / many.matmul_flops < 1.1, "not equally often"


def test_the_engines_own_programs_are_timed(core: EngineCore):
    check = core.selfcheck(30.0)  # which is not used up: two seconds were not always enough on a busy machine
    assert [(step.num_rows, step.context) for step in check.steps] == [(1, small.CONTEXT - 1), (4, 255)]
    for step in check.steps:
        assert 0 < step.floor_ms < 1e4 * step.ms
        assert step.tokens_per_s == pytest.approx(1e3 * step.num_rows / step.ms)
    assert min(dataclasses.astuple(check.rates)) > 0


def test_nothing_is_harmed(core: EngineCore):
    expected = small.alone(core, REQUEST).token_ids
    before = [np.asarray(x) for x in jax.tree.leaves(core._runner.replica.state._replace(page_table=None))]
    core.selfcheck(0.5)
    after = jax.tree.leaves(core._runner.replica.state._replace(page_table=None))
    num_dump = 0
    for was, now in zip(before, after, strict=True):
        changed = np.flatnonzero(np.any(was.reshape(len(was), -1) != np.asarray(now).reshape(len(was), -1), axis=1))
        assert set(changed) <= {0}
        num_dump += len(changed)
    assert num_dump <= 1, "only the last token of the dump row"
    np.testing.assert_array_equal(np.asarray(core._runner.replica.state.page_table), core.scheduler.table.pages)
    check_core(core)
    outcome = small.run(core, [(0, REQUEST)])["r"]
    assert outcome.token_ids == expected
    assert outcome.cached_tokens == 3, "what was cached is still there"


def test_the_timed_step_reads_what_it_says(core: EngineCore, steps: DecodeSteps):
    """Every row has different pages. All are in the pool, and none is the page for padding."""
    key = steps.keys()[-1]
    pages = steps._pages(key.num_rows, steps.context(key) + 1)
    used = pages[1 : key.num_rows + 1, : steps.context(key) + 1]
    assert pages.shape == core.scheduler.table.pages.shape
    assert len(set(used.flat)) == used.size and used.min() >= 1
    assert used.max() < min(steps.num_pages)
    assert not pages[key.num_rows + 1 :].any()


def test_shapes_of_more_rows_than_the_table_has_are_timed(core: EngineCore, steps: DecodeSteps):
    """Rows of a batch are rounded up on a GPU: 5 requests at once have a shape of 8."""
    num_rows = len(core.scheduler.table.pages) + 3
    pages = steps._pages(num_rows, 2)
    assert (pages[1:, :2] > 0).all() and pages.shape == core.scheduler.table.pages.shape


def test_a_row_is_as_long_as_context_and_pool_allow(steps: DecodeSteps):
    one, four = steps.keys()
    assert dataclasses.replace(steps, context_length=9999, num_pages=(10_000,)).context(one) == selfcheck.CONTEXT
    assert dataclasses.replace(steps, num_pages=(500, 101)).context(four) == 24
    assert dataclasses.replace(steps, num_pages=(9,), page_size=16).context(four) == 31
    nothing = dataclasses.replace(steps, num_pages=(8,))
    assert nothing.time(four, Rates(1.0, 1.0), time.monotonic()) is None


def test_without_time_the_smallest_shape_is_timed(core: EngineCore):
    assert [step.num_rows for step in core.selfcheck(0.0).steps] == [1]


def test_deterministic_mode_has_no_decode_steps(core_of):
    assert core_of(deterministic=True).selfcheck(0.0).steps == ()


def test_requests_are_not_disturbed(core: EngineCore):
    core.add(REQUEST)
    with pytest.raises(JsgError, match="requests run or wait"):
        core.selfcheck(1.0)
    core.abort("r")
    core.step()


def test_the_rates_fit_into_what_is_free(monkeypatch: pytest.MonkeyPatch):
    class Nearly:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 2**36, "bytes_in_use": 2**36 - 2**29}

    sizes = []
    monkeypatch.setattr(jax, "devices", lambda: [Nearly()])
    monkeypatch.setattr(selfcheck, "copy_rates", lambda size, deadline: sizes.append(size) or [1.0, 2.0])
    monkeypatch.setattr(selfcheck, "matmul_rates", lambda size, *rest: sizes.append(size) or [3.0])
    assert selfcheck.measure_rates("bfloat16") == Rates(2e9, 3e12)
    assert sizes == [2**27, 2048]


def test_it_is_a_table():
    steps = (
        StepTime(num_rows=1, context=9, ms=4.0, floor_ms=3.0),
        StepTime(num_rows=2, context=9, ms=5.0, floor_ms=1.0),
    )
    lines = str(SelfCheck(Rates(4e12, 7e14), steps)).splitlines()
    assert lines[0].startswith("this device copies 4000.0 GB/s and multiplies matrices at 700.00 TFLOP/s")
    assert [line.split() for line in lines[2:]] == [
        ["1", "row,", "9", "cached", "4.000", "3.000", "75%", "250"],
        ["2", "rows,", "9", "cached", "5.000", "1.000", "20%", "400"],
    ]
