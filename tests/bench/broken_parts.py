"""Parts of `bench.device` in which something goes wrong on purpose: the catalogue of a test names them."""

import time

import jax
import jax.numpy as jnp

from bench.device import kernels, steps
from bench.device.events import Part
from jsg.kernels_pallas.native import attention

REFUSAL = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 139264, available: 101376, context: []"


def _refuse(*arguments: object, **options: object) -> None:
    raise jax.errors.JaxRuntimeError(REFUSAL)


def check_without_kernel(part: Part) -> None:
    """The check of the kernels where that of attention does not compile."""
    attention.paged_attention = _refuse
    kernels.check(part)


def step_without_kernel(part: Part) -> None:
    """The bare step there."""
    attention.paged_attention = _refuse
    steps.measure(part)


def check_wrong_kernel(part: Part) -> None:
    """The check where attention is a little wrong."""
    right = attention.paged_attention
    attention.paged_attention = lambda *arguments, **options: 1.1 * right(*arguments, **options)
    kernels.check(part)


def take_all_memory(part: Part) -> None:
    """A figure, and an array that no machine has room for."""
    part.add("before", "ms", [1.0], kind="before")
    part.attempt("the largest load", lambda: jnp.zeros((2**22, 2**22)).block_until_ready())


def hang(part: Part) -> None:
    """A figure, and then nothing."""
    part.add("before", "ms", [1.0], kind="before")
    time.sleep(600)
