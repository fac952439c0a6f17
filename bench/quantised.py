"""Measures how short types change the answers of the embedded model: `python -m bench.quantised [--output FILE]`.

At every position of held-out cases of the model's tasks, with their answers, the distribution of the next token is
compared with that of the unchanged model, in float32 with unquantised keys and values. Nothing is sampled, so the
figures do not depend on chance or on the load of the machine. Their last digits depend on the kind of processor.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from bench.report import ROOT, Report
from jsg.cache.pool import make_pool
from jsg.engine.device import fp8_kernels
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.models.config import read_spec
from jsg.models.decoder import Decoder
from jsg.models.inputs import ForwardInputs
from jsg.models.loading import load_model, resolve_kv_dtype
from jsg.sources import resolve_model

NUM_TOKENS = 256
"""Texts are cut to this number of tokens, and every step has this shape."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The options of one side, with their names in `EngineConfig`."""

    dtype: str = "float32"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    fp8_products: str = "off"

    def __str__(self) -> str:
        products = ", products in e4m3" if self.fp8_products == "on" else ""
        return f"{self.dtype}, weights {self.quantization}{products}, KV {self.kv_cache_dtype}"


SETTINGS = (
    Setting(dtype="bfloat16"),  # the default of accelerators, to compare the others with
    Setting(quantization="int8"),
    Setting(quantization="fp8"),
    Setting(quantization="fp8", fp8_products="on"),
    Setting(quantization="int4"),
    Setting(kv_cache_dtype="fp8_e4m3"),
    Setting(kv_cache_dtype="fp8_e5m2"),
    Setting(dtype="bfloat16", quantization="int8"),
    Setting(dtype="bfloat16", quantization="int8", kv_cache_dtype="fp8_e4m3"),
    Setting(dtype="bfloat16", quantization="int4"),
    Setting(dtype="bfloat16", quantization="fp8"),
    Setting(dtype="bfloat16", quantization="fp8", fp8_products="on"),
)


class Scorer:
    """The model with one setting. It gives the distribution of the next token after each token of a text."""

    def __init__(self, directory: Path, setting: Setting):
        config = read_spec(directory)
        dtype = jnp.dtype(setting.dtype)
        kv_dtype = resolve_kv_dtype(setting.kv_cache_dtype, dtype)
        model = load_model(directory, config, dtype=dtype, quantization=setting.quantization)
        if setting.fp8_products == "on":
            fp8_kernels.lay_out(model)
        self.kv_bytes_per_token = config.kv_bytes_per_token(kv_dtype.itemsize)
        self._shape = (config.kv_shapes, NUM_TOKENS + 1, 1, kv_dtype)
        graph, self._weights = nnx.split(model)

        def forward(weights, inputs, pool):
            model = cast(Decoder, nnx.merge(graph, weights))
            return jax.nn.log_softmax(model.logits(model(inputs, pool)[0]))

        self._forward = jax.jit(forward)

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._weights))

    def __call__(self, text: list[int]) -> np.ndarray:
        """The log-probabilities [len(text), V]."""
        position = np.arange(NUM_TOKENS, dtype=np.int32)
        is_real = position < len(text)
        starts = jnp.asarray(position[::QUERY_TILE])
        no_singles = jnp.zeros(1, jnp.int32)
        attention = AttentionInputs(
            page_table=jnp.asarray((1 + position)[None]),
            single_rows=no_singles,
            single_kv_lens=no_singles,
            tile_rows=jnp.zeros_like(starts),
            tile_starts=starts,
            tile_lens=jnp.asarray(np.clip(len(text) - position[::QUERY_TILE], 0, QUERY_TILE)),
            tile_positions=starts,
            num_tiles=jnp.int32(-(-len(text) // QUERY_TILE)),
        )
        tokens = np.zeros(NUM_TOKENS, np.int32)
        tokens[: len(text)] = text
        inputs = ForwardInputs(
            token_ids=jnp.asarray(tokens),
            positions=jnp.asarray(position * is_real),
            slots=jnp.asarray((1 + position) * is_real),
            attention=attention,
        )
        return np.asarray(self._forward(self._weights, inputs, make_pool(*self._shape)))[: len(text)]


def held_out_texts(directory: Path, per_task: int) -> Iterator[list[int]]:
    """The tokens of the model's held-out cases, each with its answer."""
    sys.path.insert(0, str(ROOT / "examples" / "tiny_model"))
    from evaluate import EVALUATED, held_out_cases, prompt_text  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for task in EVALUATED:
        for case in held_out_cases(task, per_task):
            yield tokenizer.encode(prompt_text(case.prompt) + case.answer).ids[:NUM_TOKENS]


def compare(expected: Iterable[np.ndarray], found: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """For each position the divergence KL(expected || found) in nats, and whether the likeliest token is the same."""
    divergences, agreements = [], []
    for exact, other in zip(expected, found, strict=True):
        exact = exact.astype(np.float64)
        divergences.append((np.exp(exact) * (exact - other)).sum(-1))
        agreements.append(exact.argmax(-1) == other.argmax(-1))
    return np.concatenate(divergences), np.concatenate(agreements)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    parser.add_argument("--per-task", type=int, default=10, help="number of held-out cases of each task")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    directory = resolve_model("tiny")
    texts = list(held_out_texts(directory, options.per_task))
    report = Report("bench.quantised", arguments, options.output, model="tiny", device=jax.default_backend())
    plain = Scorer(directory, Setting())
    expected = [plain(text) for text in texts]
    for setting in SETTINGS:
        scorer = Scorer(directory, setting)
        divergence, agrees = compare(expected, map(scorer, texts))
        report.add(
            str(setting),
            "KL nats",
            [divergence.mean()],
            p99=float(np.quantile(divergence, 0.99)),
            same_likeliest=float(agrees.mean()),
            weight_bytes=scorer.weight_bytes,
            weight_bytes_float32=plain.weight_bytes,
            kv_bytes_per_token=scorer.kv_bytes_per_token,
            num_positions=len(divergence),
        )
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
