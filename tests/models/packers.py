"""Writes tiny checkpoints in the quantised formats that others publish. It shares no code with the readers.

A packer draws numbers, scales and zeros, and gives the tensors of the format and what they mean by its own formula:
that of the format's reference (compressed-tensors, GPTQModel, AutoAWQ, ModelOpt, transformers), in float32.
"""

import dataclasses
import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
TYPES = {E4M3: "F8_E4M3", E8M0: "F8_E8M0", BF16: "BF16", np.float16: "F16", np.float32: "F32"}
TYPES |= {np.int32: "I32", np.int64: "I64", np.int8: "I8", np.uint8: "U8"}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32

Tensors = dict[str, np.ndarray]
Packer = Callable[[np.random.Generator, str, tuple[int, ...]], tuple[Tensors, np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A format: the fields of `quantization_config`, what packs a kernel, and how many axes kernels may have."""

    config: dict[str, Any]
    pack: Packer
    axes: tuple[int, ...] = (2,)


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, with types that the library's numpy interface does not write."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        place = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": TYPES[tensor.dtype.type], "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def words_of(numbers: np.ndarray, bits: int, axis: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Words of 32 bits along an axis. Number k of a word is at `places[k]` from the low end."""
    per_word = 32 // bits
    numbers = np.moveaxis(numbers, axis, 0).astype(np.uint64)
    words = np.zeros((-(-len(numbers) // per_word), *numbers.shape[1:]), np.uint64)
    for index, row in enumerate(numbers):
        place = index % per_word if places is None else places[index % per_word]
        words[index // per_word] += row << np.uint64(place * bits)
    return np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)


def draw_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All numbers of e4m3 but NaN."""
    codes = rng.integers(0, 0x7F, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << np.uint8(7)
    return codes.view(E4M3)


def draw_scale(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, size: float) -> np.ndarray:
    """Positive scales, such that products are about as large as kernels are."""
    return (rng.uniform(0.5, 2.0, shape) * size).astype(dtype)


def blocks(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """The scale of each number."""
    rows, columns = np.arange(shape[-2]) // block[0], np.arange(shape[-1]) // block[1]
    return scale.astype(np.float32)[..., rows[:, None], columns[None, :]]


def fp8(block: tuple[int, int], role: str, dtype: Any = np.float32, more: str | None = None) -> Packer:
    """e4m3 with scales of blocks. A side of 0 is all of it."""

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        numbers = draw_e4m3(rng, shape)
        high, wide = (side or length for side, length in zip(block, shape[-2:], strict=True))
        counts = (*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide))
        if dtype in (np.uint8, E8M0):
            scale = rng.integers(112, 118, counts, np.uint8)
            meant = np.exp2(scale.astype(np.float32) - 127)
            scale = scale.view(dtype)
        else:
            scale = draw_scale(rng, counts, dtype, 2e-4)
            meant = scale
        restored = numbers.astype(np.float32) * blocks(meant, shape, (high, wide))
        stored = scale.reshape(()) if block == (0, 0) else scale
        tensors = {name: numbers, name.removesuffix(".weight") + role if role.startswith(".") else name + role: stored}
        if more is not None:
            tensors[name.removesuffix("weight") + more] = np.array(1.5, np.float32)
        return tensors, restored

    return pack


def fbgemm(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """e4m3 with a scale of each output. Experts are [expert, in, out], and the scales of both their kernels differ."""
    if len(shape) == 2:
        return fp8((1, 0), "_scale")(rng, name, shape)
    numbers, scale = draw_e4m3(rng, shape), draw_scale(rng, (shape[0], 1, shape[2]), np.float32, 2e-4)
    stored = scale if "gate_up" in name else scale.reshape(shape[0], shape[2], 1)
    return {name: numbers, f"{name}_scale": stored}, numbers.astype(np.float32) * scale


def int8(is_symmetric: bool) -> Packer:
    """Integers of 8 bits with a scale of each row, and a zero."""

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        numbers, scale = rng.integers(-128, 128, shape, np.int8), draw_scale(rng, (shape[0], 1), BF16, 1e-3)
        tensors, zero = {name: numbers, f"{name}_scale": scale}, np.zeros((shape[0], 1), np.int8)
        if not is_symmetric:
            tensors[f"{name}_zero_point"] = zero = rng.integers(-9, 9, zero.shape, np.int8)
        return tensors, (numbers.astype(np.float32) - zero) * scale.astype(np.float32)

    return pack


def packed(bits: int, group: int, *, is_symmetric: bool = True, has_order: bool = False) -> Packer:
    """pack-quantized of compressed-tensors. A group of 0 is all inputs."""

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        rows, columns = shape
        half, wide = 1 << (bits - 1), group or columns
        numbers = rng.integers(-half, half, shape)
        scale = draw_scale(rng, (rows, columns // wide), BF16, 0.2 / half)
        zero = np.zeros(scale.shape, np.int64) if is_symmetric else rng.integers(-half, half, scale.shape)
        groups = np.arange(columns) // wide
        tensors = {
            f"{name}_packed": words_of(numbers + half, bits, 1),
            f"{name}_scale": scale,
            f"{name}_shape": np.array(shape, np.int64),
        }
        if not is_symmetric:
            tensors[f"{name}_zero_point"] = words_of(zero + half, bits, 0)
        if has_order:
            tensors[f"{name}_g_idx"] = groups = rng.permutation(groups).astype(np.int32)
        return tensors, (numbers - zero[:, groups]).astype(np.float32) * scale.astype(np.float32)[:, groups]

    return pack


def nvfp4(is_of_modelopt: bool) -> Packer:
    """e2m1 in groups of 16, two numbers in a byte, with scales in e4m3 and a factor."""

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        codes, scale = rng.integers(0, 16, shape), draw_scale(rng, (shape[0], shape[1] // 16), E4M3, 100.0)
        pairs = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
        values = np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)], np.float32)[codes]
        of_group = scale.astype(np.float32)
        before = name.removesuffix("weight")
        if is_of_modelopt:
            factor = np.array(rng.uniform(2e-4, 8e-4), np.float32)
            tensors = {name: pairs, f"{name}_scale": scale, f"{name}_scale_2": factor}
            return {**tensors, f"{before}input_scale": factor}, values * np.repeat(of_group * factor, 16, 1)
        factor = rng.uniform(1000, 5000, 1).astype(np.float32)
        tensors = {f"{name}_packed": pairs, f"{name}_scale": scale, f"{name}_global_scale": factor}
        return {**tensors, f"{before}input_global_scale": factor}, values * np.repeat(of_group / factor, 16, 1)

    return pack


def mxfp4_words(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """MXFP4 of compressed-tensors: e2m1 in groups of 32, two numbers in a byte, with exponents."""
    codes, exponents = rng.integers(0, 16, shape), rng.integers(119, 124, (shape[0], shape[1] // 32)).astype(np.uint8)
    pairs = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    values = np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)], np.float32)[codes]
    whole = np.ldexp(values, np.repeat(exponents.astype(np.int32), 32, 1) - 127)
    return {f"{name}_packed": pairs, f"{name}_scale": exponents}, whole


def awq(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """AWQ for `gemm`: words of eight outputs, of which the low end has 0, 2, 4, 6 and then 1, 3, 5, 7."""
    rows, columns = shape
    numbers, zero = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // GROUP, rows))
    scale = draw_scale(rng, zero.shape, np.float16, 0.02)
    before, places = name.removesuffix("weight"), (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {
        f"{before}qweight": words_of(numbers, 4, 1, places),
        f"{before}qzeros": words_of(zero, 4, 1, places),
        f"{before}scales": scale,
    }
    whole = (numbers - np.repeat(zero, GROUP, 0)).astype(np.float32) * np.repeat(scale.astype(np.float32), GROUP, 0)
    return tensors, np.ascontiguousarray(whole.T)


def gptq(bits: int, version: int, *, is_symmetric: bool = False, has_order: bool = False) -> Packer:
    """GPTQ: words of inputs. The first version has each zero less one, a borrow going into the zero above."""

    def pack(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
        rows, columns = shape
        numbers = rng.integers(0, 1 << bits, (columns, rows))
        scale = draw_scale(rng, (columns // GROUP, rows), np.float16, 0.2 / (1 << bits))
        zero = np.full(scale.shape, 1 << (bits - 1)) if is_symmetric else rng.integers(0, 1 << bits, scale.shape)
        groups = np.arange(columns) // GROUP
        if has_order:
            groups = rng.permutation(groups)
        words = words_of(zero, bits, 1).view(np.uint32)
        if version == 1:
            ones = sum(1 << place for place in range(0, 32, bits))
            words = ((words.astype(np.int64) - ones) % (1 << 32)).astype(np.uint32)
        before = name.removesuffix("weight")
        tensors = {
            f"{before}qweight": words_of(numbers, bits, 0),
            f"{before}qzeros": words.view(np.int32),
            f"{before}scales": scale,
            f"{before}g_idx": groups.astype(np.int32),
        }
        whole = scale.astype(np.float32)[groups] * (numbers - zero[groups]).astype(np.float32)
        return tensors, np.ascontiguousarray(whole.T)

    return pack


def mxfp4(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """Experts of gpt-oss, [expert, in, out] in the model: e2m1 in groups of 32 with an exponent."""
    experts, columns, rows = shape
    codes = rng.integers(0, 16, (experts, rows, columns // 32, 32))
    exponents = rng.integers(119, 124, codes.shape[:3]).astype(np.uint8)
    pairs = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    values = np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)], np.float32)[codes]
    whole = np.ldexp(values, exponents.astype(np.int32)[..., None] - 127).reshape(experts, rows, columns)
    return {f"{name}_blocks": pairs, f"{name}_scales": exponents}, np.ascontiguousarray(whole.swapaxes(1, 2))


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The section of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    base = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {**base, "config_groups": {"group_0": group}, "quantization_status": "compressed", **more}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def _integers(bits: int, *, is_symmetric: bool = True, group: int | None = GROUP, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    base = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "group_size": group, "strategy": strategy}
    return {**base, **more}


PACKED = re.compile(r".*(_proj(\.weight)?|\.w[123]\.weight)")
"""Names of the kernels that are packed: all but those of embeddings, heads and routers."""
BLOCK = [40, 24]
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK}
_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]}
_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32, "strategy": "group"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}

FORMS: dict[str, Form] = {
    "fp8": Form(_FP8, fp8((40, 24), "_scale_inv"), (2, 3)),
    "fp8 bfloat16 scales": Form(_FP8, fp8((40, 24), "_scale_inv", BF16)),
    "fp8 ue8m0": Form({**_FP8, "scale_fmt": "ue8m0"}, fp8((40, 24), "_scale_inv", E8M0)),
    "fp8 bytes": Form({**_FP8, "scale_fmt": "ue8m0"}, fp8((40, 24), "_scale_inv", np.uint8)),
    "fp8 of DeepSeek V4": Form(_FP8, fp8((40, 24), ".scale")),
    "fp8 static": Form({**_STATIC, "weight_block_size": None}, fp8((0, 0), "_scale_inv", BF16, "activation_scale")),
    "fp8 of AutoFP8": Form(
        {**_STATIC, "ignored_layers": ["lm_head"]}, fp8((0, 0), "_scale", np.float32, "input_scale")
    ),
    "fbgemm": Form({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm, (2, 3)),
    "channel": Form(compressed("float-quantized", _floats("channel")), fp8((1, 0), "_scale", BF16)),
    "tensor": Form(compressed("float-quantized", _floats("tensor")), fp8((0, 0), "_scale", BF16, "input_scale")),
    "block": Form(
        compressed("float-quantized", _floats("block", block_structure=BLOCK)), fp8((40, 24), "_scale", BF16)
    ),
    "int8": Form(compressed("int-quantized", _integers(8, group=None)), int8(True)),
    "int8 zeros": Form(compressed("int-quantized", _integers(8, is_symmetric=False, group=None)), int8(False)),
    "w4a16": Form(compressed("pack-quantized", _integers(4)), packed(4, GROUP)),
    "w4a16 channel": Form(compressed("pack-quantized", _integers(4, group=None)), packed(4, 0)),
    "w4a16 zeros": Form(
        compressed("pack-quantized", _integers(4, is_symmetric=False)), packed(4, GROUP, is_symmetric=False)
    ),
    "w4a16 order": Form(compressed("pack-quantized", _integers(4, actorder="group")), packed(4, GROUP, has_order=True)),
    "w8a16": Form(compressed("pack-quantized", _integers(8, group=None)), packed(8, 0)),
    "w8a16 zeros": Form(
        compressed("pack-quantized", _integers(8, is_symmetric=False)), packed(8, GROUP, is_symmetric=False)
    ),
    "nvfp4": Form(compressed("nvfp4-pack-quantized", _NVFP4), nvfp4(False)),
    "mxfp4 in words": Form(compressed("mxfp4-pack-quantized", {**_MXFP4, "scale_dtype": "torch.uint8"}), mxfp4_words),
    "modelopt nvfp4": Form({**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, nvfp4(True)),
    "modelopt fp8": Form({**_MODELOPT, "quant_algo": "FP8"}, fp8((0, 0), "_scale", np.float32, "input_scale")),
    "awq": Form(_AWQ, awq),
    "gptq": Form(_GPTQ, gptq(4, 1)),
    "gptq symmetric": Form({**_GPTQ, "sym": True}, gptq(4, 1, is_symmetric=True)),
    "gptq v2": Form({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 2)),
    "gptq order": Form({**_GPTQ, "desc_act": True}, gptq(4, 1, has_order=True)),
    "gptq 8 bits": Form({**_GPTQ, "bits": 8}, gptq(8, 1, has_order=True)),
}
"""Formats of kernels [out, in]."""
MXFP4 = Form({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, mxfp4, (3,))
"""That of stacks of experts, [expert, in, out]."""


def write_packed(
    directory: Path,
    config: Mapping[str, Any],
    form: Form,
    tensors: Mapping[str, np.ndarray],
    damage: Callable[[Tensors], Any] = lambda _: None,
) -> Tensors:
    """Writes a model whose projections are packed. Gives its tensors with what these mean in their place.

    Args:
        directory: The directory, which is made.
        config: Its `config.json` without `quantization_config`.
        form: The format.
        tensors: The tensors. Of projections only the shapes count.
        damage: What is done to the tensors before they are written.
    """
    rng, stored, restored = np.random.default_rng(0), {}, {}
    for name, tensor in tensors.items():
        restored[name], parts = tensor, {name: tensor}
        if PACKED.fullmatch(name) and tensor.ndim in form.axes:
            parts, restored[name] = form.pack(rng, name, tensor.shape)
        stored |= parts
    damage(stored)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    write(directory / "model.safetensors", stored)
    return restored
