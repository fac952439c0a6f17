"""Finds in the files of a model directory how its kernels are quantised. No JAX and no numpy."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jsg.models.published import compressed_tensors, fp8, integers, modelopt, mxfp4
from jsg.models.published.record import Published, require_one_of
from jsg.sources import FieldError, Fields, read_json

METHODS: Mapping[str, Callable[[Fields], Published]] = {
    "awq": integers.read_awq,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read,
    "gptq": integers.read_gptq,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
}
"""`quant_method` → how the other fields are read."""
_SECTIONS = ("quantization_config", "compression_config", "quantization")
"""Sections of `config.json` that say how weights are quantised: of transformers, of old llm-compressor, and of MLX."""
_FILES = {
    "hf_quant_config.json": ("quantization", "quant_algo", "modelopt"),
    "quantize_config.json": (None, "bits", "gptq"),
    "quant_config.json": (None, "w_bit", "awq"),
}
"""Files of ModelOpt, AutoGPTQ and AutoAWQ → the section in them, None for the whole file, the field in there that says
that weights are quantised, and the method."""
_OF_FIELDS = {"quant_algo": "modelopt", "config_groups": "compressed-tensors"}
"""Fields of sections without a method → the method."""
ADVICE = "take another checkpoint of the model, or the unquantised one with --quantization for 8 or 4 bits"


def read_published(directory: Path, *halves: Fields) -> Published | None:
    """How the kernels of a checkpoint are quantised; None if they are not. The first section that says so counts.

    Args:
        directory: The model directory.
        halves: The whole `config.json`, and its section of the text half if there is one.

    Raises:
        FieldError: It says so in a way that is not supported. The message names field and value.
    """
    for file, name, section in _sections(directory, halves):
        try:
            values = section if isinstance(section, dict) else {"quant_method": section}
            fields = Fields(f"{file}: {name}" if name else file, values)
            default = next((method for field, method in _OF_FIELDS.items() if values.get(field)), None)
            method = require_one_of(fields, "quant_method", *METHODS, default=default)
            return dataclasses.replace(METHODS[method](fields), where=fields.file)
        except FieldError as error:  # of the section as a whole, for without the field it would say something else
            raise FieldError(f"{error}; {ADVICE}", file, name or error.name) from None
    return None


def notes_of(published: Published | None) -> tuple[str, ...]:
    """What is said of a model whose kernels are quantised so."""
    if published is None:
        return ()
    return (
        f"the kernels are quantised ({published.title}); how a checkpoint says that activations, keys and values are "
        "rounded is not used",
    )


def _sections(directory: Path, halves: tuple[Fields, ...]) -> Iterator[tuple[str, str, Any]]:
    """File, name and value of each section that says that weights are quantised. A whole file has no name."""
    for half in halves:
        for name in _SECTIONS:
            section = half.get(name)
            if any(section.values()) if isinstance(section, dict) else section is not None:
                yield half.file, name, section
    for file, (name, field, method) in _FILES.items():
        if (directory / file).is_file():
            whole = read_json(directory / file)
            section = whole.get(name) if name else whole
            if isinstance(section, dict) and section.get(field):
                yield file, name or "", {"quant_method": method, **section}
