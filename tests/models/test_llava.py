from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.clip import VisionTower, unread_tensors
from jsg.models.config import read_spec
from jsg.models.families.llava import WRAPPER
from jsg.models.llava import Llava
from jsg.models.loading import abstract_model, load_model
from jsg.models.spec import ModelSpec, TensorNames
from tests.golden.vision_variants import LAYOUTS, VISION_VARIANTS, vision_tensors, write_vision_checkpoint
from tests.kernels_pallas.definition import QUICKLY
from tests.models.sizes import num_parameters

VIDEO = "llava_next_video"
SEED = 5


def checkpoint(directory: Path, variant: str = VIDEO) -> ModelSpec:
    write_vision_checkpoint(directory, variant, vision_tensors(variant, SEED))
    return read_spec(directory)


def change(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Puts tensors into the file, or takes them out."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, directory / "model.safetensors")


def values(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    directory = tmp_path_factory.mktemp(VIDEO)
    return load_model(directory, checkpoint(directory)).vision


def test_every_layout_of_a_checkpoint_is_the_same_model(tmp_path, monkeypatch):
    models = []
    for variant in ("llava", "llava_class_token", VIDEO):  # old, new, mixed
        monkeypatch.setitem(LAYOUTS, "llava_next", LAYOUTS[variant])
        models.append(load_model(tmp_path, checkpoint(tmp_path, "llava_next")))
    for model in models[1:]:
        for one, other in zip(values(models[0]), values(model), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("variant", sorted(VISION_VARIANTS))
def test_no_tensor_has_two_meanings(variant):
    names = vision_tensors(variant, SEED)
    for layout in LAYOUTS.values():
        stored = [next((layout[p] + n.removeprefix(p) for p in layout if n.startswith(p)), n) for n in names]
        here = TensorNames(prefixes=WRAPPER.prefixes).here
        assert [here(name) for name in stored] == list(names)


def test_both_names_of_a_tensor_at_once_are_refused(tmp_path):
    config = checkpoint(tmp_path)
    change(tmp_path, {"model.image_newline": np.zeros(64, np.float32)})
    with pytest.raises(ModelError, match="names a tensor twice"):
        load_model(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"image_newline": None}, "must hold image_newline"),
        ({"vision_tower.encoder.layers.1.mlp.fc1.bias": None}, r"must hold vision_tower\.encoder\.layers\.1\.mlp"),
        ({"vision_tower.encoder.layers.3.mlp.fc1.bias": np.zeros(72, np.float32)}, r"layers\.3"),
        ({"vision_tower.head.weight": np.zeros(8, np.float32)}, r"holds 'vision_tower\.head\.weight'"),
        ({"vision_tower.embeddings.patch_embedding.weight": np.zeros((32, 3, 7, 7), np.float32)}, r"\[32, 3, 5, 5\]"),
        ({"multi_modal_projector.linear_3.weight": np.zeros(8, np.float32)}, "linear_3"),
        ({"language_model.lm_head.weight": None}, r"must hold lm_head\.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensor_name(tmp_path, changes, named):
    config = checkpoint(tmp_path)
    change(tmp_path, changes)
    with pytest.raises(ModelError, match=named):
        load_model(tmp_path, config)


def test_what_the_tower_does_not_run_is_neither_needed_nor_built(tmp_path):
    config = checkpoint(tmp_path)
    assert config.vision is not None
    unread = unread_tensors(config.vision)
    held = load_file(tmp_path / "model.safetensors")
    assert unread - held.keys() == {"vision_tower.embeddings.position_ids"}  # which old checkpoints have
    assert num_parameters(config) == sum(tensor.size for name, tensor in held.items() if name not in unread)
    change(tmp_path, dict.fromkeys(unread & held.keys()))
    model = load_model(tmp_path, config)
    assert isinstance(model, Llava) and len(model.vision.layers) == 2


def test_an_abstract_model_allocates_nothing(tmp_path):
    abstract = nnx.state(abstract_model(checkpoint(tmp_path), jnp.bfloat16))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))


@pytest.mark.slow
def test_dummy_weights_are_finite(tmp_path):
    config = checkpoint(tmp_path)
    dummy = load_model(None, config, load_format="dummy", dtype=jnp.bfloat16)
    assert all(np.isfinite(leaf.astype(np.float32)).all() for leaf in values(dummy))
    norms = [norm for layer in dummy.vision.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    assert norms and all((norm.weight[...] == 1).all() for norm in norms)


def test_the_tower_in_bfloat16_is_near_float32(tower):
    graph, state = nnx.split(tower)
    halved = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    pixels = np.random.default_rng(0).standard_normal((2, 3, 28, 28), np.float32)
    exact, rounded = (jax.jit(model.encode, compiler_options=QUICKLY)(pixels) for model in (tower, halved))
    assert (exact.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.abs(np.asarray(rounded, np.float32) - np.asarray(exact)).max() < 0.05 * np.abs(exact).max()


def test_a_tile_is_encoded_as_if_it_were_alone(tower):
    pixels = np.random.default_rng(1).standard_normal((2, 3, 28, 28), np.float32)
    encode = jax.jit(tower.encode)
    others = encode(np.stack([pixels[0], np.full_like(pixels[0], np.nan)]))
    np.testing.assert_array_equal(others[0], encode(pixels)[0])
    assert np.isnan(others[1]).all()


def test_8_bits_are_for_the_text_half(tower, tmp_path):
    model = load_model(tmp_path, checkpoint(tmp_path), quantization="int8")
    assert isinstance(model.text.layers[0].mlp.down.kernel.get_value(), Quantised)
    for one, other in zip(values(model.vision), values(tower), strict=True):
        np.testing.assert_array_equal(one, other)
