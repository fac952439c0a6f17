"""Recognises in which form the weights of a model directory or of a hub repository are. No JAX and no numpy."""

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Literal

from jsg.errors import ModelError
from jsg.gguf.folder import LINK as GGUF_LINK

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ORBAX_MANIFEST = "orbax.json"
ORBAX_FOLDER = "orbax"
_WANTED = {"safetensors": f"{SINGLE_FILE} or {INDEX_FILE}", "orbax": ORBAX_MANIFEST}
_FOREIGN: Mapping[str, str] = {
    "adapter_config.json adapter_model.*": (
        "a LoRA adapter and no whole model; merge it into its base model (peft's merge_and_unload, then "
        "save_pretrained) and serve the result"
    ),
    "*.gguf": "GGUF, the form of llama.cpp; name one file on this machine, which is then read without --load-format",
    "ggml*.bin": "in the form of llama.cpp before GGUF; take the checkpoint in safetensors that it was made of",
    "params.json consolidated*": (
        "in the own form of Mistral or Meta (params.json, consolidated weights); take a checkpoint for transformers, "
        "which has config.json and model.safetensors"
    ),
    "openvino_* mlc-chat-config.json params_shard_* *.engine rank*.safetensors *vocabulary.* *.mlpackage *.mlmodelc "
    "*.pte *.task *.litertlm": (
        "compiled for OpenVINO, MLC, TensorRT-LLM, CTranslate2, Core ML, ExecuTorch or LiteRT; take the checkpoint in "
        "safetensors that it was made of"
    ),
    "*.nemo model_config.yaml *.distcp .metadata pytorch_model_fsdp* global_step* iter_* mp_rank_*": (
        "a state of training (NeMo, Megatron, DeepSpeed or FSDP); let the program that trained it write a checkpoint "
        "for transformers in safetensors"
    ),
    "*.bin *.bin.index.json *.pt *.pth *.ckpt": (
        "in pickles of PyTorch (such as pytorch_model.bin), which can run code and are never opened; take a checkpoint "
        "in safetensors, or save it so with transformers"
    ),
    "*.h5 *.msgpack *.onnx *.tflite *.npz": (
        "made for TensorFlow, Flax, ONNX or MLX; take a checkpoint in safetensors"
    ),
    "model_index.json": "a pipeline of diffusers, which makes pictures; choose a language model",
    "*.safetensors": (
        f"in safetensors, but without {SINGLE_FILE} and without the index of shards; download it again, or save it "
        "again with transformers"
    ),
}
"""Patterns of the names of files that no checkpoint of jsg has → what such files are, and what to do. The first that
matches counts."""


def has_weights(files: Iterable[str]) -> bool:
    """Whether there is a checkpoint of any form among these names."""
    return not {SINGLE_FILE, INDEX_FILE, ORBAX_MANIFEST, ORBAX_FOLDER, GGUF_LINK}.isdisjoint(files)


def weights_form(files: Iterable[str], load_format: str = "auto") -> Literal["safetensors", "orbax", "gguf"]:
    """Which checkpoint a model has.

    Args:
        files: The names of all its files, or of those in the first folder.
        load_format: `safetensors` or `orbax` for a checkpoint of that form, any other value for the one that exists.

    Raises:
        ModelError: It has none of that form, or both. The message says what it has instead.
    """
    paths = [PurePosixPath(file) for file in files]
    tops = {path.parts[0] for path in paths if path.parts}
    has_safetensors = bool({SINGLE_FILE, INDEX_FILE} & tops)
    has_orbax = bool({ORBAX_MANIFEST, ORBAX_FOLDER} & tops)
    if load_format not in _WANTED and GGUF_LINK in tops:
        return "gguf"
    if load_format not in _WANTED and has_safetensors and has_orbax:
        raise ModelError(
            "a model must have one checkpoint, but has safetensors and orbax; say which with --load-format"
        )
    if has_orbax and load_format != "safetensors":
        return "orbax"
    if has_safetensors and load_format != "orbax":
        return "safetensors"
    rule = f"a model must have {_WANTED.get(load_format, ' or '.join(_WANTED.values()))}"
    if has_orbax or has_safetensors:
        raise ModelError(f"{rule}, but has a checkpoint of the other form; choose it with --load-format")
    if (what := foreign_form(map(str, paths))) is not None:
        raise ModelError(f"{rule}, but this is {what}")
    raise ModelError(f"{rule}, but has no weights; take a checkpoint in safetensors, or use --load-format dummy")


def foreign_form(files: Iterable[str]) -> str | None:
    """What a model is that has no checkpoint of jsg, by the names of its files; None if that is not known."""
    names = [PurePosixPath(file).name for file in files]
    for patterns, what in _FOREIGN.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split() for name in names):
            return what
    return None
