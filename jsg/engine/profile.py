"""A trace of some steps, for TensorBoard or Perfetto: `--profile-dir`."""

import logging
from pathlib import Path
from typing import final

import jax

from jsg.engine.private_directory import private_directory

logger = logging.getLogger(__name__)

FIRST_STEP = 10
"""Steps before the trace: the first ones of a load are unlike the rest."""
NUM_STEPS = 20


@final
class StepProfiler:
    """Traces `NUM_STEPS` steps after the first `FIRST_STEP`, once. What goes wrong with it is logged and ends nothing.

    The step that ends the trace waits until it is written, and so do the answers of that step.
    """

    def __init__(self, directory: str) -> None:
        """Makes the directory. Raises ConfigError where it is not closed to others."""
        self._directory = private_directory(
            Path(directory), "--profile-dir", "a trace shows when others use the server, and how much"
        )
        self._num_steps = 0
        self._is_tracing = False

    def before_step(self) -> None:
        """Counts a step; begins or ends the trace where it is time for it."""
        if self._num_steps == FIRST_STEP:
            self._begin()
        elif self._num_steps == FIRST_STEP + NUM_STEPS:
            self._end()
        self._num_steps += 1

    def close(self) -> None:
        """Ends a trace that is under way."""
        if self._num_steps <= FIRST_STEP:
            logger.warning(
                f"no profile was written: it begins after {FIRST_STEP} steps, and there were {self._num_steps}"
            )
        self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a trace of every Python call would mostly show itself
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._is_tracing = True
        except Exception:
            logger.exception("the profile could not be begun")

    def _end(self) -> None:
        if not self._is_tracing:
            return
        self._is_tracing = False
        try:
            jax.profiler.stop_trace()
            logger.warning(f"a profile of some steps from step {FIRST_STEP} on was written to {self._directory}")
        except Exception:
            logger.exception("the profile could not be written")


def profiled_compiler_options(platform: str) -> dict[str, bool]:
    """What programs are compiled with to look in a profile as they do without one.

    XLA runs a program kernel by kernel while a profiler looks on, and not as the CUDA graph that is served, unless told
    otherwise.
    """
    return {"xla_enable_command_buffers_during_profiling": True} if platform == "gpu" else {}
