"""Which models are refused before their weights come, and for which reason."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from jsg.config import EngineConfig
from jsg.engine.find import find_model
from jsg.errors import ModelError
from tests.fake_hub import fake_hub
from tests.golden.variants import LLAMA

WEIGHTS = "model.safetensors"


def shape(architecture: str, **fields: Any) -> dict[str, Any]:
    """A published `config.json`, shortened."""
    return {"architectures": [architecture], "torch_dtype": "bfloat16", **fields}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
TEXT = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
UNKNOWN = {
    "qwen3-vl": shape("Qwen3VLForConditionalGeneration", text_config={**TEXT, "model_type": "qwen3_vl_text"}),
    "qwen3-vl-fp8": shape("Qwen3VLMoeForConditionalGeneration", text_config=TEXT, quantization_config=FP8),
    "qwen2.5-vl": shape("Qwen2_5_VLForConditionalGeneration", **TEXT, vision_config={"depth": 32}),
    "kimi-k2.5": shape("KimiK25ForConditionalGeneration", text_config={"quantization_config": PACKED}),
    "gemma3n": shape("Gemma3nForConditionalGeneration", text_config=TEXT, audio_config=None),
    "phi-2": shape("PhiForCausalLM", **TEXT, hidden_act="gelu_new"),
    "mamba": shape("MambaForCausalLM", d_model=768, n_layer=24, vocab_size=50280),
    "falcon-h1": shape("FalconH1ForCausalLM", **TEXT, mamba_d_state=128),
    "t5": shape("T5ForConditionalGeneration", d_model=512, num_heads=8, is_encoder_decoder=True),
    "bert": shape("BertModel", hidden_size=384, hidden_act="gelu", position_embedding_type="absolute"),
    "whisper": shape("WhisperForConditionalGeneration", d_model=1280, encoder_layers=32, num_mel_bins=128),
    "gpt2": shape("GPT2LMHeadModel", n_embd=768, n_layer=12, n_head=12, activation_function="gelu_new"),
    "internvl": shape("InternVLChatModel", llm_config={"architectures": ["Qwen2ForCausalLM"]}),
    "jamba-nvfp4": shape("JambaForCausalLM", **TEXT, quantization_config=MODELOPT["quantization"]),
    "llada": shape("LLaDAModelLM", d_model=4096, n_heads=32, mlp_ratio=4),
    "bitnet": shape("BitNetForCausalLM", **TEXT, hidden_act="relu2", quantization_config={"quant_method": "bitnet"}),
    "a list": {"architectures": ["XForCausalLM"], "hidden_size": [1, 2]},
}
_FLOAT4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 64, "strategy": "group"}}
QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits must be 4 or 8, but is 3"),
    "marlin": ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "'marlin'"),
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "but is 'gemv'"),
    "bnb": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
    "fp8": ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt must be e4m3 or float8_e4m3fn, but is 'e5m2'"),
    "no list": ({"quantization_config": {**FP8, "modules_to_not_convert": "lm_head"}}, "be a list of names of modules"),
    "fp8 unknown": ({"quantization_config": {**FP8, "hadamard": 64}}, "fp8 has no field 'hadamard'"),
    "fbgemm": ({"quantization_config": {"quant_method": "fbgemm_fp8", "transposed": True}}, "'transposed'"),
    "packed": ({"quantization_config": PACKED}, "config_groups must name a group, but is absent or null"),
    "float 4": ({"quantization_config": {**PACKED, "config_groups": {"a": _FLOAT4}}}, "group_size must be "),
    "sparse": ({"quantization_config": {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}}, "-bitmask'"),
    "old llm-compressor": ({"compression_config": {"format": "float-quantized"}}, "compression_config"),
    "exl2": ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, "'exl2'"),
    "modelopt": ({"quantization_config": {"quant_algo": "W4A8_AWQ"}}, "quant_algo must be .*, but is 'W4A8_AWQ'"),
    "mlx": ({"quantization": {"group_size": 64, "bits": 4}}, "quant_method must be .*, but is absent or null"),
    "quark": ({"quantization_config": {"quant_method": "quark"}}, "'quark'"),
    "no object": ({"quantization_config": "int8"}, "but is 'int8'"),
}


def write(directory: Path, config: Mapping[str, Any] | None, *others: str) -> Path:
    """A directory with this `config.json` and with empty files of these names."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    for other in others:
        (directory / other).parent.mkdir(exist_ok=True)
        (directory / other).touch()
    return directory


