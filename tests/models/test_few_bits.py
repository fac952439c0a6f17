"""Kernels of published checkpoints in few bits, as they are restored."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.checkpoint import open_checkpoint
from jsg.models.config import read_spec
from jsg.models.published.kernel import Kernel
from tests.golden.variants import LLAMA
from tests.models import few_bits_reference
from tests.models.packers import FORMS, MXFP4, Form, Packer, Tensors, write, write_packed

SHAPES = {"model.layers.0.self_attn.k_proj.weight": (96, 64), "model.layers.0.mlp.down_proj.weight": (64, 96)}
EXPERTS = {"model.layers.0.mlp.experts.down_proj": (3, 64, 96)}
STACKS = {"mxfp4": MXFP4, "fp8": FORMS["fp8"]}


def written(
    directory: Path, form: Form, shapes: dict[str, tuple[int, ...]], damage: Callable[[Tensors], Any] = lambda _: None
) -> Tensors:
    """Writes a checkpoint with kernels of these shapes and a norm. Gives what its tensors mean."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return write_packed(directory, LLAMA, form, {**tensors, "model.norm.weight": np.ones(64, np.float32)}, damage)


def read(directory: Path) -> dict[str, Any]:
    """What is read of a checkpoint's kernels: each as a whole, in slices, and out of its few bits."""
    with open_checkpoint(directory, read_spec(directory).names) as checkpoint:
        kernels = {name: tensor for name, _, tensor in checkpoint.stored() if isinstance(tensor, Kernel)}
        return {name: checkpoint.read(name) for name in kernels}


def test_what_is_restored_equals_the_formula_of_the_format_to_the_bit(tmp_path: Path) -> None:
    """So does each slice, wherever it begins: devices, heads and pieces cut kernels in words and in groups."""
    rng = np.random.default_rng(0)
    cases = [(name, form, SHAPES) for name, form in FORMS.items()]
    cases += [(f"experts in {name}", form, EXPERTS) for name, form in STACKS.items()]
    for case, form, shapes in cases:
        restored = written(tmp_path / case, form, shapes)
        with open_checkpoint(tmp_path / case, read_spec(tmp_path / case).names) as checkpoint:
            assert {name for name, _, _ in checkpoint.stored()} == set(restored), case
            for name in shapes:
                whole = checkpoint.read(name)
                assert whole.dtype == np.float32, case
                np.testing.assert_array_equal(whole.view(np.uint32), restored[name].view(np.uint32), case)
                for _ in range(8):
                    ends = [sorted(rng.choice(length + 1, 2, replace=False)) for length in whole.shape]
                    slices = tuple(slice(*map(int, each)) for each in ends)
                    np.testing.assert_array_equal(checkpoint.read(name, slices), whole[slices], case)


