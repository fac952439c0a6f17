"""Parts of `bench.device` in which something goes wrong on purpose: the catalogue of a test names them.

Each imports only what it needs, so that the one that hangs does so soon.
"""

import time

import jax
import jax.numpy as jnp

from bench.device.events import Part

REFUSAL = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 139264, available: 101376, context: []"


def _refuse(*arguments: object, **options: object) -> None:
    raise jax.errors.JaxRuntimeError(REFUSAL)


def check_without_kernel(part: Part) -> None:
    """The check of the kernels where that of attention does not compile."""
    from bench.device import kernels
    from jsg.kernels_pallas.native import attention

    attention.paged_attention = _refuse
    kernels.check(part)


def speed_without_kernel(part: Part) -> None:
    """The speed of attention there."""
    from bench.device import kernels
    from jsg.kernels_pallas.native import attention

    attention.paged_attention = _refuse
    kernels.measure(part)


def check_wrong_kernel(part: Part) -> None:
    """The check of one case where attention is a little wrong."""
    from bench import attention_check
    from bench.device.correctness import Correctness
    from jsg.kernels_pallas.native import attention

    right = attention.paged_attention
    attention.paged_attention = lambda *arguments, **options: 1.1 * right(*arguments, **options)
    correctness = Correctness(part)
    error = attention_check.largest_error(attention_check.BATCHES[0], "float32", heads=4, kv_heads=2, head_dim=32)
    correctness.add("attention error", error, 1e-3, "paged_attention")
    correctness.end()


def lose_device(part: Part) -> None:
    """A figure, and then a TPU that does not answer any more."""
    part.add("before", "ms", [1.0], kind="before")
    raise jax.errors.JaxRuntimeError("UNAVAILABLE: TPU device error: core halted unexpectedly")


def take_all_memory(part: Part) -> None:
    """A figure, and an array that no machine has room for."""
    part.add("before", "ms", [1.0], kind="before")
    part.attempt("the largest load", lambda: jnp.zeros((2**24, 2**24)).block_until_ready())


def hang(part: Part) -> None:
    """A figure, and then nothing."""
    part.add("before", "ms", [1.0], kind="before")
    time.sleep(600)
