"""The parts of `bench.device`: what runs each of them, and its time limit. No JAX: the coordinator imports this module.

The parts with the most important figures come first, because the last ones are left out when time runs out.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

TORCH_WORKER = Path(__file__).parent.parent / "pytorch" / "worker.py"


SERVER = ("aiohttp", "fastapi", "msgspec", "tokenizers", "uvicorn", "zmq")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One part, which runs in its own process.

    Attributes:
        about: What it measures.
        limit_s: Seconds after which it is ended.
        run: "module:function" of a function that takes a `Part`; None for a part of the PyTorch worker.
        ops: Operations with kernels on which its figures rest.
        figures: The figures of the plan that decide how much memory it needs.
        after: A part that must run in the same call before it, because it needs its files or is compared with it.
        interpreter: What another interpreter must have for it.
        needs: Modules without which it is left out.
        install: How to get these.
        needs_gpu: Whether it is for NVIDIA GPUs only.
        is_for_tpu: Whether it says anything about a TPU.
        xla_flags: Flags that are appended to XLA_FLAGS. The engine's own options override them.
        xla_options: Options in place of the engine's, for programs of an accelerator.
        has_engine_options: Whether the bare step is compiled with the engine's options or with XLA's defaults.
    """

    about: str
    limit_s: float
    run: str | None = None
    ops: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    after: str | None = None
    interpreter: str | None = None
    needs: tuple[str, ...] = ()
    install: str = ""
    needs_gpu: bool = False
    is_for_tpu: bool = True
    xla_flags: str = ""
    xla_options: Mapping[str, bool | int] = MappingProxyType({})
    has_engine_options: bool = True


STEP = ("paged_attention", "rotate_and_write")
"""The kernels of every step."""
BASE = "a few layers with the options of the engine"
LOADS = ("concurrent", "shared", "batches", "context", "chunk")


def _torch(about: str, limit_s: float, *figures: str) -> Entry:
    return Entry(about, limit_s, figures=figures, interpreter="torch")


def _served(about: str, limit_s: float, run: str, **fields: Any) -> Entry:
    install = "pip install '.[bench]'"
    return Entry(about, limit_s, run, figures=LOADS, needs=SERVER, install=install, **fields)


def _compare(
    about: str, flags: str = "", *, options: Mapping[str, bool | int] | None = None, has_engine_options: bool = True
) -> Entry:
    return Entry(
        about,
        45,
        "bench.device.steps:compare",
        ops=STEP,
        figures=("ab_layers", "batches", "context"),
        xla_flags=flags,
        xla_options=MappingProxyType(dict(options or {})),
        has_engine_options=has_engine_options,
        is_for_tpu=False,
        after=None if about == BASE else "xla-engine",
    )


