"""Measures products with kernels of each type on a CPU: `python -m bench.products [--output FILE]`.

The kernel is larger than the caches, so few rows are as fast as it can be read, and many as fast as they are computed.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report
from jsg.engine.device.panels import lay_out
from jsg.kernels_pallas.few_bits import zeros
from jsg.kernels_pallas.form import Form
from jsg.models.gguf_tensors import FORMS as FORMS_OF_GGUF
from jsg.models.layers import Linear, project
from jsg.models.quantise import FORMS, quantise

INPUTS, OUTPUTS = 2048, 32_768
ROWS = (1, 2, 8, 64)
STORED: dict[str, Form | None] = {
    "float32": None,
    "bfloat16": None,
    **FORMS,
    "W4A16 of 128": Form("int4", 128, "bfloat16"),
    "W4A16 of 32": Form("int4", 32, "bfloat16"),
    "AWQ": Form("int4", 128, "float16", has_zero=True),
    "AWQ of 32": Form("int4", 32, "float16", has_zero=True),
    "GPTQ with an order": Form("int4", 128, "float16", has_zero=True, has_order=True),
    "NVFP4": Form("e2m1", 16, "float8_e4m3fn", has_factor=True),
    "MXFP4": Form("e2m1", 32, "float8_e8m0fnu"),
    "FP8 in blocks": Form("e4m3", 128),
    **{kind: FORMS_OF_GGUF[kind] for kind in ("Q8_0", "Q4_K", "Q5_K", "Q6_K")},
}


def kernel_of(stored: str, inputs: int, outputs: int) -> tuple[jax.Array, ...]:
    """A kernel in panels: random numbers rounded, or in a published form any bits."""
    layer, form, rng = Linear(("it",), 1, (16,), jnp.float32), STORED[stored], np.random.default_rng(0)
    if form is None:
        layer.kernel.set_value(jnp.asarray(rng.standard_normal((inputs, outputs), np.float32), stored))
    elif stored in FORMS:
        made = quantise(rng.standard_normal((outputs, inputs), np.float32), "a random kernel", form)
        layer.kernel.set_value(jax.tree.map(np.transpose, made))
    else:
        empty = zeros(form, (inputs, outputs), 0)
        bits = rng.integers(0, 0x70, empty.values.shape, np.uint8)
        order = empty.order if empty.order is None else rng.permutation(inputs).astype(np.int32)
        scale = np.ones(empty.scale.shape, empty.scale.dtype)
        layer.kernel.set_value(empty._replace(values=bits.view(empty.values.dtype), scale=scale, order=order))
    lay_out(layer)
    return layer.kernel.get_value()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--outputs", type=int, default=OUTPUTS, help="columns of the kernel, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=20, help="calls of each product")
    parser.add_argument("--stored", nargs="*", choices=STORED, default=list(STORED), help="what is measured")
    options = parser.parse_args(arguments)
    report = Report("bench.products", arguments, options.output, inputs=INPUTS, outputs=options.outputs)
    for stored in options.stored:
        kernel = kernel_of(stored, INPUTS, options.outputs)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kernel))
        for dtype in ("float32", "bfloat16"):
            for rows in ROWS:
                x = jnp.ones((rows, INPUTS), dtype)
                multiply = jax.jit(project).lower(x, kernel).compile()
                samples = []
                for _ in range(1 + options.repeats):
                    start = time.perf_counter()
                    multiply(x, kernel).block_until_ready()
                    samples.append(1e3 * (time.perf_counter() - start))
                rate = num_bytes / 1e6 / min(samples[1:])
                report.add(f"{rows} rows in {dtype}, kernel in {stored}", "ms", samples[1:], read_gb_s=round(rate, 1))
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
