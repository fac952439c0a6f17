"""The bare step does the same work as the engine: the packed arrays are those that the engine would send."""

import dataclasses
import pathlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_check, roofline
from bench.bare import BareStep
from bench.shapes import LLAMA_8B, LLAMA_SMALL, write_model
from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.engine.device import packing, step
from jsg.kernels_pallas.tile import GROUP_TILE
from jsg.models.config import read_spec
from jsg.sched.batch import Batch, PrefixGroup
from jsg.sched.buckets import BucketKey, Phase, make_buckets
from jsg.sched.scheduler import Scheduler, SchedulerConfig, StepResult
from jsg.types import Request, SamplingParams
from tests.models.sizes import num_parameters

ONE_LAYER = LLAMA_SMALL | {"num_hidden_layers": 1}
MAX_ROWS = 4
CONTEXT_LEN = 80


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareStep:
    config = read_spec(write_model(tmp_path_factory.mktemp("model"), ONE_LAYER))
    return BareStep(config, jnp.float32, max_rows=MAX_ROWS, context_len=CONTEXT_LEN, is_shuffled=False)


def batches(prompt_len: int, count: int) -> list[tuple[Batch, np.ndarray]]:
    """The scheduler's plan for `count` equal requests (their prefill, then a decode step), and its page table."""
    allocator = PageAllocator(MAX_ROWS * CONTEXT_LEN)
    config = SchedulerConfig(
        context_length=CONTEXT_LEN,
        vocab_size=LLAMA_SMALL["vocab_size"],
        eos_token_ids=frozenset(),
        buckets=make_buckets(MAX_ROWS, MAX_ROWS * prompt_len),
        max_running=MAX_ROWS,
    )
    scheduler = Scheduler(config, allocator, RadixCache(1, allocator, enabled=False))
    for index in range(count):
        prompt = tuple(range(index + 1, index + 1 + prompt_len))
        scheduler.add(Request(rid=str(index), input_ids=prompt, sampling=SamplingParams(max_new_tokens=4)))
    planned = []
    for _ in range(2):
        batch = scheduler.plan()
        assert batch is not None
        planned.append((batch, scheduler.table.pages.copy()))
        scheduler.commit(batch, StepResult([1] * count))
    return planned


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is packed, but its programs are not made."""
    monkeypatch.setattr(BareStep, "_compile", lambda *_: None)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(("step", "chunks"), [(0, [(0, 70)] * 3), (1, [(70, 1)] * 3)], ids=["prefill", "decode"])
def test_packs_as_the_engine_does(bare: BareStep, step: int, chunks: list[tuple[int, int]]):
    batch, pages = batches(70, 3)[step]
    theirs = packing.pack_forward(batch, batch.key, pages, 1)
    ours = bare.prepare(batch.key, chunks).packed.copy()
    for name in ("token_ids", "slots"):  # which tokens and which slots is each one's own choice; how many is not
        content, other = (getattr(parts_of(packed, batch.key), name) for packed in (theirs, ours))
        assert np.count_nonzero(content) == np.count_nonzero(other)
        content[:] = other[:] = 0
    rows = dict(zip(sorted({entry.place.row for entry in batch.entries}), (1, 2, 3), strict=True))
    assert rows == {1: 1, 2: 2, 3: 3}
    np.testing.assert_array_equal(ours, theirs)


def parts_of(packed: np.ndarray, key: BucketKey) -> step.PackedInputs:
    sizes = step.packed_sizes(key)
    return step.PackedInputs(*np.split(packed, np.cumsum(sizes)[:-1]))


@pytest.mark.usefixtures("not_compiled")
def test_packs_a_shared_prefix_as_the_engine_does(tmp_path: pathlib.Path):
    config = read_spec(write_model(tmp_path, ONE_LAYER))
    shared = BareStep(config, jnp.float32, max_rows=MAX_ROWS, context_len=CONTEXT_LEN)
    shared.share_prefix(64)
    batch, pages = batches(70, 3)[1]
    key = dataclasses.replace(batch.key, num_groups=1)
    batch = dataclasses.replace(batch, key=key, groups=(PrefixGroup((0, 1, 2), 64),))
    theirs = parts_of(packing.pack_forward(batch, key, pages, 1), key)
    ours = parts_of(shared.prepare(key, [(70, 1)] * 3).packed, key)
    for name in ("shared_lens", "group_rows", "group_lens", "group_members"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


def test_a_large_group_has_several_tiles_over_the_same_pages(tmp_path: pathlib.Path):
    num_rows = GROUP_TILE + 1
    config = read_spec(write_model(tmp_path, ONE_LAYER))
    shared = BareStep(config, jnp.float32, max_rows=num_rows, context_len=40, page_size=4)
    shared.share_prefix(24)
    plain = BucketKey(Phase.DECODE, num_rows, num_rows)
    key = dataclasses.replace(plain, num_groups=4)
    work = shared.prepare(key, [(30, 1)] * num_rows)
    parts = parts_of(work.packed, key)
    assert parts.group_lens.tolist() == [24, 24, 0, 0] and parts.group_rows.tolist() == [1, num_rows, 0, 0]
    members = parts.group_members.reshape(4, GROUP_TILE)
    assert members[0].tolist() == list(range(GROUP_TILE)) and members[1].tolist() == [GROUP_TILE] + [-1] * 15
    assert len({tuple(row[:6]) for row in shared._pages[1:]}) == 1
    assert len(set(shared._pages[1:, 6:].flat)) == shared._pages[1:, 6:].size
    np.testing.assert_array_equal(shared.run(work), shared.run(shared.prepare(plain, [(30, 1)] * num_rows)))


@pytest.mark.parametrize(
    ("key", "chunks"),
    [
        (BucketKey(Phase.DECODE, 2, 2), [(30, 1), (7, 1)]),
        pytest.param(BucketKey(Phase.EXTEND, 64, 2), [(0, 40)], marks=pytest.mark.slow),
    ],
    ids=["decode", "extend"],
)
def test_the_same_work_gives_the_same_tokens(bare: BareStep, key: BucketKey, chunks: list[tuple[int, int]]):
    work = bare.prepare(key, chunks)
    first = bare.run(work)
    assert first.shape == (2,)
    np.testing.assert_array_equal(bare.run(work), first)


def test_rows_do_not_share_pages_unless_they_must(tmp_path: pathlib.Path):
    config = read_spec(write_model(tmp_path, ONE_LAYER))
    small = BareStep(config, jnp.float32, max_rows=4, context_len=60, pool_tokens=80)
    assert sorted(small._pages[1:, :20].flat) == list(range(1, 81)) and len(set(small._pages[1])) == 60


def test_the_floor_counts_every_weight_but_the_embedding(tmp_path: pathlib.Path):
    config = read_spec(write_model(tmp_path, LLAMA_8B))
    cost = roofline.step_cost(config, 2, rows=1, cached=0, new=1)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    weights = num_parameters(config) - norms - config.vocab_size * config.hidden_size
    assert cost.num_bytes == 2 * weights + config.kv_bytes_per_token(2)
    assert (
        cost.num_flops
        == 2 * weights + 4 * config.num_layers * config.layers[0].attention.heads * config.layers[0].attention.head_dim
    )
    rates = roofline.Rates(copy_bytes_per_s=4.8e12, matmul_flops_per_s=990e12)
    at_256 = roofline.step_cost(config, 2, rows=256, cached=1023, new=1)
    # 3.88 ms for the products, which arithmetic bounds, and after them 7.16 ms for 34.4 GB of keys and values.
    assert at_256.floor_ms(rates) == pytest.approx(11.04, rel=0.01)


def attention_checks() -> Iterator[object]:
    """Every batch in both types. Two of them are fast: `tests/kernels_pallas` compares the same table too."""
    for batch in attention_check.BATCHES:
        for dtype, at_most in (("float32", 2e-6), ("bfloat16", 2e-2)):
            is_fast = (batch.name, dtype) in {("mixed", "float32"), ("decode-window", "bfloat16")}
            marks = () if is_fast else pytest.mark.slow
            yield pytest.param(batch, dtype, at_most, marks=marks, id=f"{batch.name}-{dtype}")


@pytest.mark.parametrize(("batch", "dtype", "at_most"), [*attention_checks()])
def test_attention_on_this_device(batch: attention_check.Case, dtype: str, at_most: float):
    assert 0 < attention_check.largest_error(batch, dtype, heads=4, kv_heads=2, head_dim=32) < at_most


@pytest.mark.parametrize("given", [None, {}], ids=["engine", "none"])
def test_is_compiled_as_the_engine_is(
    given: dict[str, bool] | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    received = []
    monkeypatch.setattr("bench.bare.COMPILER_OPTIONS", {"cpu": {"xla_cpu_enable_fast_math": False}})
    monkeypatch.setattr("bench.bare.Executables", lambda **options: received.append(options["compiler_options"]))
    config = read_spec(write_model(tmp_path, ONE_LAYER))
    BareStep(config, jnp.float32, max_rows=1, context_len=4, compiler_options=given)
    assert received == [{"xla_cpu_enable_fast_math": False} if given is None else {}]
