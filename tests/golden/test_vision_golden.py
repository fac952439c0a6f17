"""LLaVA computes what the Hugging Face implementation computes: image tokens, and the text around them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jsg.models.loading import load_model
from jsg.models.spec import ModelSpec
from tests.golden.compare import MAX_DIFFERENCE
from tests.golden.variants import weights_sha256
from tests.golden.vision_golden import VisionGolden
from tests.golden.vision_variants import (
    IMAGE_TOKEN,
    ITEMS,
    VIDEO_TOKEN,
    VISION_VARIANTS,
    vision_prompt,
    write_vision_checkpoint,
)
from tests.models.paged import PagedModel
from tests.parity import Parity

TABLE_ROWS = 128
CUTS = (0, 14, 37)  # where chunks of the prompt begin: in the first item, twice


@functools.cache
def text_model(config: ModelSpec) -> PagedModel:
    """Compiled once for all variants whose text half has this shape; its parameters are set by `reset`."""
    return PagedModel(config, load_model(None, config, load_format="dummy"), page_size=4)


FAST = ("llava_class_token", "llava_next_video")
"""Features of several layers with the class token, and tiles, newlines and frames without."""


@pytest.fixture(scope="module")
def make_golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionGolden]:
    """Each variant is loaded and compiled once."""
    return functools.cache(lambda variant: VisionGolden(variant, tmp_path_factory.mktemp(variant)))


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(VISION_VARIANTS)]
)
def golden(request: pytest.FixtureRequest, make_golden: Callable[[str], VisionGolden]) -> VisionGolden:
    return make_golden(request.param)


def test_the_checkpoint_and_the_prompt_are_the_recorded_ones(golden: VisionGolden) -> None:
    assert golden.note["config"] == VISION_VARIANTS[golden.variant]
    assert weights_sha256(golden.tensors) == golden.note["weights_sha256"]
    first, second = map(len, golden.layouts)
    assert golden.tokens == vision_prompt(golden.variant, golden.note["seed"], (first, second))
    assert 0.8 < golden.note["logits_std"] < 1.3


def paged_model(golden: VisionGolden, rows: np.ndarray) -> PagedModel:
    """The text half, which has seen nothing; image tokens are rows of a table that begins with a row of NaN."""
    paged = text_model(dataclasses.replace(golden.config, vision=None))
    paged.reset(golden.model.text)
    paged.vision = np.full((TABLE_ROWS, golden.config.hidden_size), np.nan, np.float32)
    paged.vision[1 : len(rows) + 1] = rows
    return paged


def prompt_logits(golden: VisionGolden, paged: PagedModel) -> np.ndarray:
    """Logits [tokens, V] of the prompt, which comes in chunks beside another row."""
    tokens = np.array(golden.tokens)
    seen = np.isin(tokens, (IMAGE_TOKEN, VIDEO_TOKEN))
    tokens[seen] = golden.config.vocab_size + 1 + np.arange(np.count_nonzero(seen))
    ends = (*CUTS[1:], len(tokens))
    chunks = [
        paged.extend({2: tokens[start:end], 0: golden.tokens[:3]})[2] for start, end in zip(CUTS, ends, strict=True)
    ]
    return np.concatenate(chunks)


def test_features_logits_and_greedy_tokens(golden: VisionGolden, parity: Parity) -> None:
    rows = np.concatenate(golden.encode())
    assert rows.shape == golden.arrays["features"].shape
    assert np.abs(rows - golden.arrays["features"]).max() <= MAX_DIFFERENCE
    paged = paged_model(golden, rows)
    logits = prompt_logits(golden, paged)
    columns = {"video" if isinstance(item, int) else "image" for item in ITEMS[golden.variant]}
    for column in sorted(columns):
        parity(column, golden.note["config"], "logits", golden.difference(logits), MAX_DIFFERENCE)
    made = [int(logits[-1].argmax())]
    while len(made) < len(golden.greedy):
        made.append(int(paged.decode({1: 7, 2: made[-1]})[2].argmax()))
    assert made == golden.greedy


def is_without_effect(golden: VisionGolden, name: str) -> bool:
    """Whether no result can depend on a tensor.

    Layers behind the last one whose features are taken are not run, and so the norm behind all of them. A bias of the
    keys adds the same to all scores of a query, and softmax takes it away.
    """
    unused = range(
        max(golden.vision.feature_layers), VISION_VARIANTS[golden.variant]["vision_config"]["num_hidden_layers"]
    )
    return "post_layernorm" in name or "k_proj.bias" in name or any(f".layers.{layer}." in name for layer in unused)


@pytest.mark.parametrize("layers", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["first", "others"])
def test_every_weight_of_the_vision_half_matters(golden: VisionGolden, tmp_path: Path, layers: tuple[int, ...]) -> None:
    """One changed number in any tensor of a layer, around the layers or of the projector is seen in the features."""
    names = [name for name in golden.tensors if not name.startswith(("model.", "lm_head."))]
    inside = [name for name in names if any(f".layers.{layer}." in name for layer in layers)]
    around = [name for name in names if ".layers." not in name]
    names = inside + around if layers == (0,) else inside
    unseen = {name for name in names if _difference_when_perturbed(golden, name, tmp_path) <= 2 * MAX_DIFFERENCE}
    assert unseen == {name for name in names if is_without_effect(golden, name)}


def _difference_when_perturbed(golden: VisionGolden, name: str, directory: Path) -> float:
    tensors = {**golden.tensors, name: golden.tensors[name].copy()}
    tensors[name][(3, 1, 2, 2)[: tensors[name].ndim]] += 0.5
    write_vision_checkpoint(directory, golden.variant, tensors)
    rows = np.concatenate(golden.encode(load_model(directory, golden.config).vision))
    return float(np.abs(rows - golden.arrays["features"]).max())
