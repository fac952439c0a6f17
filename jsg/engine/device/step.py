"""The functions that become executables: a forward pass, sampling, and updates of the tables on the device.

They are pure functions of arrays. `executables.py` compiles them and `runner.py` calls them. Letters:
`jsg/models/inputs.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jsg.cache.pool import HIDDEN_KEPT, KVPool
from jsg.engine.device.pool_sizes import own_pages
from jsg.engine.device.sampling import (
    Logprobs,
    PenaltyTables,
    SamplingInputs,
    TokenMasks,
    allowed_tokens,
    best_tokens,
    choose_tokens,
    count_tokens,
    kept_mass,
    token_logprobs,
)
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import AttentionInputs, Pieces, PrefixGroups
from jsg.kernels_pallas.reference_delta import tiles_of
from jsg.kernels_pallas.tile import GROUP_TILE
from jsg.models.decoder import Decoder
from jsg.models.inputs import ForwardInputs, LayerArrays, WindowInputs
from jsg.models.llava import Llava
from jsg.models.model import Model
from jsg.models.tensor_parallel import gather_columns, num_parts
from jsg.parameters import PARAMETERS, Number
from jsg.sched.buckets import BucketKey

Merge = Callable[[Sequence[Array]], Model]
"""Makes a model of the flat tuple of its leaves."""

NUMBERS = tuple(each.name for each in PARAMETERS if each.is_in_steps and isinstance(each.kind, Number))
"""The sampling parameters that are columns of the sampling array, as the bits of floats."""
SAMPLING_COLUMNS = 6 + len(NUMBERS)
PROMPT_ROWS = 64
"""Prompt tokens whose logits are computed together."""
KEPT, UNKNOWN = -1, -2
"""Stand for the token before a new one in `before`: one of an earlier step, and one whose hidden state is not known."""
DRAFT_COLUMNS = 3


class StepOutput(NamedTuple):
    """What the host reads of a step. Where there are log-probabilities, also the mass that grammars kept."""

    tokens: Int[Array, " R"]
    logprobs: Logprobs | None
    kept_mass: Float[Array, " R"] | None = None


class PackedInputs(NamedTuple):
    """The parts, in order, of the one int32 array that a forward pass reads.

    Attributes:
        counts: Number of real query tiles, number of short tiles, which come first, and number of leading tokens that
            are alone in their row.
        token_ids: New tokens. -1 stands for the row's last sampled token; ids from the vocabulary's size on stand for
            rows of the vision pool.
        positions: Index of each new token in its row.
        model_positions: Position of each new token for the model: its index, except with position jumps or branches.
        slots: KV slot of each new token; 0 for tokens that must not be written. Those of each page group one after
            another (see `ModelSpec.page_groups`).
        rows: Request row of each new token.
        logit_index: Index of the token that each row of logits belongs to.
        shared_lens, group_rows, group_lens, group_members: See `PrefixGroups`; the members of all tiles one after
            another.
        tile_rows, tile_starts, tile_lens, tile_positions: See `AttentionInputs`.
    """

    counts: Int[Array, " 3"]
    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    model_positions: Int[Array, " T"]
    slots: Int[Array, " GT"]
    rows: Int[Array, " T"]
    logit_index: Int[Array, " B"]
    shared_lens: Int[Array, " S"]
    group_rows: Int[Array, " U"]
    group_lens: Int[Array, " U"]
    group_members: Int[Array, " UM"]
    tile_rows: Int[Array, " Q"]
    tile_starts: Int[Array, " Q"]
    tile_lens: Int[Array, " Q"]
    tile_positions: Int[Array, " Q"]


def packed_sizes(
    key: BucketKey, num_groups: int = 1, *, has_states: bool = False, has_drafts: bool = False
) -> tuple[int, ...]:
    """Length of each part of `PackedInputs` in a step of this shape, for a model with so many page groups.

    With states the fields of `Pieces` come behind them, as one more part. If the model drafts tokens itself, the last
    part says for each new token which one is before it: the index of a new token, `KEPT` or `UNKNOWN`.
    """
    before = (key.num_tokens,) if has_drafts else ()
    pieces = (len(Pieces._fields) * key.num_rows,) if has_states else ()
    shared = key.num_singles if key.num_groups else 0
    groups = (shared, key.num_groups, key.num_groups, key.num_groups * GROUP_TILE)
    tokens = key.num_tokens
    own = (3, *(tokens,) * 3, tokens * num_groups, tokens, key.num_rows)
    return (*own, *groups, *(key.num_tiles,) * 4, *pieces, *before)


def forward(
    merge: Merge,
    key: BucketKey,
    leaves: Sequence[Array],
    pool: KVPool,
    page_table: Int[Array, "GR C"],
    last_token: Int[Array, " R"],
    packed: Int[Array, " n"],
    vision: Float[Array, "I D"] | None = None,
    *,
    num_groups: int = 1,
    has_states: bool = False,
    has_drafts: bool = False,
    is_deterministic: bool = False,
) -> tuple[Float[Array, "B V"], Float[Array, "T D"], KVPool, Int[Array, "GR C"]]:
    """Logits of each request's last new token, all hidden states, and pool and page table after the step.

    It writes the pages of new tokens into the page table, so a decode step needs no other transfer. The vision pool is
    needed only where there may be tokens of images. The page table has the rows of each page group one after another.
    In deterministic mode no result depends on how the tokens of a request are cut.
    """
    model = merge(leaves)
    sizes = packed_sizes(key, num_groups, has_states=has_states, has_drafts=has_drafts)
    split = jnp.split(packed, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)])
    before = split.pop() if has_drafts else None
    pieces = Pieces(*split.pop().reshape(len(Pieces._fields), -1)) if has_states else None
    parts = PackedInputs(*split)
    slots = [parts.slots] if num_groups == 1 else jnp.split(parts.slots, num_groups)
    first_rows = [index * (len(page_table) // num_groups) for index in range(num_groups)]
    for first, of_group in zip(first_rows, slots, strict=True):
        written = jnp.where(of_group > 0, parts.rows + first if first else parts.rows, first)
        page_table = page_table.at[written, parts.positions // pool.page_size].set(of_group // pool.page_size)
    inputs = _forward_inputs(key, parts._replace(slots=slots[0]), page_table, last_token)
    attention = inputs.attention
    windows = tuple(
        WindowInputs(of_group, attention.single_rows + first, attention.tile_rows + first)
        for first, of_group in zip(first_rows[1:], slots[1:], strict=True)
    )
    tiles = None
    if key.num_tiles and not is_deterministic:
        tiles = None if pieces is None else tiles_of(pieces, key.num_tiles)
        attention = attention._replace(chunks=ops.chunks_of(attention, key.num_tokens))
    inputs = inputs._replace(attention=attention, vision=vision, windows=windows, pieces=pieces, piece_tiles=tiles)
    hidden, pool = model(inputs, pool)
    if before is not None:
        pool = _with_pairs(cast(Decoder, model), inputs, parts, before, hidden, pool)
    return model.logits(hidden[parts.logit_index]), hidden, pool, page_table


def _with_pairs(
    model: Decoder,
    inputs: ForwardInputs,
    parts: PackedInputs,
    before: Int[Array, " T"],
    hidden: Float[Array, "T D"],
    pool: KVPool,
) -> KVPool:
    """The pool with what the layer that drafts keeps of the new tokens, and with the last hidden states of their rows.

    Of that layer XLA keeps keys and values only, because nobody reads its output here.
    """
    (kept,), rows, places = pool.hidden, parts.rows, parts.positions % HIDDEN_KEPT
    # The barrier puts the read before the write. Otherwise XLA would copy the whole array.
    kept, earlier = lax.optimization_barrier((kept, kept[rows, (parts.positions - 1) % HIDDEN_KEPT]))
    found = jnp.where(before[:, None] == KEPT, earlier, jnp.where(before[:, None] < 0, 0, hidden[before]))
    *_, cache = model.drafted(inputs, found, pool.layers[-1])
    later = jnp.pad(rows[HIDDEN_KEPT:], (0, min(HIDDEN_KEPT, len(rows))), constant_values=-1)
    kept = kept.at[jnp.where(later == rows, 0, rows), places].set(hidden)
    return pool._replace(layers=(*pool.layers[:-1], cache), hidden=(kept,))


def draft(
    merge: Merge,
    leaves: Sequence[Array],
    cache: LayerArrays,
    kept: Float[Array, "R kept D"],
    page_table: Int[Array, "R C"],
    last: tuple[Int[Array, " B"], Float[Array, "B D"]],
    packed: Int[Array, "B columns"],
    index: Int[Array, ""],
    *,
    page_size: int,
) -> tuple[Int[Array, " B"], Float[Array, "B D"], LayerArrays]:
    """One more token of each row by the layer that drafts, what takes the place of its hidden state, and the cache.

    A row may have no page yet for a token that no step has run. So each row has pages of its own in this layer, behind
    all others, which take the place of those after the page of its last token that was run.

    Args:
        merge: See `Merge`.
        leaves: The model's parameters.
        cache: The keys and values of the layer.
        kept: See `KVPool.hidden`.
        page_table: As in `forward`.
        last: What the call before returned. Not read if `index` is 0.
        packed: For each request its row, or 0 for padding, its last token, and the position of that, which no step has
            run.
        index: How many tokens were drafted before this one.
        page_size: KV slots in a page.
    """
    model = cast(Decoder, merge(leaves))
    rows, tokens, positions = (packed[:, i] for i in range(DRAFT_COLUMNS))
    tokens = jnp.where(index > 0, last[0], tokens)
    before = jnp.where(index > 0, last[1], kept[rows, (positions - 1) % HIDDEN_KEPT])
    own, lines = own_pages(page_size), jnp.arange(len(rows))
    first_own = cache[0].shape[0] - own * len(kept) + own * rows
    first_column = (positions - 1) // page_size + 1
    columns, pages = (first[:, None] + jnp.arange(own) for first in (first_column, first_own))
    table = page_table[rows].at[lines[:, None], columns].set(pages, mode="drop")
    here = positions + index
    column = here // page_size
    slots = table.at[lines, column].get(mode="fill", fill_value=0) * page_size + here % page_size
    slots = jnp.where(column < table.shape[1], slots, 0)
    none = jnp.zeros(0, jnp.int32)
    lens = jnp.where(rows > 0, here + 1, 0)
    attention = AttentionInputs(table, lines, lens, none, none, none, none, jnp.zeros((), jnp.int32))
    read, hidden, cache = model.drafted(ForwardInputs(tokens, here, slots, attention), before, cache)
    return jnp.argmax(gather_columns(model.logits(read)), axis=-1).astype(jnp.int32), hidden, cache


def _forward_inputs(
    key: BucketKey, parts: PackedInputs, page_table: Int[Array, "GR C"], last_token: Int[Array, " R"]
) -> ForwardInputs:
    is_single = jnp.arange(key.num_singles) < parts.counts[2]
    members = parts.group_members.reshape(-1, GROUP_TILE)
    groups = PrefixGroups(parts.shared_lens, parts.group_rows, parts.group_lens, members)
    attention = AttentionInputs(
        page_table=page_table,
        single_rows=parts.rows[: key.num_singles],
        single_kv_lens=jnp.where(is_single, parts.positions[: key.num_singles] + 1, 0),
        tile_rows=parts.tile_rows,
        tile_starts=parts.tile_starts,
        tile_lens=parts.tile_lens,
        tile_positions=parts.tile_positions,
        num_tiles=parts.counts[0],
        num_short_tiles=parts.counts[1],
        groups=groups if key.num_groups else None,
    )
    token_ids = jnp.where(parts.token_ids < 0, last_token[parts.rows], parts.token_ids)
    return ForwardInputs(token_ids, parts.model_positions, parts.slots, attention)


def encode(
    merge: Merge,
    leaves: Sequence[Array],
    vision: Float[Array, "I D"],
    pixels: Float[Array, "N 3 S S"],
    rows: Int[Array, "N M"],
    *,
    is_video: bool,
) -> Float[Array, "I D"]:
    """The vision pool with the features of some tiles or frames written to their rows; row 0 is the dump."""
    tower = cast(Llava, merge(leaves)).vision
    features = tower.encode_frames(pixels) if is_video else tower.encode(pixels)
    return vision.at[rows].set(features.astype(vision.dtype))


def unpack_sampling(packed: Int[Array, "R columns"]) -> SamplingInputs:
    """The columns of the sampling array, which holds the bits of floats as integers."""
    integers = [packed[:, i] for i in range(6)]
    floats = lax.bitcast_convert_type(packed[:, 6:], jnp.float32)
    return SamplingInputs(
        rows=integers[0],
        output_index=integers[1],
        seeds=lax.bitcast_convert_type(packed[:, 2:4], jnp.uint32),
        top_k=integers[4],
        uses_tables=integers[5] > 0,
        numbers={name: floats[:, i] for i, name in enumerate(NUMBERS)},
    )


def sample(
    logits: Float[Array, "B V"],
    packed: Int[Array, "B columns"],
    last_token: Int[Array, " R"],
    tables: PenaltyTables | None,
    chosen: Int[Array, "B chosen"] | None,
    masks: TokenMasks | None = None,
    *,
    is_sampled: bool,
    has_thresholds: bool,
    num_top: int,
) -> tuple[StepOutput, Int[Array, " R"], PenaltyTables | None]:
    """Tokens, with log-probabilities if `chosen` is given, and the tables after these tokens.

    Several devices share the columns of the logits. Where every token can be judged by itself, each device offers its
    best token; otherwise the devices gather the logits.
    """
    inputs = unpack_sampling(packed)
    allowed = None if masks is None else allowed_tokens(masks, logits.shape[1] * num_parts())
    if has_thresholds or tables is not None or chosen is not None:
        logits = gather_columns(logits)
        tokens = choose_tokens(logits, inputs, tables, allowed, is_sampled=is_sampled, has_thresholds=has_thresholds)
    else:
        tokens = best_tokens(logits, inputs, allowed, is_sampled=is_sampled)
    tokens = tokens if masks is None else _with_forced(tokens, masks)
    if tables is not None:
        tables = count_tokens(tables, inputs, tokens)
    logprobs = None if chosen is None else token_logprobs(logits, tokens, chosen, num_top)
    mass = None if chosen is None or allowed is None else kept_mass(logits, allowed)
    return StepOutput(tokens, logprobs, mass), last_token.at[inputs.rows].set(jnp.maximum(tokens, 0)), tables


def sample_needed(
    logits: Float[Array, "B V"],
    packed: Int[Array, "B columns"],
    last_token: Int[Array, " R"],
    tables: PenaltyTables,
    chosen: Int[Array, "B chosen"],
    masks: TokenMasks,
    *,
    num_top: int,
) -> tuple[StepOutput, Int[Array, " R"], PenaltyTables]:
    """As `sample` with everything, in branches, so that a batch pays for what its rows need.

    Tokens are the best, or drawn, or drawn after penalties. Where every chosen id is -1, nothing is scored.
    """
    inputs, logits = unpack_sampling(packed), gather_columns(logits)

    def best() -> Int[Array, " B"]:
        return choose_tokens(logits, inputs, None, is_sampled=False)

    def drawn(tables: PenaltyTables | None) -> Int[Array, " B"]:
        return choose_tokens(logits, inputs, tables, allowed_tokens(masks, logits.shape[1]), is_sampled=True)

    def score() -> tuple[Logprobs, Float[Array, " B"]]:
        mass = kept_mass(logits, allowed_tokens(masks, logits.shape[1]))
        return token_logprobs(logits, tokens, chosen, num_top), mass

    needs_more = jnp.any(masks.rows > 0) | jnp.any(inputs.numbers["temperature"] > 0)
    branch = jnp.where(jnp.any(inputs.uses_tables), 2, needs_more.astype(jnp.int32))
    tokens = _with_forced(lax.switch(branch, [best, lambda: drawn(None), lambda: drawn(tables)]), masks)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score))
    output = StepOutput(tokens, *lax.cond(jnp.any(chosen >= 0), score, lambda: zeros))
    last_token = last_token.at[inputs.rows].set(jnp.maximum(tokens, 0))
    return output, last_token, count_tokens(tables, inputs, tokens)


def _with_forced(tokens: Int[Array, " R"], masks: TokenMasks) -> Int[Array, " R"]:
    return jnp.where((masks.forced >= 0) & (tokens >= 0), masks.forced, tokens)


def prompt_logprobs(
    merge: Merge,
    leaves: Sequence[Array],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    chosen: Int[Array, "T chosen"],
    *,
    num_top: int,
) -> Logprobs:
    """Log-probabilities of each token's successor in its prompt. The head takes `PROMPT_ROWS` tokens at a time."""
    model = merge(leaves)

    def one_part(part: tuple[Array, Array, Array]) -> Logprobs:
        return token_logprobs(gather_columns(model.logits(part[0])), part[1], part[2], num_top)

    rows = min(PROMPT_ROWS, len(targets))
    parts = [x.reshape(-1, rows, *x.shape[1:]) for x in (hidden, targets, chosen)]
    return Logprobs(*(x.reshape(-1, *x.shape[2:]) for x in lax.map(one_part, tuple(parts))))


