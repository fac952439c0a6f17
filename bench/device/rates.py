"""The rates of the device at best, and its description."""

import jax

from bench import roofline
from bench.device.events import Part


def measure(part: Part) -> None:
    """Measures copy bandwidth and matmul rate, and sends JAX's description of the device."""
    device = jax.devices()[0]
    part.header(
        devices=[str(each) for each in jax.devices()],
        platform=device.platform,
        device_kind=device.device_kind,
        platform_version=device.client.platform_version,
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
    )
    plan = part.plan
    part.add("copy bandwidth", "GB/s", roofline.copy_rates(plan.copy_bytes), kind="copy", num_bytes=plan.copy_bytes)
    rates = roofline.matmul_rates(plan.matmul_size, plan.dtype)
    part.add(f"matmul {plan.matmul_size}^3 {plan.dtype}", "TFLOP/s", rates, kind="matmul")
