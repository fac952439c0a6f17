"""Logits to tokens, on the device and without a sort. Letters: `jsg/models/inputs.py`.

    logits → bias and penalties → temperature → top-k → top-p → min-p → Gumbel-max → token

Everything is row by row and a function of the row's own inputs; the noise of a token is a hash of (seed, output index,
vocabulary id). So a request draws the same tokens in any batch, after a retract, and on any number of devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jsg.engine.noise import gumbel


class SamplingInputs(NamedTuple):
    """How each row of logits is sampled.

    Attributes:
        rows: Request row whose tables belong to it and take its token; 0 for padding and rows that do not sample.
        output_index: Index of the new token among the request's output tokens.
        seeds: 64-bit seed as two words, low first.
        top_k: Most likely tokens to keep, at least 1.
        uses_tables: The request has penalties or a bias: its rows of `PenaltyTables` are valid.
        temperature: 0 is greedy.
        top_p: Mass to keep.
        min_p: Fraction of the largest probability to keep.
        frequency: Subtracted per occurrence in the output.
        presence: Subtracted once from tokens in the output.
        repetition: Divides positive and multiplies negative logits of tokens in prompt or output.
    """

    rows: Int[Array, " R"]
    output_index: Int[Array, " R"]
    seeds: UInt[Array, "R 2"]
    top_k: Int[Array, " R"]
    uses_tables: Bool[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    frequency: Float[Array, " R"]
    presence: Float[Array, " R"]
    repetition: Float[Array, " R"]


class PenaltyTables(NamedTuple):
    """Per request row: what penalties count, and what is added to the logits. Donated to each step that uses them."""

    output_counts: Int[Array, "rows V"]
    in_prompt: Bool[Array, "rows V"]
    bias: Float[Array, "rows V"]


class Logprobs(NamedTuple):
    """Log-probabilities of each row under the unmodified logits."""

    token: Float[Array, " R"]
    top_ids: Int[Array, "R top"]
    top: Float[Array, "R top"]
    chosen: Float[Array, "R chosen"]


def choose_tokens(
    logits: Float[Array, "R V"], inputs: SamplingInputs, tables: PenaltyTables | None, *, is_sampled: bool
) -> Int[Array, " R"]:
    """The next token of each row; -1 where the logits are not finite.

    Args:
        logits: Of the model.
        inputs: One per row.
        tables: None where no row has penalties or a bias.
        is_sampled: Static; False where every row is greedy.
    """
    adjusted = logits if tables is None else _penalised(logits, inputs, tables)
    if is_sampled:
        is_greedy = (inputs.temperature == 0)[:, None]
        scaled = adjusted / jnp.where(is_greedy, 1.0, inputs.temperature[:, None])
        noise = gumbel(inputs.seeds, inputs.output_index, logits.shape[1])
        kept = jnp.where(_is_kept(scaled, inputs), scaled + noise, -jnp.inf)
        adjusted = jnp.where(is_greedy, adjusted, kept)
    is_bad = jnp.isnan(jnp.max(logits, axis=-1))
    return jnp.where(is_bad, -1, jnp.argmax(adjusted, axis=-1)).astype(jnp.int32)


def count_tokens(tables: PenaltyTables, inputs: SamplingInputs, tokens: Int[Array, " R"]) -> PenaltyTables:
    """The tables after each row's new token."""
    counts = tables.output_counts.at[inputs.rows, jnp.maximum(tokens, 0)].add(1)
    return tables._replace(output_counts=counts)


def token_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], chosen: Int[Array, "R chosen"], num_top: int
) -> Logprobs:
    """Log-probabilities of the given tokens, of the `num_top` best, and of the ids that the client chose."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = lax.top_k(logprobs, num_top)
    return Logprobs(
        token=jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0],
        top_ids=top_ids,
        top=top,
        chosen=jnp.take_along_axis(logprobs, chosen, axis=-1),
    )


def _penalised(logits: Float[Array, "R V"], inputs: SamplingInputs, tables: PenaltyTables) -> Float[Array, "R V"]:
    counts = tables.output_counts[inputs.rows]
    is_seen = tables.in_prompt[inputs.rows] | (counts > 0)
    repetition = inputs.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    out = jnp.where(is_seen, repeated, logits)
    out -= inputs.frequency[:, None] * counts + inputs.presence[:, None] * (counts > 0)
    return jnp.where(inputs.uses_tables[:, None], out + tables.bias[inputs.rows], logits)


def _is_kept(scaled: Float[Array, "R V"], inputs: SamplingInputs) -> Bool[Array, "R V"]:
    """Which tokens top-k, then top-p of what top-k left, then min-p keep. Ties with the last one kept stay in."""
    order = _sortable(scaled)
    kept = order >= _threshold(order, jnp.ones_like(scaled), inputs.top_k.astype(jnp.float32))[:, None]
    weights = jnp.where(kept, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0.0)
    mass = inputs.top_p * jnp.sum(weights, axis=-1)
    kept &= (order >= _threshold(order, weights, mass)[:, None]) | (inputs.top_p >= 1)[:, None]
    return kept & (weights >= inputs.min_p[:, None])


def _threshold(
    order: UInt[Array, "R V"], weights: Float[Array, "R V"], needed: Float[Array, " R"]
) -> UInt[Array, " R"]:
    """The largest value such that the weights of everything from it up reach what is needed; 0 where all do not.

    Bisection over the bits of the value, highest first: exact after 32 halvings.
    """

    def one_bit(index: Int[Array, ""], low: UInt[Array, " R"]) -> UInt[Array, " R"]:
        middle = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= middle[:, None], weights, 0.0), axis=-1)
        return jnp.where(total >= needed, middle, low)

    return lax.fori_loop(0, 32, one_bit, jnp.zeros(len(order), jnp.uint32))


def _sortable(values: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Unsigned integers in the same order as the floats."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