def pooled(hidden: Float[Array, "T D"], rows: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The hidden states of some tokens, in float32."""
    return hidden[rows].astype(jnp.float32)


def write_rows(table: Shaped[Array, "N C"], rows: Int[Array, " k"], new: Shaped[Array, "k C"]) -> Shaped[Array, "N C"]:
    """A page table or a pool of token masks with whole rows replaced. Row 0 of masks may only get what it holds."""
    return table.at[rows].set(new)


def write_counts(
    tables: PenaltyTables,
    row: Int[Array, ""],
    reset: Int[Array, ""],
    ids: Int[Array, " k"],
    is_output: Int[Array, " k"],
) -> PenaltyTables:
    """Counts `ids` as prompt or output tokens of a request; with `reset` forgets its row first. Id -1 is padding."""
    vocab = tables.bias.shape[1]
    counts = jnp.where(reset > 0, 0, tables.counts[row])
    output_ids = jnp.where((ids >= 0) & (is_output > 0), ids, vocab)
    prompt_ids = jnp.where((ids >= 0) & (is_output == 0), ids, vocab)
    counts = counts.at[output_ids].add(2, mode="drop")
    counts |= jnp.zeros_like(counts).at[prompt_ids].set(1, mode="drop")
    return tables._replace(counts=tables.counts.at[row].set(counts))


def write_bias(
    tables: PenaltyTables, row: Int[Array, ""], ids: Int[Array, " k"], values: Float[Array, " k"]
) -> PenaltyTables:
    """The bias row of a request: the sum of `values` at `ids`, zero elsewhere. Id -1 is padding."""
    vocab = tables.bias.shape[1]
    empty = jnp.zeros(vocab, jnp.float32)
    return tables._replace(
        bias=tables.bias.at[row].set(empty.at[jnp.where(ids < 0, vocab, ids)].add(values, mode="drop"))
    )
