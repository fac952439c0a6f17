"""Kernels in few bits as a TPU reads them."""

import jax
import jax.numpy as jnp
import numpy as np

from jsg.engine.device import few_bits_kernels
from jsg.models.layers import Linear
from tests.kernels_pallas.test_few_bits_matmul import FORMS, made, rows


def test_results_are_the_same_when_inputs_lie_elsewhere():
    linear = Linear(("x",), 128, (2, 24), jnp.bfloat16)
    linear.kernel.set_value(made(FORMS["gptq with an order"], 128, (2, 24)))
    x = rows(3, 128)
    before = linear(x)
    few_bits_kernels.lay_out(linear)
    assert linear.kernel.get_value().shape == (2, 128, 24)
    np.testing.assert_array_equal(linear(x), before)
    shapes = jax.tree.map(lambda part: part.shape, linear.kernel.get_value())
    linear.kernel.set_value(jax.eval_shape(lambda: made(FORMS["gptq with an order"], 128, (2, 24))))
    few_bits_kernels.lay_out(linear)
    assert jax.tree.map(lambda part: part.shape, linear.kernel.get_value()) == shapes, "and so are abstract ones"
