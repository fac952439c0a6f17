"""`--quantization`: an engine whose kernels are in 8 or 4 bits plans less memory, and answers nearly as before."""

import pathlib
from unittest import mock

import numpy as np
import pytest

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS
from jsg.errors import ConfigError
from tests.engine import small
from tests.engine.test_kv_dtype import score


@pytest.mark.parametrize("value", ["int3", "INT8", "fp8_e4m3", ""])
def test_an_unknown_kind_is_refused(value: str):
    with pytest.raises(ConfigError, match=f"--quantization must be one of none, int8, fp8, int4, but got '{value}'"):
        EngineConfig(quantization=value)


def test_xla_multiplies_8_bits_itself():
    """Otherwise it writes every kernel in bfloat16 first: docs/packages/models.md, "Kernels in 8 bits"."""
    options = {name: startup._compiler_options(EngineConfig(), "gpu", name) for name in ("none", "int8", "int4")}
    assert options == dict.fromkeys(("none", "int4"), COMPILER_OPTIONS["gpu"]) | {"int8": QUANTISED_OPTIONS["gpu"]}
    assert options["int8"] == {"xla_gpu_enable_triton_gemm": True} != options["none"]
    assert startup._compiler_options(EngineConfig(), "cpu", "int8") == {}


def weight_arrays(core: EngineCore) -> tuple:
    return core._runner.programs.leaves


@pytest.mark.parametrize(
    ("name", "error", "left"),
    [
        ("int8", 0.03, 0.6),
        pytest.param("fp8", 0.15, 0.6, marks=pytest.mark.slow),
        pytest.param("int4", 0.3, 0.5, marks=pytest.mark.slow),
    ],
)
def test_kernels_take_less_and_answers_hardly_change(
    name: str, error: float, left: float, core_of, small_model: pathlib.Path, compile_cache_dir: str
):
    prompts = np.random.default_rng(0).integers(2, small.VOCAB, (4, 150))
    plain = core_of(**small.DETERMINISTIC)
    expected, _ = score(plain, prompts)
    told: list[Progress] = []
    knobs = {**small.DETERMINISTIC, "quantization": name}
    has_unit = mock.patch.object(startup.machine_code, "is_faster_in_bfloat16", return_value=True)
    with has_unit, mock.patch.object(startup, "plan_memory", wraps=startup.plan_memory) as planned:
        core = small.make_core(small_model, compile_cache_dir, report=told.append, **knobs)
    plan = next(progress for progress in told if progress.stage == "plan")
    assert f"programs: float32, kernels in {name}, " in plan.text
    assert plan.text.split("shapes")[1].startswith("; --dtype bfloat16 would be faster on this CPU\n")

    weights_bytes = [sum(leaf.size * leaf.dtype.itemsize for leaf in weight_arrays(each)) for each in (core, plain)]
    assert {call.kwargs["weights_bytes"] for call in planned.call_args_list} == {weights_bytes[0]}
    assert weights_bytes[0] < left * weights_bytes[1], "embedding and head, which stay, are half of what remains"

    found, _ = score(core, prompts)
    assert 0 < np.abs(found - expected).mean() < error
    alone = np.concatenate([score(core, prompt[None])[0] for prompt in prompts])
    np.testing.assert_array_equal(alone, found)
    core.close()