def test_what_is_restored_is_what_other_programs_restore(tmp_path: Path) -> None:
    """transformers and compressed-tensors, recorded by `few_bits_reference.py`."""
    record = json.loads(few_bits_reference.RECORD.read_text())
    assert len(record) > 15
    for case, digest in record.items():
        form = MXFP4 if case == "mxfp4" else FORMS[case]
        (tmp_path / case).mkdir()
        (tmp_path / case / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": form.config}))
        write(tmp_path / case / "model.safetensors", few_bits_reference.drawn(case))
        with open_checkpoint(tmp_path / case, read_spec(tmp_path / case).names) as checkpoint:
            assert few_bits_reference.digest(checkpoint.read(few_bits_reference.NAME)) == digest, case


def test_few_bits_are_given_as_they_are(tmp_path: Path) -> None:
    """A slice of [out, in] means what is restored; what is in blocks that are cut off has no form."""
    for case, form in FORMS.items():
        restored = written(tmp_path / case, form, SHAPES)
        with open_checkpoint(tmp_path / case, read_spec(tmp_path / case).names) as checkpoint:
            for name, _, kernel in checkpoint.stored():
                if not isinstance(kernel, Kernel):
                    continue
                if kernel.form is None:
                    assert case.startswith(("fp8", "block")), case
                    continue
                columns = slice(None) if kernel.form.has_order else slice(32, 64)
                numbers, scale, *rest = kernel.kept((slice(8, 40), columns), kernel.form)
                others = (None if part is None else jnp.asarray(part) for part in rest)
                made = Quantised(jnp.asarray(numbers), jnp.asarray(scale, kernel.form.scale), kernel.form, *others)
                found, meant = made.restored(jnp.float32), restored[name][8:40, columns]
                np.testing.assert_allclose(found, meant, rtol=2e-7 if kernel.form.has_factor else 0, err_msg=case)


def without(*ends: str) -> Callable[[Tensors], None]:
    """Takes the tensors with these ends out."""

    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    return damage


def changed(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    """Changes the tensors with this end."""

    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = change(tensors[name])

    return damage


def with_nan(scale: np.ndarray) -> np.ndarray:
    scale = scale.copy()
    scale.reshape(-1)[-1:] = np.float32(math.nan) if scale.dtype != np.uint8 else 255
    return scale


def cut(tensor: np.ndarray) -> np.ndarray:
    return tensor[:-1]


def far(groups: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(groups)) == 5, 77, groups).astype(groups.dtype)


def unset(groups: np.ndarray) -> np.ndarray:
    return np.full_like(groups, -1)


def test_an_order_that_compressed_tensors_has_not_set_is_none(tmp_path: Path) -> None:
    """Its columns are in their places. In GPTQ -1 would be the last group, and is refused below."""
    plain, ordered = FORMS["w4a16"], FORMS["w4a16 order"]

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        tensors, whole = plain.pack(rng, name, shape)
        return {**tensors, f"{name}_g_idx": unset(np.empty(shape[1], np.int32))}, whole

    restored = written(tmp_path, Form(ordered.config, pack), SHAPES)
    for name, whole in read(tmp_path).items():
        np.testing.assert_array_equal(whole, restored[name])


def test_checkpoints_that_differ_in_orders_only_have_the_same_forms(tmp_path: Path) -> None:
    """Programs are made for forms, and an order is among what they are given."""
    found = list[Any]()
    turned = changed("g_idx", lambda groups: groups[::-1].copy())
    for place, damage in {"one": without("nothing"), "other": turned}.items():
        written(tmp_path / place, FORMS["gptq order"], SHAPES, damage)
        with open_checkpoint(tmp_path / place, read_spec(tmp_path / place).names) as checkpoint:
            found.append(checkpoint.forms())
    assert found[0] == found[1] and len({form.order for form in found[0].values()} - {""}) == 2


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    cases: dict[str, tuple[Form, Callable[[Tensors], None], str]] = {
        "no scale": (FORMS["fp8"], without("_scale_inv"), "config.json: quantization_config says .*holds none"),
        "no packed": (FORMS["w4a16"], without("k_proj.weight_packed"), "must hold .*k_proj.weight, a part of"),
        "no kernel": (FORMS["fp8"], without("k_proj.weight"), "must hold .*k_proj.weight, a part of"),
        "no scales": (
            FORMS["awq"],
            without("k_proj.scales"),
            r"must hold .*k_proj.scales, a part of .*k_proj.weight, but",
        ),
        "no zeros": (FORMS["gptq"], without("k_proj.qzeros"), "must hold .*k_proj.qzeros"),
        "no zero point": (
            FORMS["w4a16 zeros"],
            without("k_proj.weight_zero_point"),
            "must hold .*k_proj.weight_zero_point",
        ),
        "no factor": (FORMS["nvfp4"], without("k_proj.weight_global_scale"), "must hold .*weight_global_scale"),
        "two scales": (
            FORMS["fp8"],
            lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight_scale": np.ones(1, np.float32)}),
            "k_proj.weight must have its scales in one tensor, but .*_scale_inv and .*k_proj.weight_scale;",
        ),
        "cut words": (FORMS["gptq"], changed("k_proj.qweight", cut), "k_proj.g_idx must have 56 numbers beside"),
        "cut bytes": (
            FORMS["nvfp4"],
            changed("k_proj.weight_packed", lambda x: x[:, :-1]),
            "weight_packed must have the",
        ),
        "cut blocks": (FORMS["fp8"], changed("k_proj.weight_scale_inv", cut), "weight_scale_inv must have one scale"),
        "cut zeros": (FORMS["awq"], changed("k_proj.qzeros", cut), r"k_proj.qzeros must have the shape \[2, 12\]"),
        "other shape": (
            FORMS["w4a16"],
            changed("k_proj.weight_shape", lambda x: x + 64),
            r"weight_packed must have the shape \[160, 16\]",
        ),
        "type": (FORMS["awq"], changed("qweight", lambda x: x.astype(np.float32)), "qweight must be I32, but is F32"),
        "NaN": (FORMS["fp8"], changed("k_proj.weight_scale_inv", with_nan), "scales of .*k_proj.weight must be finite"),
        "NaN number": (FORMS["fp8"], changed("k_proj.weight", with_nan), "numbers of .*k_proj.weight must be finite"),
        "NaN of 16": (FORMS["gptq"], changed("k_proj.scales", with_nan), "scales of .*k_proj.weight must be finite"),
        "NaN of 8": (FORMS["nvfp4"], changed("k_proj.weight_scale", with_nan), "scales of .*k_proj.weight must be fin"),
        "NaN of bytes": (FORMS["fp8 bytes"], changed("k_proj.weight_scale_inv", with_nan), "must be finite"),
        "factor": (FORMS["nvfp4"], changed("k_proj.weight_global_scale", np.zeros_like), "must be finite"),
        "empty": (FORMS["gptq"], changed("k_proj.qweight", lambda x: x[:0]), "k_proj.qweight must have numbers, but"),
        "far group": (FORMS["gptq order"], changed("k_proj.g_idx", far), r"columns of .*k_proj.* in \[0, 2\), .*77"),
        "no group": (FORMS["gptq order"], changed("k_proj.g_idx", unset), r"columns of .*k_proj.* in \[0, 2\), .*-1"),
        "no order": (FORMS["gptq order"], without("k_proj.g_idx"), "must hold .*k_proj.g_idx, a part of"),
        "no order of words": (FORMS["w4a16 order"], without("k_proj.weight_g_idx"), "must hold .*k_proj.weight_g_idx"),
        "zeros beside no zeros": (
            Form(FORMS["w4a16"].config, FORMS["w4a16 zeros"].pack),
            lambda _: None,
            "weight_zero_point must be absent or of zeros by its group of config_groups, but is not; download",
        ),
        "zeros beside floats": (
            FORMS["channel"],
            lambda tensors: tensors.update({f"{next(iter(SHAPES))}_zero_point": np.ones((96, 1), np.int8)}),
            "k_proj.weight_zero_point must be absent or of zeros",
        ),
        "skipped": (
            Form({**FORMS["fp8"].config, "modules_to_not_convert": ["down_proj"]}, FORMS["fp8"].pack),
            lambda _: None,
            r"config.json: quantization_config says that .*down_proj.weight is not quantised \('down_proj'\)",
        ),
        "not of the group": (
            Form(FORMS["w4a16"].config, FORMS["channel"].pack),
            lambda _: None,
            "weight must be as a group of config_groups says, but its numbers are F8_E4M3",
        ),
    }
    for case, (form, damage, reason) in cases.items():
        written(tmp_path / case, form, SHAPES, damage)
        with pytest.raises(ModelError, match=reason):
            read(tmp_path / case)


def test_several_forms_may_be_mixed(tmp_path: Path) -> None:
    """FP8 where a group says so by name, and INT4 elsewhere."""
    config = json.loads(json.dumps(FORMS["w4a16"].config)) | {"format": "mixed-precision"}
    groups = config["config_groups"]
    groups["group_0"] |= {"format": "pack-quantized"}
    groups["group_1"] = FORMS["channel"].config["config_groups"]["group_0"] | {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
    }

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        packer: Packer = FORMS["channel" if "self_attn" in name else "w4a16"].pack
        return packer(rng, name, shape)

    restored = written(tmp_path, Form(config, pack), SHAPES)
    for name, whole in read(tmp_path).items():
        np.testing.assert_array_equal(whole, restored[name])
