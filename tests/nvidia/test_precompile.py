"""`jsg compile --target`: every program of a model for a card that is not here, in a folder."""

import json
import pathlib

import pytest

from jsg.config import EngineConfig
from jsg.engine.device import program_store
from jsg.engine.device.cards import card
from jsg.engine.precompile import precompile
from jsg.errors import ConfigError
from tests.engine import small


@pytest.mark.parametrize(("tp_size", "quantization"), [(1, "int8"), pytest.param(2, "none", marks=pytest.mark.long)])
def test_programs_of_a_model_for_a_card(tmp_path: pathlib.Path, tp_size: int, quantization: str):
    """That a GPU loads them is not shown: there is none."""
    model = small.write_model(tmp_path / "model", vocab_size=128, num_key_value_heads=2)
    sizes = {"max_running_requests": 8, "chunked_prefill_size": 16, "tp_size": tp_size}
    config = EngineConfig(model_path=str(model), load_format="dummy", quantization=quantization, **sizes)
    with small.few_variants():
        precompile(config, tmp_path / "out", lambda progress: None, "h100")
    store = program_store.open_store(tmp_path / "out")
    assert store.conditions["device"] == f"{tp_size} of compute capability 9.0"
    assert store.conditions["--dtype"] == "bfloat16"
    assert store.plan.limit_bytes == int(card("h100").memory_bytes * config.mem_fraction_static)
    assert sum("forward" in name for name in store.files) >= 2
    with pytest.raises(ConfigError, match=r"was compiled for device . of compute capability 9.0, but this start has"):
        store.check({**store.conditions, "device": "1 of compute capability 8.0"})
    manifest = json.loads((tmp_path / "out" / program_store.MANIFEST).read_text())
    assert len(manifest["programs"]) == len(list((tmp_path / "out").iterdir())) - 1
