"""The sampling program in the variants that engines have here, over the model's vocabulary. It needs no model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.events import Part
from jsg.engine.device import packing, step
from jsg.engine.device.mask_pool import NUM_MASKS, num_words
from jsg.engine.device.programs import COMMON, EVERYTHING, SWITCHED, VARIANTS, Variant
from jsg.engine.device.sampling import PenaltyTables, TokenMasks
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams

PARAMS = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, frequency_penalty=0.1)

QUEUED = 10
"""The number of calls that are timed together, because starting a single call may take longer than running it."""


def measure(part: Part) -> None:
    """Measures milliseconds of each variant, beside the time to read the logits once."""
    for rows in part.plan.sampling_rows:
        for variant in VARIANTS if jax.default_backend() == "gpu" else COMMON + SWITCHED:
            words = [field.split("_")[1] for field, has in zip(Variant._fields, variant, strict=True) if has]
            name = f"sample B={rows}, {' and '.join(words) or 'greedy'}"
            part.attempt(name, functools.partial(_measure, part, name, rows, variant))


def _measure(part: Part, name: str, rows: int, variant: Variant) -> None:
    vocab = part.plan.shape["vocab_size"]
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocab))
    last_token = jnp.zeros(rows + 1, jnp.int32)
    tables = None
    if variant.has_tables:
        shape = (rows + 1, vocab)
        tables = PenaltyTables(jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    chosen = np.zeros((rows, MAX_TOP_LOGPROBS), np.int32) if variant.has_logprobs else None
    masks = _masks(rows, vocab) if variant.has_masks else None
    sample = functools.partial(step.sample, is_sampled=variant.is_sampled, has_thresholds=variant.has_thresholds)
    if variant == EVERYTHING and jax.default_backend() != "gpu":
        sample = step.sample_needed
    program = jax.jit(functools.partial(sample, num_top=min(MAX_TOP_LOGPROBS, vocab)), donate_argnums=(2, 3)).lower(
        logits, _packed(rows, vocab, variant), last_token, tables, chosen, masks
    )
    compiled = program.compile()
    packed = _packed(rows, vocab, variant)

    def run() -> None:
        nonlocal last_token, tables
        for _ in range(QUEUED):
            _, last_token, tables = compiled(logits, packed, last_token, tables, chosen, masks)
        last_token.block_until_ready()

    samples = [ms / QUEUED for ms in part.time(run, budget_s=1)]
    facts: dict[str, Any] = {"rows": rows, "vocab": vocab}
    if (analysis := compiled.memory_analysis()) is not None:
        facts["temporary_mib"] = analysis.temp_size_in_bytes / 2**20
    if part.rates is not None:
        facts["floor"] = logits.nbytes / part.rates[0] * 1e3
    part.add(name, "ms", samples, kind="sampling", **facts)


def _masks(rows: int, vocab: int) -> TokenMasks:
    """A pool of the engine's size with a separate mask for every row of logits, which allows every other token."""
    pool = jnp.full((NUM_MASKS, num_words(vocab)), 0x55555555, jnp.uint32)
    return TokenMasks(pool, jnp.arange(1, rows + 1), jnp.full(rows, -1))


def _packed(rows: int, vocab: int, variant: Variant) -> np.ndarray:
    packed = np.zeros((rows, step.SAMPLING_COLUMNS), np.int32)
    packed[:, 0] = np.arange(1, rows + 1)
    for row in range(rows):
        params = PARAMS if variant.is_sampled else SamplingParams(temperature=0.0)
        packed[row, 2:] = packing.sampling_row(params, row, vocab)
    return packed
