"""Shared prefixes from the scheduler to the device: which program runs, its arguments, and that no answer changes."""

import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from jsg.cache.node import Root
from jsg.cache.radix import PrefixLock
from jsg.config import EngineConfig
from jsg.engine import shapes, startup
from jsg.engine.core import EngineCore
from jsg.engine.device import packing
from jsg.engine.device.step import PackedInputs, packed_sizes
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.tile import GROUP_TILE
from jsg.models.config import read_spec
from jsg.sched import groups
from jsg.sched.batch import Batch, BatchEntry, PrefixGroup
from jsg.sched.buckets import BucketKey, Buckets, Phase, make_buckets
from jsg.sched.request import Placement, new_running_request
from jsg.types import Request, SamplingParams
from tests.engine import small

# Packing.


def decode_batch(num_requests: int, *found: PrefixGroup) -> Batch:
    """Decode step of requests in rows 1, 2 and following, each 1000 tokens into its sequence."""
    entries = []
    for number in range(num_requests):
        running = new_running_request(Request(rid=str(number), input_ids=(1,)), number, 0.0)
        place = Placement(number + 1, PrefixLock(Root("")), 0, 1001, is_prefilling=False)
        entry = BatchEntry(running, place, 1000, 1, 1000, output_index=5, from_device=True, samples=True)
        entries.append(entry)
    key = BucketKey(Phase.DECODE, num_requests, num_requests)
    return Batch(key, tuple(entries), num_requests, (), (), found)


def unpack(key: BucketKey, packed: np.ndarray) -> PackedInputs:
    return PackedInputs(*np.split(packed, np.cumsum(packed_sizes(key))[:-1]))  # pyright: ignore[reportArgumentType]


def test_groups_are_packed_as_tiles_of_their_members():
    large = PrefixGroup(tuple(range(1, 19)), 512)
    small_one = PrefixGroup((0, 19, 20, 21), 256)
    batch = decode_batch(23, small_one, large)
    key = BucketKey(Phase.DECODE, 32, 32, 8)
    parts = unpack(key, packing.pack_forward(batch, key, np.ones((24, 1001), np.int32), 1))
    assert np.asarray(parts.shared_lens).tolist() == [256, *[512] * 18, 256, 256, 256, *[0] * 10]
    assert np.asarray(parts.group_rows).tolist() == [1, 2, 18, 0, 0, 0, 0, 0], "rows of the tiles' first members"
    assert np.asarray(parts.group_lens).tolist() == [256, 512, 512, 0, 0, 0, 0, 0]
    members = np.asarray(parts.group_members).reshape(8, GROUP_TILE)
    assert [row[row >= 0].tolist() for row in members[:3]] == [[0, 19, 20, 21], list(range(1, 17)), [17, 18]]
    assert (members[3:] == -1).all() and (members[0, 4:] == -1).all()


def test_a_plain_program_is_told_of_no_groups():
    batch = decode_batch(23, PrefixGroup(tuple(range(23)), 512))
    key = BucketKey(Phase.DECODE, 32, 32)
    packed = packing.pack_forward(batch, key, np.ones((24, 1001), np.int32), 1)
    assert len(packed) == sum(packed_sizes(key)) == 3 + 6 * 32


# Which engines have room for groups.


def buckets_of(directory: pathlib.Path, platform: str = "gpu", **knobs: object) -> Buckets:
    config = EngineConfig(model_path=str(directory), **knobs)  # pyright: ignore[reportArgumentType]
    return shapes.shapes_of(config, read_spec(directory), 256, platform)


