"""Experts of every token and the places of its copies, as one or two Pallas-Triton launches.

Letters: `jsg/models/inputs.py`. XLA would make sorts and scatters of it, about ten launches for a few thousand numbers.
Few experts are chosen by one program, which goes over the tokens twice, a block at a time:

    first    counts the copies of each expert, and so finds where each expert's begin; this device's stand in front
    second   counts in each block the earlier tokens of the same expert, and so finds the place of each copy

With many experts the choice takes far longer than a launch. Then a program of a first launch chooses for one block and
counts its copies, and one of a second launch adds up the counts of all blocks and places the copies of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.choice import LEAST, choice_scores, scores_of, weights_of
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.reference_routes import Routes
from jsg.kernels_pallas.tuning import sizes_for

MOST_IN_ONE = 16
"""The most experts that one program chooses from for all tokens. Each choice goes over all experts."""


class Sizes(NamedTuple):
    """How the tokens are cut. `tuning` has the sizes by rows.

    Attributes:
        block_elements: Logits at a time. The kernel spills registers if a warp has far more than 512.
        num_warps: Warps of the program.
    """

    block_elements: int
    num_warps: int


class Tokens(NamedTuple):
    """A block of tokens.

    Attributes:
        number: Their numbers.
        is_token: Whether they are less than T.
    """

    number: Int[Array, " t"]
    is_token: Bool[Array, " t"]


class Own(NamedTuple):
    """The experts of this device.

    Attributes:
        place: The place of each expert behind the first of them.
        is_own: Whether it is one of them.
    """

    place: Int[Array, " e"]
    is_own: Bool[Array, " e"]


def expert_routes(
    logits: Float[Array, "T E"],
    choice: ChoiceSpec,
    *,
    bias: Float[Array, " E"] | None = None,
    first: Int[Array, ""] | int,
    num_own: int,
    num_real: Int[Array, ""] | int | None = None,
    interpret: bool = False,
) -> Routes:
    """See `ops.expert_routes`."""
    num_tokens, num_experts = logits.shape
    sizes = Sizes(**sizes_for("expert_routes", rows=num_tokens))
    elements = sizes.block_elements // (1 if choice.groups == choice.kept_groups else 2)  # groups need registers, too
    block = min(max(1, elements // pl.next_power_of_2(num_experts)), pl.next_power_of_2(num_tokens))
    num_blocks, each = pl.cdiv(num_tokens, block), (num_tokens, choice.per_token)
    last = num_tokens - 1 if num_real is None else jnp.maximum(num_real - 1, 0)
    read = (logits, *(jnp.full(1, x, jnp.int32) for x in (first, last)), *(() if bias is None else (bias,)))
    weights, experts = jax.ShapeDtypeStruct(each, jnp.float32), jax.ShapeDtypeStruct(each, jnp.int32)
    counts = jax.ShapeDtypeStruct((num_blocks, num_experts), jnp.int32)
    placed = (
        jax.ShapeDtypeStruct(each, jnp.int32),
        jax.ShapeDtypeStruct((num_tokens * choice.per_token,), jnp.int32),
        jax.ShapeDtypeStruct((num_own,), jnp.int32),
    )
    params = plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1)
    call = functools.partial(pl.pallas_call, compiler_params=params, interpret=interpret)
    if num_blocks == 1 or num_experts <= MOST_IN_ONE:
        kernel = functools.partial(expert_routes_kernel, block, choice)
        return Routes(*call(kernel, out_shape=(weights, *placed))(*read))
    grid = functools.partial(call, grid=(num_blocks,))
    kernel, made = functools.partial(choose_kernel, block, choice, num_own), (weights, experts, counts)
    chosen = grid(kernel, out_shape=made, in_specs=_whole(read), out_specs=_whole(made))(*read)
    read, kernel = (*chosen[1:], read[1]), functools.partial(place_kernel, block)
    return Routes(chosen[0], *grid(kernel, out_shape=placed, in_specs=_whole(read), out_specs=_whole(placed))(*read))


def _whole(arrays: tuple[jax.Array | jax.ShapeDtypeStruct, ...]) -> tuple[pl.BlockSpec, ...]:
    return tuple(whole_spec(x) for x in arrays)


def expert_routes_kernel(
    block: int, choice: ChoiceSpec, logits: jax.Ref, first: jax.Ref, last: jax.Ref, *biases_and_out: jax.Ref
) -> None:
    """The only program. Of `first` expert and `last` token there is a number each, then perhaps a bias.

    The results are those of `Routes`.

    Grid: (). Blocks: every array stays in device memory. Owns: all.

    Masked: tokens past T, which choose nothing, and experts past E, which no token chooses.
    """
    *biases, weights, places, tokens, sizes = biases_and_out
    num_tokens, num_experts = logits.shape
    padded, num_blocks = pl.next_power_of_2(num_experts), pl.cdiv(num_tokens, block)
    own = _own(first, padded, len(sizes))

    def choose(index: Int[Array, ""]) -> tuple[Tokens, list[Array], list[Array]]:
        some = _block(index, block, num_tokens)
        return some, *_choose(choice, logits, biases, some, last, padded)

    def count(index: Int[Array, ""], totals: Int[Array, " e"]) -> Int[Array, " e"]:
        some, _, experts = choose(index)
        return totals + _copies(experts, some, padded).sum(0)

    def place(index: Int[Array, ""], next_places: Int[Array, " e"]) -> Int[Array, " e"]:
        some, scores, experts = choose(index)
        _store_weights(choice, weights, some, scores, experts, own)
        return _place(places, tokens, some, experts, next_places)

    totals = lax.fori_loop(0, num_blocks, count, jnp.zeros(padded, jnp.int32))
    _store_sizes(sizes, totals, own)
    lax.fori_loop(0, num_blocks, place, _starts(totals, own))


def choose_kernel(
    block: int,
    choice: ChoiceSpec,
    num_own: int,
    logits: jax.Ref,
    first: jax.Ref,
    last: jax.Ref,
    *biases_and_out: jax.Ref,
) -> None:
    """The program of a block of tokens: their weights and experts, and how many copies each expert gets from them.

    Grid: (blocks,). Blocks: every array stays in device memory. Owns: its tokens, and its row of the counts.

    Masked: tokens past T, and experts past E.
    """
    *biases, weights, chosen, counts = biases_and_out
    num_tokens, num_experts = logits.shape
    padded, index = pl.next_power_of_2(num_experts), pl.program_id(0)
    some = _block(index, block, num_tokens)
    scores, experts = _choose(choice, logits, biases, some, last, padded)
    _store_weights(choice, weights, some, scores, experts, _own(first, padded, num_own))
    for column, expert in enumerate(experts):
        plgpu.store(chosen.at[some.number, column], expert, mask=some.is_token)
    expert = jnp.arange(padded)
    plgpu.store(counts.at[index, expert], _copies(experts, some, padded).sum(0), mask=expert < num_experts)


def place_kernel(
    block: int,
    chosen: jax.Ref,
    counts: jax.Ref,
    first: jax.Ref,
    places: jax.Ref,
    tokens: jax.Ref,
    sizes: jax.Ref,
) -> None:
    """The program of a block of tokens: the places of their copies. The first one writes the sizes, too.

    Grid: (blocks,). Blocks: every array stays in device memory. Owns: its tokens and their copies.

    Masked: tokens past T, experts past E, and rows of the counts past the last block.
    """
    (num_tokens, per_token), (num_blocks, num_experts) = chosen.shape, counts.shape
    padded, index = pl.next_power_of_2(num_experts), pl.program_id(0)
    own, expert = _own(first, padded, len(sizes)), jnp.arange(padded)
    rows = min(block, pl.next_power_of_2(num_blocks))

    def count(at: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        row = at * rows + jnp.arange(rows)
        mask = (row < num_blocks)[:, None] & (expert < num_experts)[None, :]
        found = plgpu.load(counts.at[row[:, None], expert[None, :]], mask=mask, other=0)
        return sums[0] + found.sum(0), sums[1] + jnp.where((row < index)[:, None], found, 0).sum(0)

    none = jnp.zeros(padded, jnp.int32)
    totals, before = lax.fori_loop(0, pl.cdiv(num_blocks, rows), count, (none, none))

    @pl.when(index == 0)
    def _() -> None:
        _store_sizes(sizes, totals, own)

    some = _block(index, block, num_tokens)
    columns = range(per_token)
    experts = [plgpu.load(chosen.at[some.number, column], mask=some.is_token, other=0) for column in columns]
    _place(places, tokens, some, experts, _starts(totals, own) + before)


def _block(index: Int[Array, ""], block: int, num_tokens: int) -> Tokens:
    token = index * block + jnp.arange(block)
    return Tokens(token, token < num_tokens)


def _own(first: jax.Ref, padded: int, num_own: int) -> Own:
    index = jnp.arange(padded) - first[0]
    return Own(index, (index >= 0) & (index < num_own))


def _choose(
    choice: ChoiceSpec, logits: jax.Ref, biases: list[jax.Ref], some: Tokens, last: jax.Ref, padded: int
) -> tuple[list[Float[Array, " t"]], list[Int[Array, " t"]]]:
    """The scores and the numbers of the experts of some tokens. Of equal ones the lower number wins."""
    num_experts = logits.shape[1]
    expert = jnp.arange(padded)
    is_expert = expert < num_experts
    mask = some.is_token[:, None] & is_expert[None, :]
    found = plgpu.load(logits.at[some.number[:, None], expert[None, :]], mask=mask, other=-jnp.inf)
    of_last = plgpu.load(logits.at[last[0], expert], mask=is_expert, other=-jnp.inf)
    found = jnp.where((some.number > last[0])[:, None], of_last[None, :], found)
    found = jnp.where(some.is_token[:, None], found, 0.0)
    scores = scores_of(choice, found, is_expert[None, :])
    bias = plgpu.load(biases[0].at[expert], mask=is_expert, other=0) if biases else None
    left = jnp.where(is_expert[None, :], choice_scores(choice, found, scores, bias, num_experts), 2 * LEAST)
    chosen, experts = [], []
    for _ in range(choice.per_token):
        best = jnp.where(left == left.max(1)[:, None], expert[None, :], padded).min(1)
        is_best = expert[None, :] == best[:, None]
        chosen.append(jnp.where(is_best, scores, 0.0).sum(1))
        experts.append(best)
        left = jnp.where(is_best, 2 * LEAST, left)
    return chosen, experts


def _copies(experts: list[Int[Array, " t"]], some: Tokens, padded: int) -> Int[Array, "t e"]:
    """1 at each expert of each token."""
    return functools.reduce(jnp.add, (_hot(expert, some, padded) for expert in experts))


def _hot(expert: Int[Array, " t"], some: Tokens, padded: int) -> Int[Array, "t e"]:
    return ((jnp.arange(padded)[None, :] == expert[:, None]) & some.is_token[:, None]).astype(jnp.int32)


def _store_weights(
    choice: ChoiceSpec,
    weights: jax.Ref,
    some: Tokens,
    scores: list[Float[Array, " t"]],
    experts: list[Int[Array, " t"]],
    own: Own,
) -> None:
    """Stores the weights of experts of this device, and zeros for those of others."""
    total = functools.reduce(jnp.add, scores)
    for column, (score, expert) in enumerate(zip(scores, experts, strict=True)):
        is_here = (_hot(expert, some, len(own.place)) * own.is_own).sum(1) > 0
        weight = jnp.where(is_here, weights_of(choice, score, total), 0.0)
        plgpu.store(weights.at[some.number, column], weight, mask=some.is_token)


def _store_sizes(sizes: jax.Ref, totals: Int[Array, " e"], own: Own) -> None:
    plgpu.store(sizes.at[jnp.where(own.is_own, own.place, len(sizes))], totals, mask=own.is_own)


def _starts(totals: Int[Array, " e"], own: Own) -> Int[Array, " e"]:
    """The first place of each expert's copies. Those of the experts before this device's come last."""
    before = jnp.cumsum(totals, 0) - totals
    others = jnp.where(own.place < 0, totals, 0).sum()
    return before - others + jnp.where(own.place < 0, totals.sum(), 0)


def _place(
    places: jax.Ref,
    tokens: jax.Ref,
    some: Tokens,
    experts: list[Int[Array, " t"]],
    next_places: Int[Array, " e"],
) -> Int[Array, " e"]:
    """Stores the places of some tokens' copies, and gives the next place of each expert."""
    in_block = _copies(experts, some, len(next_places))
    behind = next_places[None, :] + jnp.cumsum(in_block, 0) - in_block
    for column, expert in enumerate(experts):
        at = jnp.where(some.is_token, (_hot(expert, some, len(next_places)) * behind).sum(1), len(tokens))
        plgpu.store(places.at[some.number, column], at, mask=some.is_token)
        plgpu.store(tokens.at[at], some.number, mask=some.is_token)
    return next_places + in_block.sum(0)
