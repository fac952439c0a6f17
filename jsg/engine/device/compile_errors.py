"""What the compiler refuses becomes an error for people, which names program, kernels and card, and what to do."""

import re
import traceback
from collections.abc import Hashable
from pathlib import Path

import jax

from jsg import kernels_pallas
from jsg.errors import CompileError

REFUSALS = (NotImplementedError, jax.errors.JaxRuntimeError)
"""What JAX raises where a program cannot be lowered, and XLA where it cannot be compiled."""
SHARED_PARTS = ("ops", "attention_block")
"""Modules that several kernels share."""
NAMES_INSIDE = r'@(?:__gpu\$xla\.gpu\.triton.*?\bname|tpu_custom_call.*?\bkernel_name) = "([^"]+)"'
"""Where the name of a kernel from Pallas stands in a lowered program for a GPU or a TPU."""
MOST_LETTERS = 300


def compile_error(
    name: Hashable, error: Exception, card: str, lowered: jax.stages.Lowered | None = None
) -> CompileError:
    """The error to raise for a program of this name.

    Args:
        name: The program's.
        error: One of `REFUSALS`.
        card: The device that it is compiled for.
        lowered: The program, if it could be lowered.
    """
    kernels = _kernels_on_the_way(error) if lowered is None else _kernels_inside(lowered)
    among = f" (kernels: {', '.join(kernels)})" if kernels else ""
    reason = str(error).strip().partition("\n")[0][:MOST_LETTERS]
    if "out of memory on hbm" in reason.lower():
        remedy = "lower --mem-fraction-static, which leaves more for a step, or --chunked-prefill-size"
    elif "out of memory" in reason.lower():
        remedy = "lower --mem-fraction-static, which leaves memory to try kernels in"
    else:
        remedy = "try another --kv-cache-dtype or --quantization, and report this; the memory plan is not the cause"
    return CompileError(f"the program {name}{among} must compile for the {card}, but is refused: {reason}; {remedy}")


def _kernels_inside(lowered: jax.stages.Lowered) -> list[str]:
    """The names of its kernels, of which the compiler does not say which one it refuses."""
    return sorted(set(re.findall(NAMES_INSIDE, lowered.as_text())))


def _kernels_on_the_way(error: BaseException) -> list[str]:
    """The module of the kernel whose trace or lowering raised the error. JAX keeps the trace in the cause."""
    folder = Path(kernels_pallas.__path__[0])
    for each in (error, error.__cause__, error.__context__):
        frames = traceback.extract_tb(each.__traceback__) if each else []
        stems = [Path(frame.filename).stem for frame in frames if Path(frame.filename).parent == folder]
        if found := [stem for stem in stems if stem not in SHARED_PARTS]:
            return found[:1]
    return []
