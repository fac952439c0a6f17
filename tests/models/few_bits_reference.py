"""Records what transformers and compressed-tensors restore of the kernels that `packers.py` draws.

`PYTHONPATH=. PYTHON -m tests.models.few_bits_reference`, with a Python that has torch, transformers, ml_dtypes and
compressed-tensors. The record has SHA-256 of the numbers in float32.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.packers import FORMS, MXFP4, Tensors

RECORD = Path(__file__).parent / "data" / "few_bits.json"
NAME, SHAPE, STACK = "kernel.weight", (80, 96), (3, 64, 48)


def drawn(form: str) -> Tensors:
    """The tensors of a kernel in this format."""
    rng = np.random.default_rng(7)
    return MXFP4.pack(rng, NAME, STACK)[0] if form == "mxfp4" else FORMS[form].pack(rng, NAME, SHAPE)[0]


def digest(numbers: np.ndarray) -> str:
    """Of numbers in float32, without the sign of zeros."""
    return hashlib.sha256((np.ascontiguousarray(numbers, np.float32) + 0.0).tobytes()).hexdigest()


def main() -> None:
    import torch
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def tensor(array: np.ndarray) -> torch.Tensor:
        name = array.dtype.name
        if name.startswith(("float8", "bfloat16")):
            plain = np.uint8 if array.dtype.itemsize == 1 else np.int16
            return torch.from_numpy(array.view(plain).copy()).view(getattr(torch, name))
        return torch.from_numpy(array.copy())

    def restored(form: str) -> torch.Tensor:
        parts = {name.removeprefix("kernel."): tensor(array) for name, array in drawn(form).items()}
        if form == "mxfp4":
            return convert_moe_packed_tensors(parts["weight_blocks"], parts["weight_scales"], dtype=torch.float32)
        if "config_groups" not in FORMS[form].config:
            scale = next(part for name, part in parts.items() if "scale" in name and "activation" not in name)
            return Fp8Dequantize(None)._dequantize_one(parts["weight"], scale, torch.float32)
        weights: dict[str, Any] = FORMS[form].config["config_groups"]["group_0"]["weights"]
        known = {name: value for name, value in weights.items() if value != "group" or name != "actorder"}
        args, scale = QuantizationArgs(**known), parts["weight_scale"].float()
        if form == "mxfp4 in words":
            scale = decompress_mx_scale(parts["weight_scale"]).float()
        zero, packed = parts.get("weight_zero_point"), parts.get("weight_packed")
        if packed is None:
            numbers = parts["weight"]
        elif form in ("nvfp4", "mxfp4 in words"):
            numbers = unpack_fp4_from_uint8(packed, *SHAPE, dtype=torch.float32)
        else:
            numbers = unpack_from_int32(packed, args.num_bits, torch.Size(SHAPE))
            if zero is not None:
                zero = unpack_from_int32(zero, args.num_bits, scale.shape, packed_dim=0)
        factor = parts.get("weight_global_scale")
        return dequantize(numbers, scale, zero, args, torch.float32, factor)

    forms = [name for name, form in FORMS.items() if "config_groups" in form.config and name != "w4a16 order"]
    forms += [name for name, form in FORMS.items() if form.config["quant_method"] == "fp8"] + ["mxfp4"]
    record = {form: digest(restored(form).numpy()) for form in forms}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
