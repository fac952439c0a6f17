"""A checkpoint with a layer for drafts (MTP): it drafts what the formula says, and changes no answer."""

import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.engine.drafter import TRIAL, Drafter
from jsg.engine.startup import begin
from jsg.models.config import read_spec
from jsg.models.decoder import Decoder
from jsg.models.loading import abstract_model, checkpoint_shapes, load_model
from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.engine.test_same_answer import BUSY, check_bitwise
from tests.engine.test_states import HYBRID

HEADS, KV_HEADS, HEAD, EPS = 4, 2, 16, 1e-2
QWEN = HYBRID | {"mtp_num_hidden_layers": 1}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rms_norm_eps": EPS,
}
NAMES = {
    "qwen3_5_text": ("mtp.", "mtp.layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "glm4_moe": ("model.layers.2.", "model.layers.2.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
}
PROMPT = tuple(range(3, 9))


@pytest.fixture(scope="module", params=[QWEN, GLM], ids=["qwen3_5", "glm4_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:
    """A directory with a checkpoint, and its tensors."""
    directory = small.write_model(tmp_path_factory.mktemp("own"), **request.param)
    numbers = np.random.default_rng(0)
    shapes = checkpoint_shapes(abstract_model(read_spec(directory, drafts=True), np.float32))
    tensors = {
        name: (numbers.normal(size=shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors | {"model_type": request.param["model_type"]}


@pytest.fixture(scope="module")
def make(model: tuple[pathlib.Path, dict], compile_cache_dir: str) -> Callable[..., EngineCore]:
    def make(**knobs: object) -> EngineCore:
        fixed = {"load_format": "safetensors", "speculative": "auto", **small.DETERMINISTIC}
        return small.make_core(model[0], compile_cache_dir, **fixed | knobs)

    return make


@pytest.fixture(scope="module", params=[1, small.PAGE_SIZE], ids="pages of {}".format)
def core(request: pytest.FixtureRequest, make: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    """With drafts of the model."""
    core = make(page_size=request.param)
    yield core
    core.close()


def asked(rid: str = "a", **sampling: Any) -> Request:
    fields = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True} | sampling
    return Request(rid=rid, input_ids=PROMPT, sampling=SamplingParams(**fields))


def rms(tensors: dict, name: str, x: np.ndarray) -> np.ndarray:
    weight = tensors[f"{name}.weight"] + (tensors["model_type"] != "glm4_moe")
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turned(x: np.ndarray, dim: int) -> np.ndarray:
    """Heads [tokens, heads, H] with rope on their first `dim` numbers, of which halves are turned together."""
    angles = np.arange(len(x))[:, None, None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
    a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
    parts = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), x[..., dim:]
    return np.concatenate(parts, axis=-1)


def block(tensors: dict, prefix: str, x: np.ndarray) -> np.ndarray:
    """The transformer block of all tokens."""
    is_glm, read = tensors["model_type"] == "glm4_moe", rms(tensors, f"{prefix}input_layernorm", x)
    query, key, value = (read @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
    query, gate = np.split(query.reshape(len(x), HEADS, -1), [HEAD], axis=-1)
    key, value = (each.reshape(len(x), KV_HEADS, HEAD) for each in (key, value))
    if not is_glm:
        query, key = (rms(tensors, f"{prefix}self_attn.{n}_norm", x) for n, x in (("q", query), ("k", key)))
    query, key = (turned(each, HEAD // 2 if is_glm else HEAD // 4) for each in (query, key))
    key, value = (each.repeat(HEADS // KV_HEADS, axis=1) for each in (key, value))
    scores = np.einsum("qnh,knh->nqk", query, key) / math.sqrt(HEAD)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    gathered = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), value)
    gathered = gathered if is_glm else gathered / (1 + np.exp(-gate))
    x = x + gathered.reshape(len(x), -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    read = rms(tensors, f"{prefix}post_attention_layernorm", x)
    gate, up = (read @ tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T


def expected(tensors: dict, tokens: list[int], hidden: np.ndarray, count: int) -> list[int]:
    """The drafts behind these tokens, of all but the last of which there is a hidden state [tokens - 1, D]."""
    prefix, of_block, joined, *norms = NAMES[tensors["model_type"]]
    embedding_norm, hidden_norm, final_norm = (f"{prefix}{name}" for name in norms)
    tokens, hidden, made = list(tokens), list(hidden), []
    for _ in range(count):
        embedded = rms(tensors, embedding_norm, tensors["model.embed_tokens.weight"][tokens[1:]])
        pairs = np.concatenate([embedded, rms(tensors, hidden_norm, np.stack(hidden))], axis=-1)
        x = pairs @ tensors[f"{prefix}{joined}.weight"].T
        x = block(tensors, of_block, np.concatenate([np.zeros_like(x[:1]), x]))  # nothing is before the first token
        read = rms(tensors, final_norm, x[-1])
        made.append(int((tensors["lm_head.weight"] @ read).argmax()))
        hidden.append(x[-1] if tensors["model_type"] == "glm4_moe" else read)
        tokens.append(made[-1])
    return made


def test_it_drafts_what_the_formula_says(model, core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    """In numpy, from the hidden states of the model, of which each gives the next token by the head."""
    calls, draft, tensors = [], core._runner.draft, model[1]

    def record(rows: Any, tokens: Any, positions: Any, count: int) -> np.ndarray:
        made = draft(rows, tokens, positions, count)
        hidden = np.asarray(core._runner.replica.state.pool.hidden[0])[rows[0], : positions[0]]
        calls.append((positions[0] + 1, hidden, made[0].tolist()))
        return made

    assert core.flush_cache()
    monkeypatch.setattr(core._runner, "draft", record)
    said = [*PROMPT, *small.run(core, [(0, asked())])["a"].token_ids]
    assert len(calls) > 2 and len(calls[0][2]) == 4
    for length, hidden, made in calls:
        assert (hidden[len(PROMPT) - 1 :] @ tensors["lm_head.weight"].T).argmax(1).tolist() == said[
            len(PROMPT) : length
        ]
        assert made == expected(tensors, said[:length], hidden, len(made))


@pytest.mark.parametrize("model", [pytest.param(QWEN, id="qwen3_5")], indirect=True)
def test_right_drafts_of_the_model_save_steps_until_they_are_wrong(
    make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
):
    """Where steps have costs. Steps overlap again when drafts are not worth it, and now and then the model tries."""
    core = make(deterministic=False, max_total_tokens=256)
    gate, places = core.scheduler.gate, []
    for key in [*gate.to_measure]:
        gate.note(key, 0.001 if isinstance(key, int) else 0.01)
    said = small.run(core, [(0, asked("off", max_new_tokens=100, speculative="off"))])["off"].token_ids
    right = said

    def draft(rows: Any, tokens: Any, positions: Any, count: int) -> np.ndarray:
        places.append(positions[0])
        follow = [*right[positions[0] + 1 - len(PROMPT) :], *[0] * count][:count]
        return np.array([follow])

    monkeypatch.setattr(core._runner, "draft", draft)
    monkeypatch.setattr(Drafter, "_search", lambda *_: ([], []))
    before = core.stats()
    assert small.run(core, [(0, asked("right", max_new_tokens=100))])["right"].token_ids == said
    after = core.stats()
    assert after["num_drafts_taken_mtp"] > 70 and after["num_steps"] - before["num_steps"] < 30
    right, places[:] = [(token + 1) % small.VOCAB for token in said], []
    assert core.flush_cache()
    assert small.run(core, [(0, asked("wrong", max_new_tokens=100))])["wrong"].token_ids == said
    assert core.stats()["num_steps"] - after["num_steps"] > 90 and len(places) < 30
    assert places[-1] - places[-2] >= TRIAL, "the last one was a trial"
    core.close()


@pytest.mark.parametrize("model", [pytest.param(QWEN, id="qwen3_5")], indirect=True)
def test_they_change_no_bit_of_an_answer(make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch):
    """With every temperature, penalty and stop token, log-probabilities, aborts, chunks and retracts.

    What it drafts is right too often for random weights, so that it goes on.
    """
    core, plain, numbers = make(**BUSY), make(**BUSY | {"speculative": "off"}), np.random.default_rng(0)
    alone, draft = small.remembered(functools.partial(small.alone, plain)), core._runner.draft

    def often_right(rows: Any, tokens: Any, positions: Any, count: int) -> np.ndarray:
        made = draft(rows, tokens, positions, count)
        requests = {each.place.row: each.request for each in core.scheduler.running if each.place}
        for line, row, position in zip(made, rows, positions, strict=True):
            right = alone(requests[row]).token_ids[position + 1 - len(requests[row].input_ids) :][:count]
            line[: len(right)] = np.where(numbers.random(len(right)) < 0.8, right, line[: len(right)])
        return made

    monkeypatch.setattr(core._runner, "draft", often_right)
    assert core._runner.has_drafts and not plain._runner.has_drafts
    check_bitwise(core, alone, 0)
    stats = core.stats()
    assert stats["num_drafts_mtp"] > stats["num_drafts_taken_mtp"] + 10 > 50 and stats["num_retracts"] > 0
    core.close()
    plain.close()


def test_programs_with_the_layer_and_without_it_are_refused_by_the_option(model):
    made, asked = (
        begin(EngineConfig(model_path=str(model[0]), speculative=each), lambda progress: None).conditions()
        for each in ("auto", "off")
    )
    assert [(name, made[name], asked[name]) for name in made if made[name] != asked[name]] == [
        ("--speculative", "auto", "off")
    ]


@pytest.mark.parametrize("left", [None, "mlp.down_proj.weight"])
def test_a_checkpoint_without_the_layer_or_without_a_part_of_it_is_served_without(
    model, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, left: str | None
):
    directory, tensors = model
    prefix, block, *_ = NAMES[tensors["model_type"]]
    lacks = prefix if left is None else f"{block}{left}"
    kept = {name: x for name, x in tensors.items() if not name.startswith(lacks) and name != "model_type"}
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path, drafts=True)
    assert spec.draft is not None and read_spec(tmp_path).draft is None
    assert cast(Decoder, load_model(tmp_path, spec)).draft is None
    assert caplog.text.count("drafts no tokens itself") == (left is not None)