def refusal(path: Path | str, **options: Any) -> str:
    """The reason for which a model is refused."""
    with pytest.raises(ModelError) as raised:
        find_model(EngineConfig(model_path=str(path), **options))
    reason = str(raised.value)
    assert len(reason) < 450
    return reason


def test_an_unknown_architecture_is_the_reason_whatever_else_is_wrong(tmp_path: Path) -> None:
    for name, config in UNKNOWN.items():
        for files in ((WEIGHTS,), ("hf_quant_config.json",), ("pytorch_model.bin",)):
            reason = refusal(write(tmp_path / name / files[0], config, *files))
            assert "the architecture must be one of Llama, Mistral" in reason and "…ForCausalLM" in reason, name
            assert f"config.json names {config['architectures'][0]!r}" in reason, name


def test_quantised_weights_of_a_served_family_are_refused_by_field_and_value(tmp_path: Path) -> None:
    llava = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    for name, (fields, named) in QUANTISED.items():
        for base in (LLAMA, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}, llava):
            reason = refusal(write(tmp_path / name, {**base, **fields}, WEIGHTS))
            assert "--quantization for 8 or 4 bits" in reason and re.search(named, reason), (name, reason)
        half = {**llava, "text_config": {"model_type": "llama", **fields}}
        assert "text_config: " in refusal(write(tmp_path / f"{name} half", half, WEIGHTS))
    directory = write(tmp_path / "nvidia", LLAMA, WEIGHTS)
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "INT4_AWQ"}}))
    assert "hf_quant_config.json: quantization: quant_algo must be " in refusal(directory)
    for old, bits in {"quantize_config.json": "bits", "quant_config.json": "w_bit"}.items():
        directory = write(tmp_path / old, LLAMA, WEIGHTS)
        (directory / old).write_text(json.dumps({bits: 3, "group_size": 128}))
        assert f"{old}: {bits} must be 4" in refusal(directory)
        (directory / old).write_text(json.dumps({bits: 4, "group_size": 128}))
        assert find_model(EngineConfig(model_path=str(directory))) == directory
    pixtral = {**llava, "vision_config": {"model_type": "pixtral"}, "text_config": {"norm_eps": 1e-5, "unknown": 7}}
    for fields in ({}, {"quantization_config": {"quant_method": "quark"}}):
        reason = refusal(write(tmp_path / "pixtral", {**pixtral, **fields}, WEIGHTS))
        assert "vision_config: model_type must be clip_vision_model, the only supported tower" in reason
    other = {**llava, "text_config": {"model_type": "gemma", "quantization_config": FP8}, "quantization_config": FP8}
    assert "text_config: model_type must be one of llama, mistral" in refusal(write(tmp_path / "gemma", other, WEIGHTS))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["adapter_config.json", "adapter_model.safetensors", "training_args.bin"], "LoRA adapter.*merge_and_unload"),
        (["adapter_config.json", "adapter_model.bin", "tokenizer.json"], "LoRA adapter"),
        (["params.json", "consolidated.safetensors", "tekken.json"], "own form of Mistral"),
        (["params.json", "consolidated.00.pth", "tokenizer.model"], "own form of Mistral or Meta"),
        (["pytorch_model.bin"], r"pickles of PyTorch \(such as pytorch_model.bin\)"),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], "pickles"),
        (["model.ckpt"], "pickles"),
        (["tf_model.h5"], "TensorFlow"),
        (["flax_model.msgpack"], "Flax"),
        (["model.onnx"], "ONNX"),
        (["a.pt", "training_args.bin"], "pickles"),
        (["openvino_model.xml", "openvino_model.bin"], "OpenVINO"),
        (["mlc-chat-config.json", "params_shard_0.bin"], "MLC"),
        (["rank0.safetensors"], "TensorRT-LLM"),
        (["model.bin", "shared_vocabulary.json"], "CTranslate2"),
        (["model.mlpackage", "x.tflite"], "Core ML"),
        (["model_config.yaml", "model_weights"], "training .NeMo"),
        (["global_step100", "zero_to_fp32.py", "rng_state_0.pth"], "training .*DeepSpeed"),
        (["pytorch_model_fsdp_0", "optimizer.bin"], "training .*FSDP"),
        ([".metadata", "__0_0.distcp"], "training"),
        (["ggml-model-q4_0.bin"], "GGUF"),
        (["model_index.json", "unet/diffusion_pytorch_model.safetensors"], "diffusers"),
        (["model-00001-of-00002.safetensors"], "without the index of shards"),
        (["README.md"], "has no weights.*--load-format dummy"),
        ([], "has no weights"),
    ],
)
def test_weights_of_another_form_are_named_as_what_they_are(tmp_path: Path, files: list[str], named: str) -> None:
    for name, config in {"none": None, "whole": LLAMA, "only a type": {"model_type": "llama"}}.items():
        directory = write(tmp_path / name, config, *files)
        with pytest.raises(ModelError, match=rf"must have model.safetensors .*orbax.json, but .*{named}"):
            find_model(EngineConfig(model_path=str(directory)))


