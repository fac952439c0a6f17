"""The tiny Llama as ONNX: `python -m examples.browser.onnx_model FILE`. It needs no package of ONNX.

    tokens  int64[n]                 the next tokens of a text
    past    float32[L, 2, K, p, H]   keys and values of the tokens before them
    kept    int64[1]                 how many of these still count, so that a caller takes drafts back without a copy
    logits  float32[n, V]            for each token, those of the token after it
    present float32[L, 2, K, q, H]   keys and values of `kept` and then `tokens`

L layers, K KV heads, G query heads for each of them, H head dim, D model, V vocab.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import numpy as np

from examples.tiny_model.model import TinyConfig, load_model
from jsg.sources import EMBEDDED

IR_VERSION, OPSET = 8, 17
FLOAT, INT64 = 1, 7
"""Types of elements (`onnx.proto`, TensorProto.DataType); INT and INTS are those of attributes."""
INT, INTS = 2, 7
FAR = -1e30


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A message of protocol buffers, of the number and the value of each field."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value % 2**64)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@final
class Graph:
    """A graph under construction. Names of values stand for them."""

    def __init__(self) -> None:
        self._fields: list[tuple[int, bytes]] = []
        self._num_values = 0

    def constant(self, value: np.ndarray | Sequence[int] | float) -> str:
        """A value that is known: float32, or int64 where it has whole numbers."""
        array = np.asarray(value)
        is_whole = array.dtype.kind == "i"
        array = array.astype("<i8" if is_whole else "<f4")
        name = self._new_name()
        dims = [(1, dim) for dim in array.shape]
        kind = INT64 if is_whole else FLOAT
        self._fields.append((5, _message(*dims, (2, kind), (8, name), (9, array.tobytes()))))
        return name

    def __call__(self, op: str, *inputs: str, outputs: Sequence[str] = (), **attributes: int | Sequence[int]) -> str:
        """The output of one more node, or the first of several."""
        names = list(outputs) or [self._new_name()]
        given = [
            _message((1, name), (3, value), (20, INT))
            if isinstance(value, int)
            else _message((1, name), *((8, each) for each in value), (20, INTS))
            for name, value in attributes.items()
        ]
        parts = [*((1, name) for name in inputs), *((2, name) for name in names), (4, op)]
        self._fields.append((1, _message(*parts, *((5, attribute) for attribute in given))))
        return names[0]

    def two(self, op: str, x: str, axis: int) -> tuple[str, str]:
        """Both outputs of a node that halves a value."""
        first, second = self._new_name(), self._new_name()
        self(op, x, outputs=(first, second), axis=axis)
        return first, second

    def declare(self, field: int, name: str, kind: int, shape: Iterable[int | str]) -> None:
        """Makes a value an input (field 11) or an output (12) of the graph; a dimension may have a name."""
        dims = [(1, _message((1 if isinstance(dim, int) else 2, dim))) for dim in shape]
        self._fields.append((field, _message((1, name), (2, _message((1, _message((1, kind), (2, _message(*dims)))))))))

    def model(self) -> bytes:
        """The file."""
        graph = _message(*sorted(self._fields, key=lambda field: field[0]), (2, "tiny"))
        return _message((1, IR_VERSION), (2, "jsg"), (7, graph), (8, _message((1, ""), (2, OPSET))))

    def _new_name(self) -> str:
        self._num_values += 1
        return f"v{self._num_values}"


def onnx_model(params: dict[str, np.ndarray], config: TinyConfig) -> bytes:
    """The model of these parameters, which have their Hugging Face names and are [out, in]."""
    g, heads, width = Graph(), config.num_kv_heads, config.head_dim
    groups, cache = config.num_heads // heads, (config.num_layers, 2, heads)
    g.declare(11, "tokens", INT64, ("n",))
    g.declare(11, "past", FLOAT, (*cache, "p", width))
    g.declare(11, "kept", INT64, (1,))
    g.declare(12, "logits", FLOAT, ("n", config.vocab_size))
    g.declare(12, "present", FLOAT, (*cache, "q", width))
    zero, one, last = g.constant([0]), g.constant([1]), g.constant([3])
    past = g("Slice", "past", zero, "kept", last)
    begin = g("Squeeze", "kept")
    end = g("Add", begin, g("Squeeze", g("Shape", "tokens")))
    places = g("Unsqueeze", g("Range", begin, end, g.constant(1)), one)
    keys_at = g("Unsqueeze", g("Range", g.constant(0), end, g.constant(1)), zero)
    far = g("Where", g("GreaterOrEqual", places, keys_at), g.constant(0.0), g.constant(FAR))
    inverse = config.rope_theta ** (-np.arange(0, width, 2) / width)
    angles = g("Mul", g("Cast", places, to=FLOAT), g.constant(inverse[None]))
    cos, sin = g("Cos", angles), g("Sin", angles)

    def norm(x: str, name: str) -> str:
        mean = g("ReduceMean", g("Mul", x, x), axes=[-1], keepdims=1)
        scale = g("Sqrt", g("Add", mean, g.constant(config.norm_eps)))
        return g("Mul", g("Div", x, scale), g.constant(params[name]))

    def linear(x: str, name: str) -> str:
        return g("MatMul", x, g.constant(params[name].T))

    def by_head(x: str) -> str:  # [n, heads * H] -> [heads, n, H]
        return g("Transpose", g("Reshape", x, g.constant([0, -1, width])), perm=[1, 0, 2])

    def rotated(x: str) -> str:
        first, second = g.two("Split", x, -1)
        left = g("Sub", g("Mul", first, cos), g("Mul", second, sin))
        return g("Concat", left, g("Add", g("Mul", second, cos), g("Mul", first, sin)), axis=-1)

    embedding = g.constant(params["model.embed_tokens.weight"])
    x, present = g("Gather", embedding, "tokens"), list[str]()
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        normed = norm(x, f"{prefix}input_layernorm.weight")
        q, k, v = (by_head(linear(normed, f"{prefix}self_attn.{name}_proj.weight")) for name in "qkv")
        of_layer = g("Gather", past, g.constant(layer), axis=0)
        keys, values = (
            g("Concat", g("Gather", of_layer, g.constant(number), axis=0), new, axis=1)
            for number, new in enumerate((rotated(k), v))
        )
        present += [g("Unsqueeze", each, zero) for each in (keys, values)]
        grouped = g("Reshape", rotated(q), g.constant([heads, groups, -1, width]))
        across = g("Unsqueeze", g("Transpose", keys, perm=[0, 2, 1]), one)
        scores = g("Mul", g("MatMul", grouped, across), g.constant(width**-0.5))
        seen = g("MatMul", g("Softmax", g("Add", scores, far), axis=-1), g("Unsqueeze", values, one))
        joined = g("Transpose", g("Reshape", seen, g.constant([heads * groups, -1, width])), perm=[1, 0, 2])
        attended = g("Reshape", joined, g.constant([0, -1]))
        x = g("Add", x, linear(attended, f"{prefix}self_attn.o_proj.weight"))
        normed = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = linear(normed, f"{prefix}mlp.gate_proj.weight")
        up = linear(normed, f"{prefix}mlp.up_proj.weight")
        gated = g("Mul", g("Mul", gate, g("Sigmoid", gate)), up)
        x = g("Add", x, linear(gated, f"{prefix}mlp.down_proj.weight"))
    shape = g.constant([*cache, -1, width])
    g("Reshape", g("Concat", *present, axis=0), shape, outputs=("present",))
    g("MatMul", norm(x, "model.norm.weight"), g("Transpose", embedding, perm=[1, 0]), outputs=("logits",))
    return g.model()


def main(file: str) -> None:
    """Writes the embedded model."""
    params, config = load_model(EMBEDDED["tiny"])
    Path(file).write_bytes(onnx_model({name: np.asarray(value) for name, value in params.items()}, config))


if __name__ == "__main__":
    main(*sys.argv[1:])
