"""Rounds kernels to 8 or 4 bits, with scales. Activations are not rounded. See `kernels_pallas.few_bits.Quantised`.

In 8 bits each output channel has a float32 scale. The rounding is symmetric, with the largest number of a channel at
the end of the range, to nearest and ties to even: Wu et al. 2020 (arXiv:2004.09602) for int8, Micikevicius et al. 2022
(arXiv:2209.05433) for e4m3. In 4 bits each 32 inputs of a channel have a scale.

Families have no code for it: parameters that name the axis which products sum over are declared anew, and the loader
fills what is declared.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import TYPES, Quantised, zeros
from jsg.kernels_pallas.form import Form
from jsg.models.origin import Origin
from jsg.models.published.kernel import DROPPED_BITS

FORMS: Mapping[str, Form] = {
    "int8": Form("int8"),
    "fp8": Form("e4m3"),
    "int4": Form("int4", 32, "bfloat16", is_exact=True),
}
"""`--quantization` → how kernels are kept. The groups of int4 are as long as what an instruction of AMX takes."""
STORED = {name: TYPES[form.numbers] for name, form in FORMS.items() if form.scales_columns}
"""Those in 8 bits → the type of the stored numbers."""
BYTES_PER_NUMBER = {name: form.bytes_per_number for name, form in FORMS.items()}
"""`--quantization` → bytes of a number, with its part of the scale of a group."""


def declare(module: nnx.Module, form_of: Callable[[Origin], Form | None]) -> None:
    """Declares the module's kernels anew, each in a form; None leaves it. For use under `nnx.eval_shape`.

    Raises:
        ModelError: The inputs of a kernel are not whole groups.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param) and (axis := node.get_metadata("summed_axis")) is not None:
            form = form_of(node.get_metadata("origin"))
            if form is None:
                continue
            if node.shape[axis] % (form.group or 1):
                raise ModelError(
                    f"--quantization int4 needs kernels whose number of inputs is a multiple of {form.group}, but "
                    f"{node.get_metadata('origin').sources[0].name} has {node.shape[axis]}; int8 works with any"
                )
            node.set_value(zeros(form, node.shape, axis))


def quantise(tensor: Num[Array, "out in"] | Num[np.ndarray, "out in"], name: str, form: Form) -> Quantised:
    """A projection of a checkpoint, [out, in], in 8 or 4 bits. A channel is a row.

    In 8 bits `scale` is max|w| / 127 or max|w| / 448 to within a rounding, if that is a normal float32. Then no number
    is off by more than half a step: scale / 2 in int8; in e4m3 a sixteenth of the number, or scale / 1024 if that is
    more. In 4 bits no number is off by more than scale / 2 either: see `_in_4_bits`.

    Args:
        tensor: In any floating type; the computation is in float32.
        name: The tensor's name, for the error.
        form: One of `FORMS`.

    Raises:
        ModelError: A number is not finite.
    """
    numbers = np.asarray(tensor, np.float32)
    if not np.isfinite(numbers).all():  # of all numbers, because a maximum may ignore NaN
        raise ModelError(
            f"{name} must hold finite numbers to be quantised, but has NaN or infinity; is the checkpoint whole? "
            "Without --quantization it is loaded as it is"
        )
    if form.per_byte == 2:
        return _in_4_bits(numbers, form)
    dtype, largest = jnp.dtype(TYPES[form.numbers]), np.max(np.abs(numbers), axis=1, keepdims=True)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    # Reciprocals, because XLA replaces a division by one for some numbers of rows and not for others, and numpy never.
    scale = np.maximum(largest * (1 / limit), jnp.finfo(jnp.float32).tiny)  # not 0 for a channel of zeros
    scaled = numbers * (1 / scale)
    return Quantised((np.round(scaled) if is_integer else scaled).astype(dtype), scale, form)


def _in_4_bits(numbers: Float[np.ndarray, "out in"], form: Form) -> Quantised:
    """Numbers from -8 to 7. A scale may be negative: the side with the larger numbers has 8 steps.

    The scale is rounded up to the next number of five significant bits, so that no number lies beyond the range.
    """
    groups = numbers.reshape(len(numbers), -1, form.group or numbers.shape[1])
    above, below = np.max(groups, axis=2), -np.min(groups, axis=2)
    step = np.maximum(np.maximum(above, below) * (1 / 8), np.minimum(above, below) * (1 / 7))
    bits = np.maximum(step, jnp.finfo(jnp.float32).tiny).view(np.uint32)
    whole = (bits + ((1 << DROPPED_BITS) - 1)) >> DROPPED_BITS << DROPPED_BITS
    scale = np.where(below >= above, whole.view(np.float32), -whole.view(np.float32))
    codes = (np.clip(np.round(groups * (1 / scale)[..., None]), -8, 7) + 8).astype(np.uint8)
    pairs = codes.reshape(len(numbers), -1, 2)
    return Quantised(pairs[..., 0] | pairs[..., 1] << 4, scale.astype(jnp.bfloat16), form)
