"""The fields of published models are read as their authors mean them: at least three files of each family.

Nothing is allocated. That a shape is read whole shows in the number of parameters.
"""

import collections
import itertools
from pathlib import Path
from typing import Any

import pytest

from jsg.errors import ModelError
from jsg.models.block_spec import ExpertsSpec, RopeSpec
from jsg.models.family import STATES_NOTE
from jsg.models.registry import FAMILIES, WRAPPERS
from jsg.models.spec import ModelSpec
from jsg.window import Window
from tests.models.published import PUBLISHED, Published
from tests.models.sizes import num_parameters
from tests.models.test_config import read
from tests.models.test_published_llavas import VISION

FEWER = {
    "Ernie4_5ForCausalLM": 2,
    "Glm4MoeLiteForCausalLM": 2,
    "KimiLinearForCausalLM": 1,
    "Lfm2MoeForCausalLM": 1,
    "Lfm2VlForConditionalGeneration": 2,
    "LlavaForConditionalGeneration": 2,
    "MinistralForCausalLM": 1,
    "Mistral4ForCausalLM": 1,
    "SmolLM3ForCausalLM": 2,
    # `test_hybrid_shapes.py` has their states and keys; the exact numbers of parameters are not remembered.
    "GraniteMoeHybridForCausalLM": 0,
    "NemotronHForCausalLM": 0,
    "Qwen3NextForCausalLM": 0,
    "Qwen3_5ForCausalLM": 0,
    "Qwen3_5MoeForCausalLM": 0,
    "Qwen3_5ForConditionalGeneration": 0,
    "Qwen3_5MoeForConditionalGeneration": 0,
}
"""Families of which fewer than three models are remembered."""


def differences(spec: ModelSpec, of: Published, more_parameters: int = 0) -> dict[str, tuple[Any, Any]]:
    """What was read otherwise than the fields and the table say, by name."""
    file = of.file
    attentions = [layer.attention for layer in spec.layers if layer.attention.kv_shape is not None]
    blocks = [layer.experts for layer in spec.layers if layer.experts is not None]
    count = num_parameters(spec) - more_parameters
    is_near = abs(count - of.parameters) <= (0 if isinstance(of.parameters, int) else 0.002 * of.parameters)
    heads = of.heads or {(file["num_attention_heads"], of.kv_heads, of.head_dim)}
    pairs = {
        "architecture": (spec.architecture, file["architectures"][0]),
        "width": (spec.hidden_size, file["hidden_size"]),
        "layers": (spec.num_layers, file["num_hidden_layers"]),
        "vocabulary": (spec.vocab_size, file["vocab_size"]),
        "context": (spec.max_position_embeddings, file.get("max_position_embeddings", spec.max_position_embeddings)),
        "heads": ({(each.heads, each.kv_heads, each.head_dim) for each in attentions}, heads),
        "windows": ({each.window for each in attentions}, of.windows),
        "experts": ({(mlp.count, mlp.router.choice.per_token) for mlp in blocks}, {of.experts} - {None}),
        "parameters": (count, count if is_near else of.parameters),
    }
    return {name: (found, expected) for name, (found, expected) in pairs.items() if found != expected}


def test_a_published_file_is_read(tmp_path: Path):
    for name, of in PUBLISHED.items():
        spec = read(tmp_path, of.file)
        assert (name, differences(spec, of), spec.notes) == (name, {}, (STATES_NOTE,) if spec.state_shapes else ())


def test_the_text_halves_of_published_models(tmp_path: Path):
    """With the head of the embedding, and with one of its own."""
    around = [(name, of) for name, of in PUBLISHED.items() if of.inside]
    for (name, of), is_tied in itertools.product(around, (False, True)):
        text = of.file | {"tie_word_embeddings": is_tied}
        whole = {"architectures": [of.inside], "text_config": text, "tie_word_embeddings": is_tied}
        was_tied = of.file.get(
            "tie_word_embeddings", FAMILIES[of.file["architectures"][0]].defaults["tie_word_embeddings"]
        )
        more = of.file["hidden_size"] * of.file["vocab_size"] * (was_tied - is_tied)
        assert (name, differences(read(tmp_path, whole), of, more)) == (name, {})


def test_of_every_family_three_published_files_are_read():
    counts = collections.Counter(of.file["architectures"][0] for of in PUBLISHED.values())
    counts.update(of.inside for of in PUBLISHED.values() if of.inside)
    counts.update(config["architectures"][0] for config, *_ in VISION.values())
    needed = dict.fromkeys([*FAMILIES, *WRAPPERS], 3) | FEWER
    assert {name: counts[name] for name, count in needed.items() if counts[name] < count} == {}


def test_experts_of_gpt_oss_in_mxfp4_are_restored(tmp_path: Path):
    """The published files differ from those of the table in this field."""
    config = PUBLISHED["gpt-oss-20b"].file | {"quantization_config": {"quant_method": "mxfp4"}}
    assert "the kernels are quantised (mxfp4);" in read(tmp_path, config).notes[-1]


def test_windows_of_gpt_oss_are_those_of_every_other_layer(tmp_path: Path):
    spec = read(tmp_path, PUBLISHED["gpt-oss-20b-bf16"].file)
    assert spec.layer_windows == (Window(128), None) * 12


def test_rope_of_mixtral_is_plain(tmp_path: Path):
    for name in ("mixtral-8x7b", "mixtral-8x22b"):
        assert {layer.attention.rope for layer in read(tmp_path, PUBLISHED[name].file).layers} == {RopeSpec(theta=1e6)}


def test_layers_of_llama_4_are_of_several_kinds(tmp_path: Path):
    """Those with rope have windows and norms, and others growing queries; Maverick has experts in every other one."""
    scout, maverick = (read(tmp_path, PUBLISHED[f"llama-4-{name}"].file) for name in ("scout", "maverick"))
    window = Window(8192, is_aligned=True)
    for spec, has_norms in ((scout, True), (maverick, False)):
        assert spec.layer_windows == (window, window, window, None) * 12
        kinds = [(x.rope is None, x.qk_norm is None, x.query_scale is None) for x in (y.attention for y in spec.layers)]
        assert kinds == ([(False, not has_norms, True)] * 3 + [(True, True, False)]) * 12
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in maverick.layers] == [False, True] * 24
    kinds = ["full_attention"] * 47 + ["chunked_attention"]
    named = read(tmp_path, PUBLISHED["llama-4-scout"].file | {"layer_types": kinds, "attn_temperature_tuning": False})
    assert named.layer_windows == (None,) * 47 + (window,)
    assert {layer.attention.query_scale for layer in named.layers} == {None}
    with pytest.raises(ModelError, match="moe_layers must be a list of numbers of layers below 48"):
        read(tmp_path, PUBLISHED["llama-4-scout"].file | {"moe_layers": [48]})
