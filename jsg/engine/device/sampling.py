"""Logits to tokens, on the device and without a sort. Letters: `jsg/models/inputs.py`.

    logits → mask → bias and penalties → temperature → top-k → top-p → min-p → Gumbel-max → token

Everything is row by row and a function of the row's own inputs; the noise of a token is a hash of (seed, output index,
vocabulary id). So a request draws the same tokens in any batch, after a retract, and on any number of devices.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jsg.engine.device.noise import gumbel
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.reference_penalties import Penalties
from jsg.kernels_pallas.reference_threshold import sortable
from jsg.models.tensor_parallel import AXES, first_index, num_parts

BLOCK, LEAST_BLOCK = 128, 16
"""The most and the fewest scores of a block whose largest is found first."""


class SamplingInputs(NamedTuple):
    """How each row of logits is sampled.

    Attributes:
        rows: Request row that has its tables and takes its token; 0 for padding and for rows that do not sample.
        output_index: Index of the new token among the request's output tokens.
        seeds: 64-bit seed as two words, low first.
        top_k: Most likely tokens to keep, at least 1.
        uses_tables: The request has penalties or a bias, so its rows of `PenaltyTables` are valid.
        numbers: The sampling parameters that are numbers of a step, by name. At temperature 0 a row is greedy.
    """

    rows: Int[Array, " R"]
    output_index: Int[Array, " R"]
    seeds: UInt[Array, "R 2"]
    top_k: Int[Array, " R"]
    uses_tables: Bool[Array, " R"]
    numbers: Mapping[str, Float[Array, " R"]]


class PenaltyTables(NamedTuple):
    """For each request row what penalties need, and the bias of logits. Donated to each step that uses them.

    Attributes:
        counts: For each token twice how often it was generated, and 1 more if it stands in the prompt.
        bias: What is added to its logit.
    """

    counts: Int[Array, "rows V"]
    bias: Float[Array, "rows V"]


class TokenMasks(NamedTuple):
    """What grammars allow at each row of logits.

    Attributes:
        pool: Masks; token t is bit t & 31 of word t >> 5. Row 0 allows everything.
        rows: The mask of each row of logits.
        forced: The token that a row gets whatever its logits are; -1 where the logits decide.
    """

    pool: UInt[Array, "N W"]
    rows: Int[Array, " R"]
    forced: Int[Array, " R"]


class Logprobs(NamedTuple):
    """Log-probabilities of each row under the unmodified logits."""

    token: Float[Array, " R"]
    top_ids: Int[Array, "R top"]
    top: Float[Array, "R top"]
    chosen: Float[Array, "R chosen"]


def allowed_tokens(masks: TokenMasks, vocab: int) -> Bool[Array, "R {vocab}"]:
    """The masks of the rows, one boolean for each token."""
    words = masks.pool[masks.rows]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab] > 0


def choose_tokens(
    logits: Float[Array, "R V"],
    inputs: SamplingInputs,
    tables: PenaltyTables | None,
    allowed: Bool[Array, "R V"] | None = None,
    *,
    is_sampled: bool,
    has_thresholds: bool = True,
) -> Int[Array, " R"]:
    """The next token of each row; -1 where the logits are not finite.

    Args:
        logits: The logits of the model.
        inputs: How each row is sampled.
        tables: None where no row has penalties or a bias.
        allowed: The tokens that grammars allow; None where no row has a grammar.
        is_sampled: Static; False where every row is greedy.
        has_thresholds: Static; False where top-k, top-p and min-p keep every token of every row.
    """
    scores = logits if allowed is None else jnp.where(allowed | ~(logits < jnp.inf), logits, -jnp.inf)
    scores = scores if tables is None else ops.penalised(scores, *tables, _penalties(inputs))
    if not (is_sampled and has_thresholds):
        scores = _perturbed(scores, inputs, None) if is_sampled else scores
        return jnp.where(_is_broken(logits), -1, first_best(scores))
    is_kept, largest = _is_kept(scores, _divisor(inputs), inputs)
    return jnp.where(largest < jnp.inf, first_best(_perturbed(scores, inputs, is_kept)), -1)


def best_tokens(
    logits: Float[Array, "R part"], inputs: SamplingInputs, allowed: Bool[Array, "R V"] | None, *, is_sampled: bool
) -> Int[Array, " R"]:
    """As `choose_tokens` without tables and thresholds, for logits whose columns are shared by devices.

    Each device offers its best token of each row, and the lower of equally good tokens wins. Devices exchange nothing
    but one pair for each row.
    """
    length = logits.shape[1]
    first = first_index(length)
    if num_parts() == 1:
        return choose_tokens(logits, inputs, None, allowed, is_sampled=is_sampled, has_thresholds=False)
    if allowed is not None:
        allowed = lax.dynamic_slice_in_dim(allowed, first, length, 1)
    scores = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    scores = _perturbed(scores, inputs, None, first) if is_sampled else scores
    best = first_best(scores)
    token = jnp.where(_is_broken(logits), -1, best + first)
    score = jnp.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    pairs = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), token])
    offered = lax.all_gather(pairs, AXES)  # [devices, 2, R]
    scores, tokens = lax.bitcast_convert_type(offered[:, 0], jnp.float32), offered[:, 1]
    winner = jnp.argmax(scores, axis=0)
    chosen = jnp.take_along_axis(tokens, winner[None], axis=0)[0]
    return jnp.where((tokens < 0).any(axis=0), -1, chosen)


def first_best(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The first of each row's largest scores.

    XLA's argmax goes through them one by one on a CPU. There the largest of each block is found first, which XLA does
    in vectors, and then the place in one block.
    """
    width = math.gcd(scores.shape[1], BLOCK)
    if ops.target_platform() != "cpu" or width < LEAST_BLOCK:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    blocks = scores.reshape(len(scores), -1, width)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    within = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
    return (block * width + within).astype(jnp.int32)


