"""A model whose kernels lie in panels computes what it computes without, and its abstract model says its shapes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.engine.device.panels import lay_out
from jsg.kernels_pallas.inputs import Panels
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, load_model
from jsg.models.spec import ModelSpec
from tests.golden.variants import random_tensors, write_checkpoint
from tests.models.paged import PagedModel

TOKENS = list(range(20, 60))


def config_of(variant: str, directory: Path) -> ModelSpec:
    write_checkpoint(directory, variant, random_tensors(variant, 1))
    return read_spec(directory)


def logits(config: ModelSpec, model: nnx.Module) -> np.ndarray:
    """Of a prompt in tiles and of two tokens after it."""
    paged = PagedModel(config, model)
    prompt = paged.extend({1: TOKENS})[1]
    return np.concatenate([prompt, *(paged.decode({1: token})[1][None] for token in (7, 8))])


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [
        ("llama_tied", "none"),
        ("llama_biases", "int8"),
        ("llama_tied", "int4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama_biases", "none"),
                ("llama_tied", "int8"),
                ("llama_biases", "int4"),
                ("mixtral", "int4"),
                ("gpt_oss", "fp8"),
            )
        ),
    ],
)
def test_logits_are_those_of_the_plain_model(tmp_path: Path, variant: str, quantization: str):
    config = config_of(variant, tmp_path)
    plain, laid_out = (load_model(tmp_path, config, quantization=quantization) for _ in range(2))
    lay_out(laid_out)
    np.testing.assert_allclose(logits(config, laid_out), logits(config, plain), atol=2e-5)


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [("llama_tied", "int8"), ("llama_tied", "int4"), pytest.param("mixtral", "int4", marks=pytest.mark.slow)],
)
def test_an_abstract_model_is_laid_out_as_a_loaded_one(tmp_path: Path, variant: str, quantization: str):
    config = config_of(variant, tmp_path)
    loaded = load_model(tmp_path, config, quantization=quantization, dtype=jnp.bfloat16)
    abstract = abstract_model(config, jnp.bfloat16, quantization)
    for model in (loaded, abstract):
        lay_out(model)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model)) for model in (loaded, abstract)]
    assert shapes[0] == shapes[1]


def test_what_does_not_fill_panels_stays_as_it_is(tmp_path: Path):
    model = abstract_model(config_of("llama_tied", tmp_path), jnp.float16)
    before = jax.tree.structure(nnx.state(model))
    lay_out(model)
    assert jax.tree.structure(nnx.state(model)) == before, "products do not read float16"
    odd = abstract_model(dataclasses.replace(read_spec(tmp_path), vocab_size=333), jnp.float32)
    lay_out(odd)
    kinds = {
        type(param.get_value())
        for _, param in nnx.iter_graph(odd)
        if isinstance(param, nnx.Param) and param.get_metadata("is_kernel")
    }
    assert kinds == {Panels, jax.ShapeDtypeStruct}, "the table of 333 tokens, which is the head too, stays"
