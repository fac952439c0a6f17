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
from jsg.models.layers import Linear, project
from jsg.models.quantise import PAIRS, Quantised, quantise

INPUTS, OUTPUTS = 2048, 32_768
ROWS = (1, 2, 8, 64)
STORED = {"float32": None, "bfloat16": None, "int8": jnp.int8, "int4": PAIRS}


def kernel_of(stored: str, inputs: int, outputs: int) -> tuple[jax.Array, ...]:
    """A random kernel in panels."""
    layer = Linear(("it",), 1, (16,), jnp.float32)
    numbers = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32)
    kernel = STORED[stored]
    parts = None if kernel is None else quantise(numbers, "a random kernel", kernel)
    layer.kernel.set_value(jnp.asarray(numbers.T, stored) if parts is None else Quantised(*(part.T for part in parts)))
    lay_out(layer)
    return layer.kernel.get_value()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--outputs", type=int, default=OUTPUTS, help="columns of the kernel, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=20, help="calls of each product")
    options = parser.parse_args(arguments)
    report = Report("bench.products", arguments, options.output, inputs=INPUTS, outputs=options.outputs)
    for stored in STORED:
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