def kept_mass(logits: Float[Array, "R V"], allowed: Bool[Array, "R V"]) -> Float[Array, " R"]:
    """The probability that the model gives to all allowed tokens together."""
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return jnp.sum(jnp.where(allowed, weights, 0), axis=-1) / jnp.sum(weights, axis=-1)


def count_tokens(tables: PenaltyTables, inputs: SamplingInputs, tokens: Int[Array, " R"]) -> PenaltyTables:
    """The tables after each row's new token."""
    return tables._replace(counts=tables.counts.at[inputs.rows, jnp.maximum(tokens, 0)].add(2))


def token_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], chosen: Int[Array, "R chosen"], num_top: int
) -> Logprobs:
    """Log-probabilities of the given tokens, of the `num_top` best tokens, and of the ids that the client chose."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    top, top_ids = ops.top_logits(logits, num_top)
    asked = jnp.concatenate([jnp.maximum(tokens, 0)[:, None], chosen], axis=-1)
    scores = jnp.take_along_axis(logits, asked, axis=-1) - largest - total
    return Logprobs(token=scores[:, 0], top_ids=top_ids, top=top - largest - total, chosen=scores[:, 1:])


def _penalties(inputs: SamplingInputs) -> Penalties:
    names = "repetition_penalty", "frequency_penalty", "presence_penalty"
    return Penalties(inputs.rows, inputs.uses_tables, *(inputs.numbers[name] for name in names))


def _is_broken(logits: Float[Array, "R part"]) -> Bool[Array, " R"]:
    """Whether a row has NaN or +inf. It looks at every number, because on a CPU the maximum of a long row skips NaN."""
    return (~(logits < jnp.inf)).any(axis=-1)


def _divisor(inputs: SamplingInputs) -> Float[Array, " R"]:
    """The temperature, by which logits are divided; 1 for a greedy row."""
    return jnp.where(inputs.numbers["temperature"] == 0, 1.0, inputs.numbers["temperature"])


def _perturbed(
    scores: Float[Array, "R part"],
    inputs: SamplingInputs,
    is_kept: Bool[Array, "R part"] | None,
    first: Array | int = 0,
) -> Float[Array, "R part"]:
    """Scores with noise, so that the largest is drawn at the row's temperature. Greedy rows are unchanged.

    The columns are those of the tokens from `first` on, where devices share the columns.
    """
    noise = gumbel(inputs.seeds, inputs.output_index, scores.shape[1], first)
    drawn = scores / _divisor(inputs)[:, None] + noise
    drawn = drawn if is_kept is None else jnp.where(is_kept, drawn, -jnp.inf)
    return jnp.where((inputs.numbers["temperature"] == 0)[:, None], scores, drawn)


def _is_kept(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], inputs: SamplingInputs
) -> tuple[Bool[Array, "R V"], Float[Array, " R"]]:
    """The tokens that pass top-k, then top-p of the rest, then min-p. Ties with the last token that passes stay in.

    And the largest logit of each row: see `ops.kept_threshold`.
    """
    needs_all = inputs.numbers["temperature"] == 0
    threshold, largest = ops.kept_threshold(
        logits,
        temperature,
        top_k=jnp.where(needs_all, logits.shape[1], inputs.top_k),
        top_p=jnp.where(needs_all, 1.0, inputs.numbers["top_p"]),
    )
    weights = jnp.exp((logits - largest[:, None]) / temperature[:, None])
    return (sortable(logits) >= threshold[:, None]) & (weights >= inputs.numbers["min_p"][:, None]), largest
