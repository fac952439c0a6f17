"""The tensors of GGUF files under the names, and with the numbers, that the checkpoint for transformers has."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jsg.errors import ModelError
from jsg.gguf.architectures import FACTORS, Metadata, name_of, read_metadata
from jsg.gguf.container import Place, bytes_of, mapped, read_container
from jsg.kernels_pallas.form import Form
from jsg.malloc import rows_at_once
from jsg.models.published.kernel import Kept
from jsg.models.published.record import KeptForm

_OF_BLOCKS = Form("int8", 32, "int8", has_factor=True, has_zero=True, has_step=True, block=256)
FORMS: Mapping[str, Form] = {
    "Q4_0": Form("int4", 32, "float16"),
    "Q8_0": Form("int8", 32, "float16"),
    "Q4_K": dataclasses.replace(_OF_BLOCKS, numbers="uint4"),
    "Q5_K": _OF_BLOCKS,
    "Q6_K": Form("int8", 16, "int8", has_factor=True, block=256),
}
"""Types whose kernels stay in 8 or 4 bits, and how. A number of Q5_K and of Q6_K takes a byte."""


class GgufTensor:
    """One tensor, or one expert of it.

    Attributes:
        shape: Its shape.
        dtype: The type of the numbers that are read, as safetensors calls it.
        num_bytes: The bytes in the file of numbers in few bits; 0 if each is whole.
    """

    def __init__(
        self, name: str, data: np.ndarray, place: Place, heads: int | None = None, *, is_one_more: bool = False
    ):
        """Takes bytes [rows…, bytes of a row].

        Args:
            name: Its name in the file, for errors.
            data: The bytes.
            place: Where they are from.
            heads: The number of heads whose rows are in the order of llama.cpp; None for rows as they are published.
            is_one_more: Whether 1 was added to each number.
        """
        self.shape, self._name = (*data.shape[:-1], place.shape[-1]), name
        self._data, self._block, self._is_one_more = data, place.block, is_one_more
        self.dtype = "F32" if is_one_more else place.block.dtype
        self.num_bytes = data.nbytes if place.block.length > 1 else 0
        self._order: np.ndarray | None = None
        if heads and self.shape[0] % (2 * heads) == 0:
            # The two numbers of a pair are neighbours in the file, and half a head apart here.
            self._order = np.arange(self.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A slice. Only the blocks that it touches are restored. Raises ModelError if a scale is not finite."""
        numbers = self._finite(self._cut(lambda blocks: (self._block.restore(blocks),), slices)[0])
        return numbers.astype(np.float32) - np.float32(1) if self._is_one_more else numbers

    @property
    def kept_form(self) -> KeptForm | None:
        """See `FewBits`."""
        form = FORMS.get(self._block.name)
        return None if form is None else KeptForm(form, order="", is_turned=False)

    def kept(self, slices: tuple[slice, ...], form: Form) -> Kept:
        """See `FewBits`. Raises ModelError if a scale is not finite."""
        assert self._block.split is not None, "a tensor with a form"
        numbers, scale, *beside = self._cut(self._block.split, slices)
        scale = self._finite(scale)
        factor, minimum, step = (each if each is None else self._finite(each) for each in beside)
        if form.per_byte == 2:
            codes = numbers.astype(np.uint8) if form.numbers == "uint4" else (numbers + np.int8(8)).view(np.uint8)
            numbers = codes[..., ::2] | codes[..., 1::2] << 4
        if form.has_step and step is None:
            minimum, step = np.zeros_like(scale), np.zeros_like(factor)
        repeats = (FORMS[self._block.name].group or 1) // (form.group or 1)
        minimum = None if minimum is None else minimum.repeat(repeats, -1)
        return Kept(numbers, scale.repeat(repeats, -1), minimum, factor, step=step)

    def _finite(self, made: np.ndarray) -> np.ndarray:
        """What was made with scales. A number times a scale that is not finite is not, even if it is zero."""
        if self.num_bytes and not np.isfinite(made).all():
            raise ModelError(
                f"the scales of {self._name} must be finite, but one is NaN or infinity; download the file again"
            )
        return made

    def _cut(self, make: Callable[[np.ndarray], Sequence[Any]], slices: tuple[slice, ...]) -> list[Any]:
        """Arrays [N, …] that are made of blocks, of which a slice has its rows and what its columns have; or None."""
        *rows, columns = slices
        if self._order is not None and not rows:  # biases
            return [part[self._order[columns]] for part in self._of_rows(make, [], slice(None))]
        return self._of_rows(make, rows if self._order is None else [self._order[rows[0]], *rows[1:]], columns)

    def _of_rows(self, make: Callable[[np.ndarray], Sequence[Any]], rows: Sequence[Any], columns: slice) -> list[Any]:
        length, nbytes = self._block.length, self._block.nbytes
        start, stop, step = columns.indices(self.shape[-1])
        first, last = start // length, -(-max(start, stop) // length)
        raw = np.ascontiguousarray(self._data[(*rows, slice(first * nbytes, last * nbytes))])

        def cut(part: np.ndarray) -> np.ndarray:
            count = part.shape[1]  # of a block
            begin, end = ((each - first * length) * count // length for each in (start, stop))
            return part.reshape(*raw.shape[:-1], (last - first) * count)[..., begin:end:step]

        with np.errstate(all="ignore"):  # `_finite` says it
            return [None if part is None else cut(part) for part in make(raw.reshape(-1, nbytes))]

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """Rows that are restored at once."""
        return outer, rows_at_once(self.shape, 4, outer)


def open_tensors(paths: Sequence[Path]) -> dict[str, GgufTensor]:
    """The tensors of a model's files by their names for transformers.

    Raises:
        ModelError: A file is damaged, or it is of an architecture or of types that jsg does not read.
    """
    containers = [(path, read_container(path)) for path in paths]
    metadata = read_metadata(containers)
    architecture, has_experts = metadata.architecture, bool(metadata.get("expert_count"))
    heads = _heads(metadata) if architecture == "llama" else {}
    tensors: dict[str, GgufTensor] = {}
    for path, container in containers:
        file = mapped(path)
        for stored, place in container.tensors.items():
            if stored in FACTORS:
                continue
            name, data = name_of(stored, architecture, has_experts=has_experts), bytes_of(file, place)
            if "{}" in name and len(place.shape) == 3:
                one = Place(place.shape[1:], place.block, place.start)
                tensors |= {
                    name.replace("{}", str(expert)): GgufTensor(stored, part, one) for expert, part in enumerate(data)
                }
                continue
            is_one_more = architecture == "gemma3" and name.endswith("norm.weight")
            which = stored.removesuffix(".bias").removesuffix(".weight").rpartition(".")[2]
            tensors[name] = GgufTensor(stored, data, place, heads.get(which), is_one_more=is_one_more)
    return tensors


def _heads(metadata: Metadata) -> Mapping[str, int]:
    """How many heads the rows of queries and of keys have."""
    heads = metadata.need("attention.head_count")
    return {"attn_q": heads, "attn_k": metadata.get("attention.head_count_kv", heads)}
