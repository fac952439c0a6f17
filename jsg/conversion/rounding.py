"""Rounds kernels to 8 or 4 bits, in the form of compressed-tensors, which jsg, vLLM and transformers read."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import jsg
from jsg.conversion.safetensors_writer import Bundle, Entry, as_stored
from jsg.errors import ModelError
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.models.checkpoint import Checkpoint
from jsg.models.loading import abstract_model, parameters
from jsg.models.origin import Source
from jsg.models.part_reader import PartReader
from jsg.models.published.compressed_tensors import PRODUCER
from jsg.models.quantise import FORMS, quantise
from jsg.models.spec import ModelSpec

_EVEN = {"symmetric": True, "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
SCHEMES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": FORMS["int4"].group, **_EVEN},
        None,
    ),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", **_EVEN}, None),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", **_EVEN}, _TOKEN),
}
"""`--quantization` → format, weights, and activations: e4m3 is multiplied with e4m3, where a card does that."""
SCALES = {"float32": "F32", "bfloat16": "BF16"}
HEAD = "lm_head"


def rounded(checkpoint: Checkpoint, config: ModelSpec, plain: ModelSpec, quantization: str) -> list[Bundle]:
    """All tensors of a checkpoint, with those of kernels in few bits in place of the kernels that are rounded.

    These are the kernels, and the numbers, that `jsg serve --quantization` makes. Experts that are in one tensor get a
    tensor each. Tensors that jsg does not read stay too, for programs that do.

    Args:
        checkpoint: The checkpoint, which has no kernels in few bits.
        config: The model, with its experts as the checkpoint has them.
        plain: The same with a tensor for each expert, if the family knows such checkpoints.
        quantization: One of `FORMS`.

    Raises:
        ModelError: A kernel cannot be rounded, or compressed-tensors has no form for it. The message names it.
    """
    kernels, reader, form = _kernels(config, plain, quantization), PartReader(checkpoint), FORMS[quantization]
    made = list[Bundle]()
    for name, stored, tensor in checkpoint.stored():
        if name not in kernels:
            made.append(as_stored(stored, tensor))
            continue
        for own, source in kernels[name].items():
            whole = Source(name, tensor.shape) if source is None else source
            made += _in_few_bits(_stored_name(stored, name, own), whole, reader, form)
    return made


def section(bundles: Iterable[Bundle], quantization: str) -> dict[str, Any]:
    """`quantization_config` of these tensors."""
    shapes = {name: entry.shape for bundle in bundles for name, entry in bundle.tensors.items()}
    in_few_bits = {name.removesuffix("_scale") for name in shapes if name.endswith(".weight_scale")}
    matrices = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1]
    form, weights, activations = SCHEMES[quantization]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": form}},
        "ignore": _ignored(in_few_bits, [name for name in matrices if name not in in_few_bits]),
        "kv_cache_scheme": None,
        "producer": {"name": PRODUCER, "version": jsg.__version__},
    }


def _ignored(in_few_bits: Iterable[str], others: Sequence[str]) -> list[str]:
    """The modules of matrices that are not rounded. Of a part without kernels that are, such as a tower, one pattern.

    The pattern holds wherever the part is, because transformers 5 moved towers.
    """
    with_kernels = {part for name in in_few_bits for part in _parts(name)}
    listed = {HEAD: None}
    for name in others:
        alone = next((part for part in _parts(name) if part not in with_kernels), None)
        if alone is None or "layers" in alone.split("."):
            listed[name.removesuffix(".weight")] = None
        else:
            listed[rf"re:(.*\.)?{re.escape(alone.rpartition('.')[2])}\..*"] = None
    return list(listed)


def _parts(name: str) -> Iterator[str]:
    """The parts of a model that a module is in, from the outermost on."""
    return itertools.accumulate(name.split(".")[:-2], "{}.{}".format)


def _kernels(config: ModelSpec, plain: ModelSpec, quantization: str) -> dict[str, dict[str, Source | None]]:
    """The kernels that are rounded, by name: the name of each kernel that is made of it → which part; None for all.

    Raises:
        ModelError: The family has its experts in one tensor only.
    """
    found: dict[str, dict[str, Source | None]] = {}
    both = (abstract_model(each, jnp.float32, quantization) for each in (config, plain))
    for param, own in zip(*map(parameters, both), strict=True):
        if not isinstance(param.get_value(), Quantised):
            continue
        origins = param.get_metadata("origin"), own.get_metadata("origin")
        for source, alone in zip(*(origin.sources for origin in origins), strict=True):
            is_stack = source.part is not None and source.part.expert is not None
            if is_stack and alone.name == source.name:
                raise ModelError(
                    f"compressed-tensors needs a tensor for each expert, but {source.name} has all experts, and "
                    "this architecture knows no other names; serve SRC with --quantization instead"
                )
            found.setdefault(source.name, {})[alone.name] = source if is_stack else None
    return found


def _stored_name(stored: str, name: str, own: str) -> str:
    """What a kernel of this name here is called beside a tensor that is called `name` here and `stored` in the file."""
    return stored if own == name else stored.removesuffix(name.removeprefix("model.")) + own.removeprefix("model.")


def _in_few_bits(name: str, source: Source, reader: PartReader, form: Form) -> Iterator[Bundle]:
    """The tensors of a kernel [out, in]."""
    rows, columns = source.shape
    scale = Entry(SCALES[form.scale], (rows, columns // (form.group or columns)))
    if form.numbers == "e4m3":
        numbers = {name: Entry("F8_E4M3", source.shape)}
    else:
        numbers = {f"{name}_packed": Entry("I32", (rows, -(-columns * (8 // form.per_byte) // 32)))}
        shape = np.array(source.shape, np.int64)
        yield Bundle({f"{name}_shape": Entry("I64", (2,))}, 1, lambda some: [shape[some]])

    def make(some: slice) -> list[np.ndarray]:
        made = quantise(reader.read(source, (some, slice(None))), source.name, form)
        return [made.values if form.numbers == "e4m3" else _words(made.values, form), made.scale]

    yield Bundle({**numbers, f"{name}_scale": scale}, columns, make)


def _words(values: np.ndarray, form: Form) -> np.ndarray:
    """Integers in words of 32 bits along inputs, the first in the lowest bits, each plus half of their range."""
    numbers = values if form.per_byte == 2 else values.view(np.uint8) ^ 128
    return np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 4))).view("<i4")
