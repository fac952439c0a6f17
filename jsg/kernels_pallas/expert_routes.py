"""Experts of every token and the places of its copies, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

XLA would make sorts and scatters of it, about ten launches for a few thousand numbers. Here one program goes over the
tokens twice, a block at a time:

    first    counts the copies of each expert, and so finds where each expert's begin; this device's stand in front
    second   counts in each block the earlier tokens of the same expert, and so finds the place of each copy
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.reference_routes import Routes
from jsg.kernels_pallas.tuning import sizes_for


class Sizes(NamedTuple):
    """How the tokens are cut. `tuning` has the sizes by rows.

    Attributes:
        block_elements: Logits at a time. The kernel spills registers if a warp has far more than 512.
        num_warps: Warps of the program.
    """

    block_elements: int
    num_warps: int


class _Choice(NamedTuple):
    """Experts of a block of tokens.

    Attributes:
        weights: The probability of each choice.
        chosen: For each choice, 1 at its expert; 0 in rows past T.
    """

    weights: tuple[Float[Array, " t"], ...]
    chosen: tuple[Int[Array, "t e"], ...]


def expert_routes(
    logits: Float[Array, "T E"],
    experts_per_token: int,
    *,
    first: Int[Array, ""] | int,
    num_own: int,
    is_renormed: bool = True,
    interpret: bool = False,
) -> Routes:
    """See `ops.expert_routes`."""
    num_tokens, num_experts = logits.shape
    sizes = Sizes(**sizes_for("expert_routes", rows=num_tokens))
    block = min(max(1, sizes.block_elements // pl.next_power_of_2(num_experts)), pl.next_power_of_2(num_tokens))
    each = (num_tokens, experts_per_token)
    parts = pl.pallas_call(
        functools.partial(expert_routes_kernel, block, experts_per_token, is_renormed),
        out_shape=(
            jax.ShapeDtypeStruct(each, jnp.float32),
            jax.ShapeDtypeStruct(each, jnp.int32),
            jax.ShapeDtypeStruct((num_tokens * experts_per_token,), jnp.int32),
            jax.ShapeDtypeStruct((num_own,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
        interpret=interpret,
    )(logits, jnp.full(1, first, jnp.int32))
    return Routes(*parts)


def expert_routes_kernel(
    block: int,
    experts_per_token: int,
    is_renormed: bool,
    logits: jax.Ref,
    first: jax.Ref,
    weights: jax.Ref,
    places: jax.Ref,
    tokens: jax.Ref,
    sizes: jax.Ref,
) -> None:
    """The only program. `first` has one number, and the results are those of `Routes`.

    Grid: (). Blocks: every array stays in device memory. Owns: all.

    Masked: tokens past T, which choose nothing, and experts past E, which no token chooses.
    """
    num_tokens, num_experts = logits.shape
    padded = pl.next_power_of_2(num_experts)
    num_blocks = pl.cdiv(num_tokens, block)

    def choose(index: Int[Array, ""]) -> _Choice:
        return _choose(logits, index * block + jnp.arange(block), padded, experts_per_token)

    def count(index: Int[Array, ""], totals: Int[Array, " e"]) -> Int[Array, " e"]:
        return totals + functools.reduce(jnp.add, choose(index).chosen).sum(0)

    totals = lax.fori_loop(0, num_blocks, count, jnp.zeros(padded, jnp.int32))
    expert = jnp.arange(padded)
    own = expert - first[0]
    is_own = (own >= 0) & (own < len(sizes))
    plgpu.store(sizes.at[jnp.where(is_own, own, len(sizes))], totals, mask=is_own)

    def place(index: Int[Array, ""], next_places: Int[Array, " e"]) -> Int[Array, " e"]:
        choice = choose(index)
        token = index * block + jnp.arange(block)
        in_block = functools.reduce(jnp.add, choice.chosen)
        behind = next_places[None, :] + jnp.cumsum(in_block, 0) - in_block
        total = functools.reduce(jnp.add, choice.weights) if is_renormed else 1.0
        for column, (weight, hot) in enumerate(zip(choice.weights, choice.chosen, strict=True)):
            is_token = token < num_tokens
            at = jnp.where(is_token, (hot * behind).sum(1), len(tokens))
            is_here = (hot * is_own).sum(1) > 0
            plgpu.store(weights.at[token, column], jnp.where(is_here, weight / total, 0.0), mask=is_token)
            plgpu.store(places.at[token, column], at, mask=is_token)
            plgpu.store(tokens.at[at], token, mask=is_token)
        return next_places + in_block.sum(0)

    before = jnp.cumsum(totals, 0) - totals
    others = jnp.where(own < 0, totals, 0).sum()  # copies of the experts before this device's, which come last
    starts = before - others + jnp.where(own < 0, totals.sum(), 0)
    lax.fori_loop(0, num_blocks, place, starts)


def _choose(logits: jax.Ref, token: Int[Array, " t"], padded: int, experts_per_token: int) -> _Choice:
    """The most likely experts of some tokens. Of equal ones the lower index wins, and NaN is least likely of all."""
    num_tokens, num_experts = logits.shape
    expert = jnp.arange(padded)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < num_experts)[None, :]
    found = plgpu.load(logits.at[token[:, None], expert[None, :]], mask=is_token & is_expert, other=-jnp.inf)
    largest = jnp.where(is_token, found, 0.0).max(1)[:, None]
    likely = jnp.where(is_expert, jnp.exp(found - largest), 0.0)
    likely /= likely.sum(1)[:, None]
    left = jnp.where(is_expert, jnp.where(likely >= 0, likely, -1.0), -3.0)
    weights, chosen = [], []
    for _ in range(experts_per_token):
        first = jnp.where(left == left.max(1)[:, None], expert[None, :], padded).min(1)
        is_first: Bool[Array, "t e"] = expert[None, :] == first[:, None]
        weights.append(jnp.where(is_first, likely, 0.0).sum(1))
        chosen.append((is_first & is_token).astype(jnp.int32))
        left = jnp.where(is_first, -2.0, left)
    return _Choice(tuple(weights), tuple(chosen))