PARTS: Mapping[str, Entry] = {
    "rates": Entry(
        "copy bandwidth and matmul rate, from which every floor follows",
        60,
        "bench.device.rates:measure",
        figures=("copy_bytes", "matmul_size"),
    ),
    "correct": Entry(
        "every kernel against float64 or plain jnp", 120, "bench.device.kernels:check", figures=("sampling_rows",)
    ),
    "steps": Entry(
        "the bare step: decode, prefill, a shared prefix",
        180,
        "bench.device.steps:measure",
        ops=STEP,
        figures=("batches", "context", "prefills"),
    ),
    "attention": Entry(
        "attention of one layer alone",
        90,
        "bench.device.kernels:measure",
        ops=("paged_attention",),
        figures=("attention_batches", "attention_contexts"),
    ),
    "states": Entry(
        "linear attention of one layer alone, in decode and for prompts",
        120,
        "bench.device.states:measure",
        ops=("gated_delta",),
        figures=("batches", "state_prompts"),
    ),
    "engine": Entry("requests through the engine", 180, "bench.device.engine:measure", ops=STEP, figures=LOADS),
    "torch-static": _torch("transformers' generate with a static cache, compiled", 100, "context", "alone_tokens"),
    "torch-generate": _torch("its generate with SDPA", 90, "concurrent", "shared"),
    "torch-continuous": _torch("its continuous batching", 120, "concurrent", "shared"),
    "start-cold": Entry(
        "the start of the engine as it comes", 180, "bench.device.engine:measure_start", ops=STEP, figures=LOADS
    ),
    "start-warm": Entry(
        "the same with a warm compile cache",
        90,
        "bench.device.engine:measure_start",
        ops=STEP,
        figures=LOADS,
        after="start-cold",
    ),
    "chips": Entry(
        "the engine on all devices of the host, by tensor parallelism",
        240,
        "bench.device.engine:measure_chips",
        ops=STEP,
        figures=LOADS,
    ),
    "serving": _served("jsg serve over HTTP", 240, "bench.device.serving:jsg", ops=(*STEP, "kept_threshold")),
    "vllm": _served("vLLM over HTTP with the same loads", 420, "bench.device.serving:vllm", interpreter="vllm"),
    "tests": Entry(
        "the tests that need a GPU, as make test-gpu runs them",
        420,
        "bench.device.device_tests:run",
        needs=("pytest", "xdist", "hypothesis"),
        install="pip install '.[test]'",
        needs_gpu=True,
    ),
    "profile": Entry(
        "the kernels that take the time of a decode step",
        60,
        "bench.device.profiled:measure",
        ops=STEP,
        figures=("ab_layers", "batches", "context"),
    ),
    "compile": Entry(
        "all programs compiled into a folder, as jsg compile does",
        240,
        "bench.device.compiled:write",
        ops=STEP,
        figures=LOADS,
    ),
    "programs": Entry(
        "the start of the engine with these programs",
        120,
        "bench.device.compiled:start",
        ops=STEP,
        figures=LOADS,
        after="compile",
    ),
    "sampling": Entry(
        "every variant of the sampling program",
        60,
        "bench.device.sampling:measure",
        ops=("kept_threshold", "penalised", "top_logits"),
        figures=("sampling_rows",),
    ),
    "prefill": Entry(
        "attention of a chunk: by the Triton kernel, with cuDNN's, with Mosaic's, and what JAX brings",
        120,
        "bench.device.kernels:prefill",
        ops=("paged_attention",),
        figures=("chunks", "cached"),
        is_for_tpu=False,
    ),
    "experts": Entry(
        "choice and products of a layer with experts",
        90,
        "bench.device.experts:measure",
        ops=("expert_routes", "grouped_matmul"),
        figures=("expert_tokens",),
    ),
    "quantised": Entry(
        "products with kernels in 8 bits and in longer types",
        90,
        "bench.device.quantised:measure",
        figures=("ab_layers", "product_rows"),
    ),
    "few-bits": Entry(
        "products with kernels in 4 bits, in groups of 8 bits, and of experts in these",
        120,
        "bench.device.few_bits:measure",
        ops=("few_bits_matmul", "grouped_matmul"),
        figures=("product_rows", "expert_tokens"),
    ),
    "encoder": Entry("the vision encoder, tiles and frames", 90, "bench.device.encoder:measure", figures=("images",)),
    "torch-ops": _torch("matmul and attention in PyTorch", 45, "batches", "context"),
    "xla-engine": _compare(BASE),
    "xla-default": _compare("the same as XLA comes: matmuls by Triton, tuned", has_engine_options=False),
    "xla-autotune": _compare("matmuls tuned when they are compiled", options={"xla_gpu_autotune_level": 4}),
    "xla-no-split-k": _compare(
        "matmuls by Triton that split no sums",
        "--xla_gpu_experimental_force_split_k=1",
        has_engine_options=False,
    ),
    "xla-ftz": _compare("denormal numbers flushed to zero", "--xla_gpu_ftz=true"),
    "xla-skip-temp": _compare(
        "CUDA graphs not updated for temporaries", "--xla_gpu_command_buffer_update_mode=SKIP_TEMP"
    ),
    "xla-skip-profiled": _compare(
        "CUDA graphs updated as profiled", "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED"
    ),
    "xla-no-graphs": _compare("no CUDA graphs", "--xla_gpu_enable_command_buffer="),
}
