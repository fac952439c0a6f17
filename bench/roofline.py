"""What a device can do at best, measured, and the time that follows from it for a step: see `jsg.engine.selfcheck`."""

from jsg.engine.selfcheck import Cost, Rates, copy_rates, matmul_rates, step_cost

__all__ = ["Cost", "Rates", "copy_rates", "matmul_rates", "step_cost"]
