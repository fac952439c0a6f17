"""What is said of a model before its weights are here."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from huggingface_hub import constants
from safetensors.numpy import save_file

from bench.shapes import LLAMA_8B
from jsg import cli
from jsg.config import EngineConfig
from jsg.engine.device.cards import NAMES
from jsg.engine.dry_run import QUANTIZATIONS, DryRun, dry_run, weight_bytes
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, checkpoint_shapes
from jsg.models.tensor_parallel import bytes_on_one_device
from tests.fake_hub import fake_hub
from tests.golden.variants import VARIANTS, WIDE, random_tensors, variant_shapes
from tests.golden.vision_variants import VISION_VARIANTS

INDEX = "model.safetensors.index.json"
BROKEN = LLAMA_8B | {
    "attn_logit_softcapping": 30.0,
    "hidden_act": "relu",
    "quantization_config": {"quant_method": "awq", "bits": 2},
    "residual_multiplier": 0.22,
    "rope_parameters": None,
    "rope_scaling": {"type": "unheard of", "factor": 4.0},
}


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def write(directory: Path, config: dict[str, Any], index: dict[str, str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"weight_map": index}))
    return directory


def report(path: Path | str, **options: Any) -> DryRun:
    return dry_run(EngineConfig(model_path=str(path), **options))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", ["qwen3_moe_mixed", "smollm3", "mistral3", "llava"])
def test_layers_that_are_alike_are_counted_as_if_each_were_built(tmp_path, shape, quantization):
    config = {**VARIANTS, **VISION_VARIANTS}[shape]
    spec = read_spec(write(tmp_path, config))
    whole = abstract_model(spec, jnp.bfloat16, quantization)
    expected = sum(map(bytes_on_one_device, jax.tree.leaves(nnx.state(whole))))
    assert weight_bytes(spec, jnp.dtype(jnp.bfloat16), quantization, 1, 1)[0] == expected


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (4, 2)])
def test_devices_that_are_not_here_hold_as_much_as_those_that_are(tmp_path, tp_size, ep_size):
    config = WIDE["wide experts"] | {"num_key_value_heads": 4, "head_dim": 32}
    spec = read_spec(write(tmp_path, config)).over_devices(tp_size, ep_size)
    held, restored = weight_bytes(spec, jnp.dtype(jnp.float32), "int4", tp_size, ep_size)
    assert restored == 4 * 64 * 128 * 4 // tp_size
    whole, _ = weight_bytes(spec, jnp.dtype(jnp.float32), "int4", 1, 1)
    assert whole // tp_size < held < whole // tp_size + 4096, "norms, routers and scales are on each"


def test_kernels_of_4_bits_are_restored_for_rows_of_float32_only(tmp_path):
    for spec in (read_spec(write(tmp_path / name, WIDE[name])) for name in ("wide", "wide experts")):
        assert weight_bytes(spec, jnp.dtype("bfloat16"), "int4", 1, 1)[1] == 0
        assert weight_bytes(spec, jnp.dtype("float32"), "int4", 1, 1)[1]


def test_an_8b_llama_on_an_h200_and_on_smaller_cards(tmp_path):
    made = report(write(tmp_path, LLAMA_8B) / "config.json")
    assert (made.problems, made.kv_bytes, made.context_length) == ((), 131_072, 16_384)
    assert made.request_bytes == 131_072 * 16_384
    tokens = {(fit.card, fit.quantization, fit.tp_size): fit for fit in made.fits}
    assert len(tokens) == len(made.fits) == len(NAMES) * 16
    assert tokens["l4", "none", 1].tokens < 16_384 and not tokens["l4", "none", 1].fits
    assert tokens["l4", "int8", 1].fits
    refused, taken = tokens["a10g", "fp8", 1], tokens["l4", "fp8", 1]
    assert "compute capability 8.9" in refused.refusal and not refused.tokens
    assert taken.fits and taken.rounds_rows and not tokens["l4", "int8", 1].rounds_rows
    assert tokens["l4", "int4", 2].tokens > 2 * tokens["l4", "int4", 1].tokens
    shown = str(made)
    (rounding,) = [
        line for line in shown.splitlines() if line.startswith("products in e4m3, unless --fp8-products off")
    ]
    assert "h100" in rounding and "a100" not in rounding and "rtx_a6000" not in rounding
    assert "LlamaForCausalLM, 32 layers of width 4096" in shown and "15.0 GiB in bfloat16" in shown
    assert f"({tokens['l4', 'none', 1].tokens})" in shown


def test_programs_read_the_same_as_json(tmp_path, capsys):
    window = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 512}
    path = str(write(tmp_path, LLAMA_8B | window | {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": None}))
    assert cli.main(["check", path, "--dry-run", "--json", "--quantization", "int8", "--tp-size", "2"]) == 0
    shown, made = json.loads(capsys.readouterr().out), report(path, quantization="int8", tp_size=2)
    assert (shown["problems"], shown["dtype"], shown["context_length"]) == ([], "bfloat16", 16_384)
    assert (shown["kv_bytes_per_token"], shown["kv_bytes_per_request"]) == (made.kv_bytes, made.request_bytes)
    assert shown["weight_bytes"] == made.weights
    alike = {"heads": 32, "kv_heads": 8, "head_dim": 128, "num_layers": 16}
    assert shown["model"]["attention"] == [
        {**alike, "window": {"length": 512, "is_aligned": False}},
        {**alike, "window": None},
    ]
    assert shown["model"]["architecture"] == "Gemma2ForCausalLM"
    assert [fit["card"] for fit in shown["fits"]] == [fit.card for fit in made.fits] and len(made.fits) == len(NAMES)
    for said, fit in zip(shown["fits"], made.fits, strict=True):
        assert (said["tokens"], said["fits"], said["refusal"]) == (fit.tokens, fit.fits, fit.refusal)


def test_a_hybrid_says_how_many_states_are_kept_and_what_one_costs(tmp_path, capsys):
    path = str(write(tmp_path, LLAMA_8B | HYBRID | {"rope_parameters": None}))
    assert cli.main(["check", path, "--dry-run", "--json", "--max-states", "100"]) == 0
    shown, made = json.loads(capsys.readouterr().out), report(path)
    state_bytes = shown["model"]["state_bytes"]
    assert shown["model"]["num_state_layers"] == 16
    assert {fit["states"] for fit in shown["fits"] if fit["fits"]} == {100}
    said = f"states:  {state_bytes / 2**20:.1f} MiB a request and a prefix that is kept, as KV of"
    assert f"{said} {state_bytes // made.kv_bytes} tokens" in str(made)
    (fit,) = (fit for fit in made.fits if (fit.card, fit.quantization, fit.tp_size) == ("h200", "none", 1))
    assert fit.states == 512 and f"{fit.tokens}+512" in str(made) and "Behind + is how many" in str(made)
    assert "so a cached prefix is of use only as far as one was kept" in str(made)


def test_the_layer_that_drafts_counts_where_it_is_there_and_drafts_are_on(tmp_path):
    """Its weights, its keys and values, and what rows keep for it. An index without its tensors has no such layer."""
    config = LLAMA_8B | HYBRID | {"rope_parameters": None, "mtp_num_hidden_layers": 1, "num_hidden_layers": 4}
    here = write(tmp_path / "here", config)
    own, plain = report(here), report(here, speculative="off")
    assert own.kv_bytes == 3 * plain.kv_bytes // 2 and own.weights["none"] > plain.weights["none"]
    l4 = [next(fit for fit in each.fits if fit.card == "l4" and fit.tokens) for each in (own, plain)]
    assert l4[0].tokens < 0.7 * l4[1].tokens
    names = checkpoint_shapes(abstract_model(read_spec(here), jnp.float32))
    lacks = report(write(tmp_path / "lacks", config, dict.fromkeys(names, "model-1.safetensors")))
    assert not lacks.problems and (lacks.kv_bytes, lacks.weights) == (plain.kv_bytes, plain.weights)


def test_a_file_that_no_family_reads_is_refused_as_json_too(tmp_path, capsys):
    path = str(write(tmp_path, {"architectures": ["XForCausalLM"]}))
    assert cli.main(["check", path, "--dry-run", "--json"]) == cli.CHECK_FAILED
    shown = json.loads(capsys.readouterr().out)
    assert "'XForCausalLM'" in shown["problems"][0] and (shown["model"], shown["fits"]) == (None, [])
    assert cli.main(["check", path, "--json"]) == cli.FAILED
    assert "--json needs --dry-run" in capsys.readouterr().err


def test_layers_with_a_window_keep_a_part_of_a_request(tmp_path):
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
    made = report(write(tmp_path, LLAMA_8B | window | {"rope_parameters": None}), chunked_prefill_size=2048)
    assert (made.problems, made.kv_bytes, made.request_bytes) == ((), 131_072, 131_072 * (1024 + 2048))
    assert "384.0 MiB for a request of 16384 tokens" in str(made)


def test_the_bound_of_a_step_leaves_nearly_what_compiled_programs_leave(tmp_path):
    """`jsg compile --target h200` planned 821 706 tokens for these options (jax 0.11.2, 2026-11-29)."""
    made = report(write(tmp_path, LLAMA_8B), context_length=8192, load_format="dummy")
    (fit,) = (fit for fit in made.fits if (fit.card, fit.quantization, fit.tp_size) == ("h200", "none", 1))
    assert 821_706 - 1000 < fit.tokens <= 821_706


def test_options_leave_one_table_and_a_refused_number_of_cards_is_named(tmp_path):
    made = report(write(tmp_path, LLAMA_8B), quantization="int8", tp_size=3, dtype="float32")
    assert {(fit.quantization, fit.tp_size) for fit in made.fits} == {("int8", 3)}
    assert str(made).count("--tp-size must divide num_attention_heads") == 1


def test_all_that_is_wrong_is_said_and_the_rest_is_sized(tmp_path):
    made = report(write(tmp_path, BROKEN, {}), quantization="int8", tp_size=1)
    named = ("bits must be 4", "attn_logit_softcapping", "residual_multiplier", "unheard of", "hidden_act must be silu")
    assert len(made.problems) == len(named)
    for problem, name in zip(made.problems, named, strict=True):
        assert name in problem
    assert made.model is not None and made.model.num_layers == 32
    assert "without the refused fields" in str(made)


@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        ({"architectures": ["XForCausalLM"], "quantization": {"bits": 4}}, ["a.onnx"], ("'XF", "quant_method", "ONNX")),
        (LLAMA_8B, ["pytorch_model.bin"], ("pickles",)),
        (LLAMA_8B | {"rms_norm_eps": "x", "head_dim": 127}, ["README.md"], ("head_dim", "rms_norm_eps")),
        (LLAMA_8B | {"model_type": "gpt2"}, [], ("model_type",)),
        ({}, [], ("architectures",)),
        (LLAMA_8B, ["tokenizer.json"], ("tokenizer.json",)),
        (LLAMA_8B | {"eos_token_id": -1}, [], ("eos_token_id",)),
    ],
)
def test_each_kind_of_problem(tmp_path, config, files, named):
    write(tmp_path, config)
    for file in files:
        (tmp_path / file).touch()
    problems = report(tmp_path, quantization="int8").problems
    assert len(problems) == len(named)
    assert all(name in problem for name, problem in zip(named, problems, strict=True))


def test_names_of_the_index_are_compared_and_an_own_head_counts(tmp_path):
    variant = "mistral3_tied"
    names = dict.fromkeys(variant_shapes(variant), "model-00001-of-00001.safetensors")
    tied = report(write(tmp_path, VARIANTS[variant], names))
    assert tied.problems == ()
    own = report(write(tmp_path, VARIANTS[variant], {**names, "language_model.lm_head.weight": "a.safetensors"}))
    assert own.weights["none"] - tied.weights["none"] == 512 * 64 * 2
    gone = "language_model.model.layers.1.mlp.up_proj.weight"
    (problem,) = report(write(tmp_path, VARIANTS[variant], {k: v for k, v in names.items() if k != gone})).problems
    assert "must hold model.layers.1.mlp.up_proj.weight" in problem
    problems = report(write(tmp_path, VARIANTS["llama_mha"], names)).problems
    assert len(problems) == 6 and "more tensors" in problems[-1]


def test_shapes_of_a_header_are_compared(tmp_path):
    save_file(random_tensors("llama_mha", 1), write(tmp_path, VARIANTS["llama_mha"]) / "model.safetensors")
    assert report(tmp_path).problems == ()
    problems = report(write(tmp_path, VARIANTS["llama_mha"] | {"intermediate_size": 192})).problems
    assert len(problems) == 6 and "must have the shape [64, 192] by config.json, but has [64, 160]" in problems[0]


def test_no_weight_comes_from_the_hub(tmp_path, monkeypatch, capsys):
    files = {"config.json": json.dumps(BROKEN).encode(), INDEX: b'{"weight_map": {}}', "a.safetensors": b"x" * 999}
    with fake_hub({"some/model": files}) as hub:
        template = hub.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        assert cli.main(["check", "some/model", "--dry-run", "--quantization", "int8"]) == cli.CHECK_FAILED
    assert sorted(hub.fetched) == ["config.json", INDEX]
    assert "bits must be 4, but is 2" in capsys.readouterr().out
