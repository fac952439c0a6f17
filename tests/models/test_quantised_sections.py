"""Sections of published files that say how kernels are quantised: each is read, or refused for a stated reason."""

import json
import re

import pytest

from docs.tables.models import QUANTISED, verdict
from jsg.models.published.record import read_rule
from jsg.sources import FieldError, Fields

REASONS = {
    "3 bits": "bits must be 4 or 8, but is 3",
    "gemv": "version must be gemm or GEMM, but is 'gemv'",
    "marlin": "checkpoint_format must be gptq or gptq_v2, but is 'marlin'",
    "Sparse": "sparsity_config: format must be dense, but is 'sparse-24-bitmask'",
    "INT4-AWQ": "quant_algo must be FP8 or NVFP4 or W4A16_NVFP4 or MIXED_PRECISION, but is 'W4A16_AWQ'",
    "bnb": "but is 'bitsandbytes'",
    "mlx": "quant_method must be awq or compressed-tensors or .*, but is absent or null",
    "AutoRound": "but is 'auto-round'",
    "pytorch": "but is 'torchao'",
    "hqq": "but is 'hqq'",
    "exl2": "but is 'exl2'",
    "amd": "but is 'quark'",
    "AQLM": "but is 'aqlm'",
}


def test_each_recorded_section_is_read_or_refused_for_a_reason() -> None:
    recorded, refused = json.loads(QUANTISED.read_text()), dict[str, str]()
    for name, config in recorded.items():
        said = verdict(config)
        assert said, name
        if said.startswith("refused: "):
            refused[name] = said
    assert len(recorded) >= 40 and len(recorded) - len(refused) >= 25
    assert len(refused) == len(REASONS)
    for part, reason in REASONS.items():
        (said,) = (said for name, said in refused.items() if part in name)
        assert re.search(reason, said), (part, said)


def test_algorithms_that_are_not_read_are_named() -> None:
    """Blocks of e4m3, and NVFP4 whose inputs are scaled, are other forms than those whose names they contain."""
    algorithms = "quant_algo must be FP8 or NVFP4 or W4A16_NVFP4"
    for value in ("FP8_PB_WO", "fp8_pb_wo", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4_AWQ", "nvfp4_awq", "W4A8_AWQ"):
        section = {"quant_method": "modelopt", "quant_algo": value}
        assert verdict(section) == f"refused: {algorithms} or MIXED_PRECISION, but is {value!r}"
        layer = {"quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": value}}}
        said = verdict({**section, "quant_algo": "MIXED_PRECISION", **layer})
        assert said == f"refused: quantized_layers: model.layers.0.mlp.down_proj: {algorithms}, but is {value!r}"
    assert verdict({**section, **layer, "quant_algo": "NVFP4"}).startswith("refused: quantized_layers")
    layer["quantized_layers"] = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    assert verdict({**section, **layer, "quant_algo": "MIXED_PRECISION"}) == "modelopt, MIXED_PRECISION"
    said = verdict({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"})
    assert re.fullmatch("refused: quant_method must be awq or .*, but is 'auto-round'", said)


def test_expressions_that_could_take_forever_are_refused() -> None:
    """Python tries 2^n ways to share n characters out between two repeats, or n^k between k of them."""
    for pattern in ("re:(a+)+$", "re:(?:a|a)*b", "re:.*.*.*.*.*x", "re:(a{1,9}){1,9}b"):
        with pytest.raises(FieldError, match="must have expressions with at most 4 repeats, and none of a group, but"):
            read_rule(Fields("config.json", {"ignore": [pattern]}), "compressed-tensors", "ignore")
    for pattern in ("re:(?!.*shared)(up|down)?.*[*+]+$", r"re:(.*\.)?vision\*\+\{\..*"):
        read_rule(Fields("config.json", {"ignore": [pattern]}), "compressed-tensors", "ignore")


def test_lists_of_modules_mean_what_their_programs_mean() -> None:
    cases = {
        "transformers": {
            "lm_head": "lm_head model.lm_head",
            "gate": "mlp.gate mlp.shared_expert_gate",
            "model.layers.1": "model.layers.1 model.layers.1.mlp.up_proj",
            "model.layers.*.self_attn": "model.layers.11.self_attn.q_proj model.layers.0.self_attn",
            "mlp.(up|down)_proj": "mlp.up_proj mlp.down_proj",
            "*.visual": "",  # no expression
        },
        "modelopt": {
            "lm_head": "lm_head",
            "model.layers.1": "model.layers.1 model.layers.1.mlp.up_proj",
            "model.layers.0.self_attn*": "model.layers.0.self_attn",
            "*gate": "mlp.gate mlp.shared_expert_gate",
        },
        "compressed-tensors": {
            "lm_head": "lm_head",
            "re:.*self_attn.*": "model.layers.11.self_attn.q_proj model.layers.0.self_attn",
            "re:mlp.(up|down)": "mlp.up_proj mlp.down_proj",
            "model.layers.1": "model.layers.1",
        },
    }
    names = {name for patterns in cases.values() for meant in patterns.values() for name in meant.split()}
    for syntax, patterns in cases.items():
        for pattern, meant in patterns.items():
            rule = read_rule(Fields("config.json", {"ignore": [pattern]}), syntax, "ignore")
            assert {name for name in names if rule(name) == pattern} == set(meant.split()), (syntax, pattern)
