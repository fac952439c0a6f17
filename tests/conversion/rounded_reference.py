"""Records what transformers and compressed-tensors make of checkpoints that `jsg convert --quantization` writes.

`PYTHONPATH=. python -m tests.conversion.rounded_reference PYTHON`, with a Python that has torch, transformers and
compressed-tensors. The record has SHA-256 of the numbers of each kernel, and logits of the model with these numbers.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.variants import VARIANTS, random_tensors, random_tokens, write_checkpoint

RECORD = Path(__file__).parent / "data" / "rounded.npz"
QUANTIZATIONS = ("int4", "int8", "fp8")
MODELS = ("mixtral", "qwen3")
"""One with experts and routers, and one with norms of queries and keys."""
SEED, LENGTH = 2026, 40
COLUMNS = np.arange(0, 512, 7)


def write(directory: Path, variant: str) -> None:
    """The checkpoint that is rounded."""
    directory.mkdir()
    write_checkpoint(directory, variant, random_tensors(variant, SEED))


def tokens(variant: str) -> list[int]:
    """The prompt."""
    return random_tokens(variant, SEED, LENGTH)


def digest(numbers: np.ndarray) -> str:
    """Of numbers in float32, without the sign of zeros."""
    return hashlib.sha256((np.ascontiguousarray(numbers, np.float32) + 0.0).tobytes()).hexdigest()


def record(directory: Path, variant: str) -> tuple[dict[str, str], np.ndarray]:
    """Digests of the kernels, and logits. Stops if the checkpoint does not fit, or if it means two things."""
    import torch
    import transformers
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    def logits(*, is_restored: bool) -> np.ndarray:
        config = transformers.CompressedTensorsConfig(dequantize=is_restored)
        model, report = getattr(transformers, VARIANTS[variant]["architectures"][0]).from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            quantization_config=config,
        )
        assert not any(report.values()), (directory.name, report)
        if is_restored:
            torch.nn.Module.float(model)  # experts have the type of their scales, and round activations to it
        with torch.no_grad():
            return model(torch.tensor([tokens(variant)])).logits[0].numpy()

    whole, held = logits(is_restored=True), load_file(directory / "model.safetensors")
    difference = np.abs(whole - logits(is_restored=False)).max()
    assert difference < 3, (directory.name, difference)  # of fp8 and of the type of experts, which round activations
    section: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = transformers.CompressedTensorsConfig.from_dict(section).quantization_config
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    digests = {}
    for name in held:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            parts = {end: part for full, part in held.items() if (end := full.removeprefix(f"{module}.")) != full}
            restored = compressor.decompress({**parts, "weight_scale": parts["weight_scale"].float()}, scheme)
            digests[f"{module}.weight"] = digest(restored["weight"].float().numpy())
    return digests, whole[:, COLUMNS]


def of_torch(root: Path) -> None:
    """The half that has torch."""
    import compressed_tensors
    import torch
    import transformers

    note: dict[str, Any] = {each.__name__: each.__version__ for each in (torch, transformers, compressed_tensors)}
    arrays = {}
    for variant in MODELS:
        for quantization in QUANTIZATIONS:
            case = f"{variant} {quantization}"
            note[case], arrays[case] = record(root / case, variant)
    np.savez_compressed(RECORD, note=np.array(json.dumps(note)), **arrays)


def main(python: str) -> None:
    from jsg.conversion.convert import convert

    with tempfile.TemporaryDirectory() as folder:
        for variant in MODELS:
            write(Path(folder, variant), variant)
            for quantization in QUANTIZATIONS:
                convert(Path(folder, variant), Path(folder, f"{variant} {quantization}"), quantization=quantization)
        subprocess.run([python, "-m", __spec__.name, "--torch", folder], check=True)


if __name__ == "__main__":
    of_torch(Path(sys.argv[2])) if sys.argv[1] == "--torch" else main(sys.argv[1])
