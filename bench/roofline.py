"""The measured rates of a device at best, and the least time of a step that follows; see `jsg.engine.selfcheck`."""

from jsg.engine.selfcheck import Cost, Rates, copy_rates, matmul_rates, step_cost

__all__ = ["Cost", "Rates", "copy_rates", "matmul_rates", "step_cost"]
