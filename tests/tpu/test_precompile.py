"""`jsg compile --target`: every program of a model for a TPU that is not here, in a folder that a start takes."""

import dataclasses
import pathlib

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsg.config import EngineConfig
from jsg.engine.device import program_store, tpus
from jsg.engine.device.targets import traced_for
from jsg.engine.precompile import begin_for, precompile
from jsg.errors import ConfigError
from tests.engine import small

LONG = [("v6e", 4, "none"), ("v5p", 1, "int4"), ("tpu7x", 2, "fp8")]


@pytest.mark.parametrize(
    ("name", "tp_size", "quantization"),
    [("v5e", 2, "int8"), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_a_start_takes_the_programs_of_a_model_for_a_tpu(
    tmp_path: pathlib.Path, name: str, tp_size: int, quantization: str
):
    """That a TPU loads them is not shown: there is none."""
    model = small.write_model(tmp_path / "model", vocab_size=128, num_key_value_heads=4, num_attention_heads=4)
    sizes = {"max_running_requests": 8, "chunked_prefill_size": 16, "tp_size": tp_size, "quantization": quantization}
    config = EngineConfig(model_path=str(model), load_format="dummy", **sizes)
    with small.few_variants():
        precompile(config, tmp_path / "out", lambda progress: None, name)
    store = program_store.open_store(tmp_path / "out")
    target = tpus.target(name)
    assert store.plan.limit_bytes == int(target.memory_bytes * config.mem_fraction_static)
    assert sum("forward" in name for name in store.files) >= 2

    mesh = target.mesh(tp_size, 1)
    with traced_for(mesh):
        settings = begin_for(config, target, mesh)
    named = {device.device_kind for device in mesh.devices.flat}
    there = dataclasses.replace(settings.device, kind=named.pop(), described_bytes=None)  # as `open_device` finds it
    conditions = dataclasses.replace(settings, device=there).conditions()
    store.check(conditions)
    assert conditions["libtpu"] != "missing" and "jax-cuda13-plugin" not in conditions
    with pytest.raises(
        ConfigError, match=f"for device tpu: {'' if tp_size == 1 else f'{tp_size} x '}{target.kind}, but"
    ):
        store.check({**conditions, "device": "tpu: TPU v4"})


@pytest.mark.parametrize("name", tpus.NAMES)
def test_memory_is_what_a_program_may_have(name: str):
    """One that needs more is refused, with two digits behind the point."""
    mesh = tpus.mesh_of(name)
    most = refused(mesh)
    assert most == f"{tpus.target(name).memory_bytes / 2**30:.2f}G"


def refused(mesh: Mesh) -> str:
    halves = jax.ShapeDtypeStruct((2**18, 2**20), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="exceeds available HBM") as caught:
        jax.jit(lambda x: x + 1).lower(halves).compile()
    return str(caught.value).partition("available HBM (")[2].partition(")")[0]
