"""Every family and variant computes what the Hugging Face implementation computes, through the paged path.

`record.py` made the files in `data/`; the checkpoints are made again here, from the seed.
"""

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jsg.models.block_spec import RopeSpec
from jsg.models.loading import load_model
from tests.golden.compare import MAX_DIFFERENCE, Recorded
from tests.golden.families import covering, mark, one_of_each
from tests.golden.record import DATA, EMBEDDING, MAX_FILE_BYTES
from tests.golden.variants import VARIANTS, random_tensors, random_tokens, weights_sha256, write_checkpoint
from tests.golden.vision_variants import VISION_VARIANTS
from tests.models.paged import PagedModel, load_directory
from tests.models.specs import changed
from tests.parity import Parity

CHUNK_LEN = 77  # the first of two uneven chunks


class Golden(Recorded):
    """One recorded variant, its checkpoint and the model that was loaded from it."""

    def __init__(self, variant: str, directory: Path):
        super().__init__(variant)
        self.variant = variant
        self.directory = directory
        self.tensors = random_tensors(variant, self.note["seed"])
        write_checkpoint(directory, variant, self.tensors)
        self.config, model = load_directory(directory)
        self.paged = PagedModel(self.config, model, page_size=4 if variant.startswith("qwen") else 1)


WEIGHTS = ("llama_biases", "mixtral_three_of_five", "qwen3_biases")
"""All names of tensors that there are."""
FAST = (*WEIGHTS, "cohere2", "gemma3_nested", "llama_tied", "llama_yarn_rope", "qwen2_window")
"""Each part of a model that a family may have is in one of them; `tests/models/test_rope.py` has the other ropes."""


def variants(slow: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=mark(name, FAST, slow)) for name in sorted(VARIANTS)]


@pytest.fixture(scope="module")
def make_golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """Each variant is loaded and compiled once."""
    return functools.cache(lambda variant: Golden(variant, tmp_path_factory.mktemp(variant)))


@pytest.fixture(params=variants(VARIANTS))
def golden(request: pytest.FixtureRequest, make_golden: Callable[[str], Golden]) -> Golden:
    return make_golden(request.param)


def test_the_checkpoint_is_the_recorded_one(golden: Golden) -> None:
    assert golden.note["config"] == VARIANTS[golden.variant]
    assert weights_sha256(golden.tensors) == golden.note["weights_sha256"]
    assert golden.tokens == random_tokens(golden.variant, golden.note["seed"], len(golden.tokens))
    assert 0.8 < golden.note["logits_std"] < 1.3


def test_logits_of_two_uneven_chunks_beside_another_row(golden: Golden, parity: Parity) -> None:
    golden.paged.reset()
    first = golden.paged.extend({2: golden.tokens[:CHUNK_LEN], 0: golden.tokens[5:30]})[2]
    second = golden.paged.extend({0: golden.tokens[30:40], 2: golden.tokens[CHUNK_LEN:]})[2]
    difference = golden.difference(np.concatenate([first, second]))
    parity("text", golden.note["config"], "logits", difference, MAX_DIFFERENCE)


@pytest.mark.parametrize("golden", variants(covering(one_of_each())), indirect=True)
def test_greedy_decoding_gives_the_same_60_tokens(golden: Golden) -> None:
    prompt_len = int(golden.arrays["prompt_len"])
    prompt = golden.tokens[:prompt_len]
    golden.paged.reset()
    golden.paged.extend({1: prompt[:13], 0: golden.tokens[:50]})
    token = int(golden.paged.extend({1: prompt[13:]})[1][-1].argmax())
    made = [token]
    while len(made) < len(golden.greedy):
        token = int(golden.paged.decode({0: 7, 1: token})[1].argmax())
        made.append(token)
    assert made == golden.greedy


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["llama3_rope_v4", "llama_yarn_rope", "mistral_window"], indirect=True)
def test_rope_scaling_and_window_matter(golden: Golden) -> None:
    rope = RopeSpec(theta=golden.config.layers[0].attention.rope.theta)
    plain = changed(golden.config, attention={"rope": rope, "window": None})
    paged = PagedModel(plain, load_model(golden.directory, plain))
    assert golden.difference(paged.extend({1: golden.tokens})[1]) > 100 * MAX_DIFFERENCE


@pytest.mark.parametrize(
    "golden",
    [pytest.param(name, marks=mark(name, WEIGHTS, ())) for name in sorted(VARIANTS)],
    indirect=True,
)
@pytest.mark.parametrize("place", [pytest.param("first", marks=pytest.mark.slow), "last"])
def test_every_weight_matters(golden: Golden, place: str) -> None:
    """One changed number in any tensor of the first layer, or of the last or around the layers, is seen.

    Variants that have no other names of tensors are long.
    """
    layer = 0 if place == "first" else golden.config.num_layers - 1
    here = {golden.config.names.here(name): name for name in golden.tensors}
    names = [stored for name, stored in here.items() if name.startswith(f"model.layers.{layer}.")]
    if place == "last":
        names += [stored for name, stored in here.items() if not name.startswith("model.layers.")]
    names = [name for name in names if not golden.config.names.is_unread(name)]
    unseen = [name for name in names if _difference_when_perturbed(golden, name) <= 2 * MAX_DIFFERENCE]
    assert not unseen


def _difference_when_perturbed(golden: Golden, name: str) -> float:
    tensors = {**golden.tensors, name: golden.tensors[name].copy()}
    row = golden.tokens[3] if "embed" in name else int(golden.arrays["columns"][5])
    shape = tensors[name].shape
    tensors[name][
        tuple(min(at, length - 1) for at, length in zip((row % len(tensors[name]), 3), shape, strict=False))
    ] += 0.5
    directory = golden.directory / "perturbed"
    write_checkpoint(directory, golden.variant, tensors)
    golden.paged.reset(load_model(directory, golden.config))
    return golden.difference(golden.paged.extend({1: golden.tokens})[1])


def test_every_variant_is_recorded_in_a_small_file():
    assert {path.stem for path in DATA.glob("*.npz")} == {
        *VARIANTS,
        *VISION_VARIANTS,
        EMBEDDING,
        "ropes",
        "image_layouts",
    }
    assert all(path.stat().st_size <= MAX_FILE_BYTES for path in DATA.glob("*.npz"))
