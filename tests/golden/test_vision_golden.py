"""LLaVA computes what the Hugging Face implementation computes: image tokens, and the text around them."""

import dataclasses
import functools

import numpy as np
import pytest

from jsg.models.config import ModelConfig
from jsg.models.loading import load_model
from tests.golden.compare import MAX_DIFFERENCE
from tests.golden.variants import weights_sha256
from tests.golden.vision_golden import VisionGolden
from tests.golden.vision_variants import IMAGE_TOKEN, ITEMS, VIDEO_TOKEN, VISION_VARIANTS, vision_prompt
from tests.models.paged import PagedModel
from tests.parity import Parity

TABLE_ROWS = 128
CUTS = (0, 14, 37)  # where chunks of the prompt begin: in the first item, twice


@functools.cache
def text_model(config: ModelConfig) -> PagedModel:
    """Compiled once for all variants whose text half has this shape; its parameters are set by `reset`."""
    return PagedModel(config, load_model(None, config, load_format="dummy"), page_size=4)


@pytest.fixture(scope="module", params=sorted(VISION_VARIANTS))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionGolden:
    return VisionGolden(request.param, tmp_path_factory.mktemp(request.param))


def test_the_checkpoint_and_the_prompt_are_the_recorded_ones(golden: VisionGolden) -> None:
    assert golden.note["config"] == VISION_VARIANTS[golden.variant]
    assert weights_sha256(golden.tensors) == golden.note["weights_sha256"]
    first, second = map(len, golden.layouts)
    assert golden.tokens == vision_prompt(golden.variant, golden.note["seed"], (first, second))
    assert 0.8 < golden.note["logits_std"] < 1.3


def test_features_logits_and_greedy_tokens(golden: VisionGolden, parity: Parity) -> None:
    """Image tokens are rows of a table that begins with a row of NaN; the prompt comes in chunks beside another row."""
    rows = np.concatenate(golden.encode())
    assert rows.shape == golden.arrays["features"].shape
    assert np.abs(rows - golden.arrays["features"]).max() <= MAX_DIFFERENCE
    tokens = np.array(golden.tokens)
    seen = np.isin(tokens, (IMAGE_TOKEN, VIDEO_TOKEN))
    tokens[seen] = golden.config.vocab_size + 1 + np.arange(len(rows))
    paged = text_model(dataclasses.replace(golden.config, vision=None))
    paged.reset(golden.model.text)
    paged.vision = np.full((TABLE_ROWS, golden.config.hidden_size), np.nan, np.float32)
    paged.vision[1 : len(rows) + 1] = rows
    ends = (*CUTS[1:], len(tokens))
    logits = [
        paged.extend({2: tokens[start:end], 0: golden.tokens[:3]})[2] for start, end in zip(CUTS, ends, strict=True)
    ]
    columns = {"video" if isinstance(item, int) else "image" for item in ITEMS[golden.variant]}
    for column in sorted(columns):
        parity(column, golden.note["config"], "logits", golden.difference(np.concatenate(logits)), MAX_DIFFERENCE)
    made = [int(logits[-1][-1].argmax())]
    while len(made) < len(golden.greedy):
        made.append(int(paged.decode({1: 7, 2: made[-1]})[2].argmax()))
    assert made == golden.greedy