def test_a_section_that_names_no_quantisation_is_no_reason(tmp_path: Path) -> None:
    """As TensorRT-LLM and ModelOpt write it for a model that they left alone."""
    for number, section in enumerate(({}, {"quant_algo": None, "kv_cache_quant_algo": None})):
        for name in ("quantization_config", "quantization", "compression_config"):
            directory = write(tmp_path / f"{name}{number}", {**LLAMA, name: section}, WEIGHTS)
            assert find_model(EngineConfig(model_path=str(directory))) == directory


def test_of_two_forms_one_must_be_chosen_and_be_there(tmp_path: Path) -> None:
    both = write(tmp_path / "both", LLAMA, WEIGHTS, "orbax.json")
    assert "say which with --load-format" in refusal(both)
    for chosen, other in (("safetensors", "orbax.json"), ("orbax", "model.safetensors.index.json")):
        assert find_model(EngineConfig(model_path=str(both), load_format=chosen)) == both
        assert "the other form" in refusal(write(tmp_path / chosen, LLAMA, other), load_format=chosen)
    bare = write(tmp_path / "bare", LLAMA)
    assert find_model(EngineConfig(model_path=str(bare), load_format="dummy")) == bare


@pytest.mark.parametrize(
    "name",
    [
        "/nonexistent",
        "./x",
        "../x",
        "~/nonexistent",
        "~nobody-here/x",
        "a/b/c",
        "owner/",
        "x/",
        ".",
        "hf.co/a/b:Q4",
        "",
    ],
)
def test_what_looks_like_a_path_is_not_asked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(write(tmp_path / "empty", None))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    reason = refusal(name)
    assert ("must have model.safetensors" if name == "." else "none of these; correct the path") in reason


def test_a_home_directory_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = write(tmp_path / "model", LLAMA, WEIGHTS)
    assert find_model(EngineConfig(model_path="~/model")) == model
    assert "GGUF" in refusal(write(tmp_path, None, "a.gguf") / "a.gguf")
    for file in (WEIGHTS, "config.json"):
        assert "serve its directory" in refusal(model / file)


def test_a_hub_name_is_judged_by_its_config_before_the_rest_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client, over a socket. A refused model costs one small file, and its cached part is no whole model."""
    files = {"config.json": b"{}", "generation_config.json": b"{}", "tokenizer.json": b"{ }", WEIGHTS: b"w" * 1000}
    quantised = json.dumps({**LLAMA, "quantization_config": {"quant_method": "quark"}}).encode()
    repositories = {
        "a/good": {**files, "config.json": json.dumps(LLAMA).encode()},
        "a/unknown": {**files, "config.json": json.dumps(UNKNOWN["qwen3-vl"]).encode()},
        "a/quantised": {**files, "config.json": quantised},
        "a/split": {**files, "config.json": json.dumps(LLAMA).encode()},
        "a/gguf": {"config.json": b'{"model_type": "llama"}', "Q4/a.gguf": b"w"},
        "a/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w"},
    }
    with fake_hub(repositories) as hub:
        template = hub.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        for _ in range(2):
            assert "'Qwen3VLForConditionalGeneration'" in refusal("a/unknown")
            assert "but is 'quark'" in refusal("a/quantised") and "GGUF" in refusal("a/gguf")
            assert "LoRA" in refusal("a/adapter") and "--tp-size must divide" in refusal("a/split", tp_size=3)
        assert set(hub.fetched) == {"config.json", "generation_config.json", "adapter_config.json"}
        hub.fetched.clear()
        dummy = find_model(EngineConfig(model_path="a/good", load_format="dummy"))
        assert sorted(hub.fetched) == ["config.json", "generation_config.json", "tokenizer.json"]
        assert find_model(EngineConfig(model_path="a/good")) == dummy
        assert (dummy / WEIGHTS).read_bytes() == b"w" * 1000
    assert find_model(EngineConfig(model_path="a/good")) == dummy  # from the cache, without the hub
