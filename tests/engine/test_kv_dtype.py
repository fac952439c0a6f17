"""`--kv-cache-dtype`: a pool of 8-bit floats takes a quarter of the memory, and answers change only by its rounding."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jsg.config import EngineConfig
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.errors import ConfigError
from jsg.models.loading import resolve_kv_dtype
from jsg.types import Request, SamplingParams
from tests.engine import small

EIGHT_BITS = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_auto_is_the_type_of_the_model(compute: str):
    assert resolve_kv_dtype("auto", jnp.dtype(compute)) == jnp.dtype(compute)
    for name, dtype in EIGHT_BITS.items():
        assert resolve_kv_dtype(name, jnp.dtype(compute)) == dtype


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of auto, fp8_e4m3, fp8_e5m2, but got 'int8'"):
        EngineConfig(kv_cache_dtype="int8")


def score(core: EngineCore, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of every prompt token but the first, and the likeliest token in its place."""
    sampling = SamplingParams(max_new_tokens=0, temperature=0)
    requests = [
        Request(rid=str(i), input_ids=tuple(prompt), sampling=sampling, return_logprob=True, logprob_start_len=0,
                top_logprobs_num=1)
        for i, prompt in enumerate(prompts.tolist())
    ]  # fmt: skip
    outcomes = small.run(core, [(0, request) for request in requests])
    scores = [score for outcome in outcomes.values() for score in (outcome.prompt_logprobs or ())[1:]]
    return np.array([score.logprob for score in scores]), np.array([score.top[0][0] for score in scores])


@pytest.mark.parametrize(
    ("name", "error"), [("fp8_e4m3", 2**-4), pytest.param("fp8_e5m2", 2**-3, marks=pytest.mark.slow)]
)
def test_eight_bits_are_a_quarter_of_the_room_and_hardly_another_answer(
    name: str, error: float, core_of, small_model: pathlib.Path, compile_cache_dir: str
):
    prompts = np.random.default_rng(0).integers(2, small.VOCAB, (4, 150))
    expected, likeliest = score(core_of(**small.DETERMINISTIC), prompts)
    told: list[Progress] = []
    knobs = {**small.DETERMINISTIC, "kv_cache_dtype": name}
    core = small.make_core(small_model, compile_cache_dir, report=told.append, **knobs)
    dtype = jnp.dtype(EIGHT_BITS[name])
    assert (core.info.dtype, core.info.kv_dtype) == ("float32", dtype.name)
    plan = next(progress for progress in told if progress.stage == "plan")
    per_token = 2 * small.MODEL["num_hidden_layers"] * small.MODEL["num_key_value_heads"] * small.MODEL["head_dim"]
    assert f"1024 tokens of {per_token} bytes" in plan.text and dtype.name in plan.text
    assert all(array.dtype == dtype for layer in core._runner.replica.state.pool.layers for array in layer)
    found, top = score(core, prompts)
    core.close()
    differences = np.abs(found - expected)  # `error` is the largest of one rounding, relative
    assert 0 < differences.mean() < error and differences.max() < 16 * error
    assert (top == likeliest).mean() > 1 - 2 * error
