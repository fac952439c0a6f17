"""Attention of chunks by kernels of Hopper, compiled for an H200: none has run on a device."""

import functools
from collections.abc import Iterator

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from bench.nvidia import programs
from bench.nvidia.compiler import array, compile_for
from jsg.kernels_pallas import chunks, cudnn_chunks, mosaic_chunks
from jsg.kernels_pallas.inputs import Chunks
from jsg.sched.buckets import make_deterministic_buckets
from tests.nvidia.test_classes import EXTEND, LLAMA_8B, spills
from tests.nvidia.test_kernels import having

OF_LAYER, OF_STEP = {"mosaic": 11, "cudnn": 12}, {"mosaic": 21, "cudnn": 30}
"""Launches of a layer, 9 without these kernels, and of what a step has once."""
CALL = {"mosaic": "kCustomCall", "cudnn": "kCuDnn"}


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bfloat16"), (64, "float16")])
def test_the_mosaic_kernel(head_dim: int, dtype: str, nvdisasm):
    queries, keys = (array(2048, heads, head_dim, dtype=dtype) for heads in (32, 8))
    of = Chunks(*[array(16, dtype="int32")] * len(Chunks._fields))
    program = compile_for("h200", functools.partial(mosaic_chunks.attend, scale=0.1), queries, keys, keys, of)
    counts = program.instructions("mosaic_chunks_mosaic_gpu_kernel", nvdisasm)
    assert spills(counts) == set()
    blocks = mosaic_chunks.BLOCK_K // 16 + head_dim // 16  # products of 16 summands, with values and with keys
    assert sum(counts[name] for name in having(counts, "HGMMA")) == 2 * blocks, "one loop has a mask"
    assert having(counts, "UTMALDG") and having(counts, "USETMAXREG")


@pytest.fixture
def without_traces() -> Iterator[None]:
    """A layer is traced once for all models that are alike, and so with one choice of kernels."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("without_traces")
@pytest.mark.parametrize("name", CALL)
def test_a_step_is_one_command_buffer_with_them_too(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without a device cuDNN's call is compiled as it is, and has no plan yet."""
    monkeypatch.setattr(chunks, "chosen", lambda _: name)
    monkeypatch.setattr(cudnn_chunks, "is_here", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    model = programs.make_model(LLAMA_8B, card="h200", num_hidden_layers=2)
    program = model.programs.program(("forward", EXTEND))
    assert program.is_one_command_buffer
    assert len(program.launches) <= 2 * OF_LAYER[name] + OF_STEP[name]
    assert [launch.kernel for launch in program.launches].count(CALL[name]) == 2
    if name == "cudnn":
        call = next(line for line in program.hlo.splitlines() if 'custom_call_target="__cudnn$fmhaSoftmax"' in line)
        assert '"mask_type": "PADDING_CAUSAL"' in call and '"max_seg_per_batch": 5' in call


@pytest.mark.usefixtures("without_traces")
def test_deterministic_mode_has_them_never(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "chosen", lambda _: "mosaic")
    buckets = make_deterministic_buckets(256, 512, 512)
    model = programs.make_model(LLAMA_8B, card="h200", num_hidden_layers=1, buckets=buckets)
    program = model.programs.program(("forward", buckets.extend[-1]))
    names = {launch.kernel for launch in program.launches}
    assert "ragged_paged_attention" in names and CALL["mosaic"] not in names
