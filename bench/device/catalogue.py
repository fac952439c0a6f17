"""The parts of `bench.device`: what runs each of them, and its time limit. No JAX: the coordinator imports this module.

The parts with the most important figures come first, because the last ones are left out when time runs out.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

TORCH_WORKER = Path(__file__).parent.parent / "pytorch" / "worker.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One part, which runs in its own process.

    Attributes:
        about: What it measures.
        limit_s: Seconds after which it is ended.
        run: "module:function" of a function that takes a `Part`; None for a part of the PyTorch worker.
        xla_flags: Flags that are appended to XLA_FLAGS. The engine's own options override them.
        has_engine_options: Whether the bare step is compiled with the engine's options or with XLA's defaults.
    """

    about: str
    limit_s: float
    run: str | None = None
    xla_flags: str = ""
    has_engine_options: bool = True


def _compare(about: str, flags: str = "", *, has_engine_options: bool = True) -> Entry:
    return Entry(about, 45, "bench.device.steps:compare", flags, has_engine_options)


PARTS: Mapping[str, Entry] = {
    "rates": Entry("copy bandwidth and matmul rate, from which every floor follows", 60, "bench.device.rates:measure"),
    "correct": Entry("every kernel against float64 or plain jnp", 90, "bench.device.kernels:check"),
    "steps": Entry("the bare step: decode, prefill, a shared prefix", 180, "bench.device.steps:measure"),
    "attention": Entry("attention of one layer alone", 90, "bench.device.kernels:measure"),
    "engine": Entry("requests through the engine", 180, "bench.device.engine:measure"),
    "torch-static": Entry("transformers' generate with a static cache, compiled", 100),
    "torch-generate": Entry("its generate with SDPA", 90),
    "torch-continuous": Entry("its continuous batching", 120),
    "start-cold": Entry("the start of the engine as it comes", 180, "bench.device.engine:measure_start"),
    "start-warm": Entry("the same with a warm compile cache", 90, "bench.device.engine:measure_start"),
    "sampling": Entry("every variant of the sampling program", 60, "bench.device.sampling:measure"),
    "prefill": Entry("attention of a whole prompt, against what JAX brings", 60, "bench.device.kernels:prefill"),
    "experts": Entry("choice and products of a layer with experts", 90, "bench.device.experts:measure"),
    "quantised": Entry("products with kernels in 8 bits and in longer types", 90, "bench.device.quantised:measure"),
    "encoder": Entry("the vision encoder, tiles and frames", 90, "bench.device.encoder:measure"),
    "torch-ops": Entry("matmul and attention in PyTorch", 45),
    "xla-engine": _compare("a few layers with the options of the engine"),
    "xla-default": _compare("the same as XLA comes: matmuls by Triton, tuned", has_engine_options=False),
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
    "xla-no-autotune": _compare("no autotuning", "--xla_gpu_autotune_level=0"),
}
