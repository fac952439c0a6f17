"""A trace of some steps, for TensorBoard or Perfetto: `--profile-dir`."""

import logging
from pathlib import Path
from typing import final

import jax

from jsg.engine.private_directory import private_directory

logger = logging.getLogger(__name__)

FIRST_STEP = 10
"""Steps before the trace, because the first steps of a load are unlike the rest."""
NUM_STEPS = 20


@final
class StepProfiler:
    """Traces `NUM_STEPS` steps after the first `FIRST_STEP`, once. It logs errors and never ends the engine.

    The step that ends the trace waits until the trace is written, and so do the answers of that step.
    """

    def __init__(self, directory: str) -> None:
        """Makes the directory. Raises ConfigError if others may enter it."""
        self._directory = private_directory(
            Path(directory), "--profile-dir", "a trace shows when others use the server, and how much"
        )
        self._num_steps = 0
        self._is_tracing = False

    def before_step(self) -> None:
        """Counts a step; begins or ends the trace when it is time."""
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
        options.python_tracer_level = 0  # tracing every Python call would mostly show the tracing
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
    """XLA's options that make programs run under a profiler as they run without one.

    By default XLA runs a program kernel by kernel under a profiler, and not as the CUDA graph that serves requests.
    """
    return {"xla_enable_command_buffers_during_profiling": True} if platform == "gpu" else {}