def test_room_for_groups_is_where_a_kernel_reads_them(
    small_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    assert not buckets_of(small_model, "cpu").grouped, "the reference reads every prefix for itself"
    monkeypatch.setattr(ops, "best_implementation", lambda: "triton")
    assert [key.num_rows for key in buckets_of(small_model).grouped] == [32, 64, 128, 256]
    assert len(buckets_of(small_model).all) <= 24 and not buckets_of(small_model, deterministic=True).grouped
    windowed = small.write_model(
        tmp_path / "windowed", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64
    )
    assert not buckets_of(windowed).grouped


# Whole engines.


def requests_with(num_requests: int, prefix_len: int, max_new: int) -> list[tuple[int, Request]]:
    """Requests that share a prefix and go on with two tokens of their own."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(2, small.VOCAB, prefix_len).tolist()
    prompts = [(*prefix, *rng.integers(2, small.VOCAB, 2).tolist()) for _ in range(num_requests)]
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0, ignore_eos=True)
    return [(0, Request(rid=f"r{i}", input_ids=prompt, sampling=sampling)) for i, prompt in enumerate(prompts)]


def tokens_of(outcomes: dict[str, small.Outcome]) -> dict[str, list[int]]:
    return {rid: outcome.token_ids for rid, outcome in outcomes.items()}


def forward_keys(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[BucketKey]:
    """The shapes of the forward passes, as they run."""
    keys = []
    call = core._runner.replica.call

    def noted(name: tuple, *arrays: np.ndarray) -> object:
        if name[0] == "forward":
            keys.append(name[1])
        return call(name, *arrays)

    monkeypatch.setattr(core._runner.replica, "call", noted)
    return keys


def test_a_step_with_groups_runs_the_program_that_reads_them(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
):
    """On CPU that program takes no heed of them: the reference reads every prefix for itself."""
    monkeypatch.setattr(startup, "shapes_of", lambda *_, **__: make_buckets(4, 64, shares_prefixes=True))
    monkeypatch.setattr(groups, "MIN_SHARED_TOKENS", 32)
    core = small.make_core(small_model, compile_cache_dir)
    keys, requests = forward_keys(core, monkeypatch), requests_with(4, 40, 6)
    answers = tokens_of(small.run(core, requests))
    assert [key.num_groups for key in keys] == [0, 1, 1, 1, 1, 1]
    keys.clear()
    assert {request.rid: small.alone(core, request).token_ids for _, request in requests} == answers
    assert not any(key.num_groups for key in keys), "nobody shares anything with itself"
    keys.clear()
    core._executables._declared.pop(("forward", BucketKey(Phase.DECODE, 4, 4, 1)))  # as if it were not compiled yet
    assert tokens_of(small.run(core, requests)) == answers
    assert [key.num_rows for key in keys] == [4] * 6 and not any(key.num_groups for key in keys)
    core.close()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes the kernels for NVIDIA the best ones from the call on; no trace outlives the change."""

    def choose() -> None:
        jax.clear_caches()
        monkeypatch.setattr(ops, "best_implementation", lambda: "triton")

    yield choose
    jax.clear_caches()


@pytest.mark.slow
def test_the_tokens_are_those_of_steps_that_share_nothing(
    tmp_path: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch, triton: Callable[[], None]
):
    """The kernels for NVIDIA in Pallas' interpret mode, with groups and without, and the reference."""
    directory = small.write_model(tmp_path / "long", max_position_embeddings=512)
    decode, extend = BucketKey(Phase.DECODE, 5, 5), BucketKey(Phase.EXTEND, 64, 5)
    buckets = Buckets((decode,), (extend,), chunk=64, grouped=(BucketKey(Phase.DECODE, 5, 5, 1),))
    monkeypatch.setattr(startup, "shapes_of", lambda *_, **__: buckets)
    requests = requests_with(5, 256, 5)

    def answers(core: EngineCore) -> dict[str, list[int]]:
        assert core.flush_cache()
        return tokens_of(small.run(core, requests))

    reference = small.make_core(directory, compile_cache_dir, max_running_requests=5)
    expected = answers(reference)
    reference.close()
    triton()
    core = small.make_core(directory, compile_cache_dir, max_running_requests=5)
    keys = forward_keys(core, monkeypatch)
    assert answers(core) == expected
    assert keys.count(buckets.grouped[0]) == keys.count(extend) - 1 == 4
    core._executables._declared.pop(("forward", buckets.grouped[0]))
    assert answers(core) == expected
    assert keys.count(buckets.grouped[0]) == keys.count(decode) == 4
    core.close()
