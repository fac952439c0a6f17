"""The same matmul, and attention over a decode batch, in PyTorch: a second opinion on what the device can do.

Runs only where this interpreter has torch, and torch the same kind of device.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from bench.report import Report

REPEATS = 10


def measure_torch(report: Report, dtype_name: str, matmul_size: int) -> None:
    """Notes matmul and attention figures, or that there is no torch."""
    if importlib.util.find_spec("torch") is None:
        report.header["torch"] = "not compared: this interpreter has none"
        return
    import torch

    dtype = getattr(torch, dtype_name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    report.header["torch"] = f"{torch.__version__} on {device}"

    a, b = (torch.randn(matmul_size, matmul_size, dtype=dtype, device=device) for _ in range(2))
    seconds = _seconds(lambda: a @ b, wait)
    rates = [2 * matmul_size**3 / 1e12 / s for s in seconds]
    report.add(f"torch: matmul {matmul_size}^3 {dtype_name}", "TFLOP/s", rates)

    batch, heads, kv_heads, context, head_dim = 32, 32, 8, 1024, 128
    query = torch.randn(batch, heads, 1, head_dim, dtype=dtype, device=device)
    keys, values = (torch.randn(batch, kv_heads, context, head_dim, dtype=dtype, device=device) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(lambda: attend(query, keys, values, enable_gqa=True), wait)
    moved = 2 * keys.numel() * keys.element_size()
    report.add(
        f"torch: attention of one layer, B={batch} ctx {context}",
        "ms",
        [s * 1e3 for s in seconds],
        GB_per_s=moved / 1e9 / min(seconds),
    )


def _seconds(run: Callable[[], Any], wait: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return found[3:]
