"""Packs a batch into the numpy arrays that the executables read.

Every step gets new arrays, which are never written again: on a CPU, JAX may read an aligned numpy array in place after
the call has returned.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jsg.engine.device.step import KEPT, NUMBERS, SAMPLING_COLUMNS, UNKNOWN, PackedInputs, packed_sizes
from jsg.kernels_pallas.tile import GROUP_TILE, QUERY_TILE, SHORT_TILE
from jsg.sched.batch import Batch, BatchEntry, Encoding
from jsg.sched.buckets import BucketKey
from jsg.sched.request import RunningRequest
from jsg.sched.vision_store import DUMP_ROW
from jsg.types import SamplingParams

FROM_DEVICE = -1
PIECES, BEFORE = "pieces", "before"


def empty_step(
    key: BucketKey, num_groups: int = 1, *, has_states: bool = False, has_drafts: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The int32 array of `step.PackedInputs` for a step of this shape, all zeros, and views of its parts by name."""
    sizes = packed_sizes(key, num_groups, has_states=has_states, has_drafts=has_drafts)
    packed = np.zeros(sum(sizes), np.int32)
    names = (*PackedInputs._fields, *([PIECES] if has_states else []), *([BEFORE] if has_drafts else []))
    return packed, dict(zip(names, np.split(packed, np.cumsum(sizes)[:-1]), strict=True))


def pack_forward(
    batch: Batch,
    key: BucketKey,
    pages: np.ndarray,
    page_size: int,
    maps: Sequence[np.ndarray | None] = (None,),
    *,
    has_states: bool = False,
    has_drafts: bool = False,
) -> np.ndarray:
    """The int32 array of `step.PackedInputs`.

    Args:
        batch: The step, with one-token entries first.
        key: The shape to pad to, at least that of the batch.
        pages: The host's page table, [rows, pages of a row].
        page_size: KV slots in one page.
        maps: See `RequestTable.maps`.
        has_states: Whether the model keeps a state of each request.
        has_drafts: Whether the model drafts tokens itself.
    """
    packed, parts = empty_step(key, len(maps), has_states=has_states, has_drafts=has_drafts)
    counts, token_ids, positions, model_positions, slots, rows, logit_index, *rest = parts.values()
    groups, tiles = rest[:4], rest[4:8]
    lens = np.array([entry.num_new for entry in batch.entries])
    ends = np.cumsum(lens)
    num_tokens = ends[-1]
    starts = np.array([entry.start for entry in batch.entries])
    rows[:num_tokens] = np.repeat([entry.place.row for entry in batch.entries], lens)
    positions[:num_tokens] = np.arange(num_tokens) - np.repeat(ends - lens - starts, lens)
    _fill_model_positions(model_positions, positions, batch, ends)
    _fill_token_ids(token_ids, batch, ends)
    is_written = positions[:num_tokens] >= np.repeat([entry.write_start for entry in batch.entries], lens)
    page = pages[rows[:num_tokens], positions[:num_tokens] // page_size]
    offset = positions[:num_tokens] % page_size
    for index, (numbers, part) in enumerate(zip(maps, slots.reshape(len(maps), -1), strict=True)):
        if numbers is None:
            part[:num_tokens] = np.where(is_written, page * page_size + offset, 0)
        else:
            is_lacking = _is_lacking(batch, index, lens, positions[:num_tokens] // page_size)
            part[:num_tokens] = np.where(is_written | is_lacking, numbers[page] * page_size + offset, 0)
    if batch.has_drafts:
        last = [end - 1 - k for entry, end in zip(batch.entries, ends, strict=True) for k in _backwards(entry)]
        logit_index[: len(last)] = last
    else:
        logit_index[: len(lens)] = ends - 1
    counts[:] = (*_fill_tiles(tiles, batch, ends - lens), batch.num_singles)
    if key.num_groups:
        _fill_groups(groups, batch)
    if has_states:
        named = ("state_source", "state_slot", "is_known")
        sources, targets, is_known = ([getattr(entry, name) for entry in batch.entries] for name in named)
        parts[PIECES].reshape(-1, key.num_rows)[:, : len(lens)] = ends - lens, lens, sources, targets, starts, is_known
    if has_drafts:
        parts[BEFORE][:num_tokens] = np.arange(num_tokens) - 1
        admitted = set(batch.admitted)
        parts[BEFORE][ends - lens] = [UNKNOWN if entry.running in admitted else KEPT for entry in batch.entries]
    return packed


def pack_encodings(encodings: Sequence[Encoding], num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [num_tiles, 3, S, S] of tiles or frames, and their rows [num_tiles, M] of the vision pool."""
    first = encodings[0]
    pixels = np.zeros((num_tiles, *first.pixels.shape), np.float32)
    rows = np.full((num_tiles, len(first.rows)), DUMP_ROW, np.int32)
    for index, encoding in enumerate(encodings):
        pixels[index], rows[index] = encoding.pixels, encoding.rows
    return pixels, rows


def _is_lacking(batch: Batch, index: int, lens: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Which new tokens the tree has, but not in the layers of a page group: bool [new tokens]."""
    if not batch.lacking:
        return np.zeros(len(columns), bool)
    lacking = [batch.lacking[row][index] if (row := e.place.row) in batch.lacking else () for e in batch.entries]
    parts = zip(np.split(columns, np.cumsum(lens)[:-1]), lacking, strict=True)
    return np.concatenate([np.isin(own, pages) for own, pages in parts])


def pack_padding(
    key: BucketKey, num_groups: int = 1, *, has_states: bool = False, has_drafts: bool = False
) -> np.ndarray:
    """A step of this shape in which every token is padding and no group has members."""
    packed, parts = empty_step(key, num_groups, has_states=has_states, has_drafts=has_drafts)
    parts["group_members"][:] = -1
    return packed


def _backwards(entry: BatchEntry) -> range:
    """For each row of logits of an entry, how many new tokens come after its own."""
    return range(entry.num_drafts, -1, -1)


def _fill_model_positions(model_positions: np.ndarray, positions: np.ndarray, batch: Batch, ends: np.ndarray) -> None:
    model_positions[:] = positions
    layouts = [entry.running.layout for entry in batch.entries]
    for index in [index for index, layout in enumerate(layouts) if layout is not None]:
        entry, end, layout = batch.entries[index], ends[index], layouts[index]
        assert layout is not None
        model_positions[end - entry.num_new : end] = layout.positions[entry.start : entry.start + entry.num_new]


def _fill_token_ids(token_ids: np.ndarray, batch: Batch, ends: np.ndarray) -> None:
    for entry, end in zip(batch.entries, ends.tolist(), strict=True):
        if entry.from_device:
            token_ids[end - 1] = FROM_DEVICE
        elif entry.vision_ids is not None:
            token_ids[end - entry.num_new : end] = entry.vision_ids
        else:
            token_ids[end - entry.num_new : end] = entry.running.tokens[entry.start : entry.start + entry.num_new]


def _fill_tiles(tiles: list[np.ndarray], batch: Batch, offsets: np.ndarray) -> tuple[int, int]:
    """Cuts every entry but the singles into query tiles; returns their number and that of the short ones in front."""
    cuts = [
        (entry.place.row, offset + done, min(QUERY_TILE, entry.num_new - done), entry.start + done)
        for entry, offset in zip(batch.entries[batch.num_singles :], offsets[batch.num_singles :], strict=True)
        for done in range(0, entry.num_new, QUERY_TILE)
    ]
    if cuts:
        for part, column in zip(tiles, np.array(cuts, np.int32).T, strict=True):
            part[: len(cuts)] = column
    is_short = (not batch.is_deterministic and length <= SHORT_TILE for _, _, length, _ in cuts)
    return len(cuts), sum(itertools.takewhile(bool, is_short))


def _fill_groups(parts: list[np.ndarray], batch: Batch) -> None:
    """Cuts every group into tiles of its members. In a decode step, an entry's index is that of its packed token."""
    shared_lens, group_rows, group_lens, group_members = parts
    members_of = group_members.reshape(-1, GROUP_TILE)
    members_of[:] = -1
    tile = 0
    for group in batch.groups:
        shared_lens[list(group.members)] = group.num_tokens
        for start in range(0, len(group.members), GROUP_TILE):
            members = group.members[start : start + GROUP_TILE]
            group_rows[tile], group_lens[tile] = batch.entries[members[0]].place.row, group.num_tokens
            members_of[tile, : len(members)] = members
            tile += 1


def sampling_row(sampling: SamplingParams, seed: int, vocab_size: int) -> np.ndarray:
    """The part of `step.SamplingInputs` that never changes for a request: the sampling array from column 2 on."""
    integers = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
    top_k = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    floats = np.array([getattr(sampling, name) for name in NUMBERS], np.float32)
    flags = np.array([top_k, needs_tables(sampling)], np.int32)
    return np.concatenate([integers, flags, floats.view(np.int32)])


def pack_sampling(batch: Batch, key: BucketKey, constants: np.ndarray) -> np.ndarray:
    """The int32 array of `step.unpack_sampling`.

    Entries that do not sample write to row 0, the dump. So do entries with drafts, because only the host knows which of
    their tokens is the last.

    Args:
        batch: The step.
        key: The shape to pad to.
        constants: The `sampling_row` of each request row.
    """
    packed = np.zeros((key.num_rows, SAMPLING_COLUMNS), np.int32)
    rows = np.array([entry.place.row for entry in batch.entries])
    writes = [entry.samples and not entry.num_drafts for entry in batch.entries]
    output_index = np.array([entry.output_index for entry in batch.entries])
    written = np.where(writes, rows, 0)
    if batch.has_drafts:
        counts = [entry.num_rows for entry in batch.entries]
        rows, written = np.repeat(rows, counts), np.repeat(written, counts)
        output_index = np.repeat(output_index - batch.first_rows, counts) + np.arange(len(rows))
    packed[: len(rows), 0] = written
    packed[: len(rows), 1] = output_index
    packed[: len(rows), 2:] = constants[rows]
    return packed


def pack_forced(batch: Batch, key: BucketKey) -> np.ndarray:
    """int32[rows]: the token that a row gets whatever its logits are; -1 where the logits decide."""
    forced = np.full(key.num_rows, -1, np.int32)
    for entry, row in zip(batch.entries, batch.first_rows, strict=True):
        if entry.is_forced:
            forced[row : row + entry.num_drafts] = entry.drafts
    return forced


def has_thresholds(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether a request's top-k, top-p or min-p may exclude a token."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0


def needs_tables(sampling: SamplingParams) -> bool:
    """Whether a request needs its rows of the penalty tables."""
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1
        or sampling.logit_bias
        or sampling.min_new_tokens
    )


def stop_ids(running: RunningRequest, eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that end the request."""
    sampling = running.request.sampling
    return sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})


def bias_of(running: RunningRequest, eos_token_ids: frozenset[int], output_index: int) -> dict[int, float]:
    """The bias of the token at `output_index`: the client's, and minus infinity for an end before `min_new_tokens`."""
    bias = dict(running.request.sampling.logit_bias)
    if output_index < running.request.sampling.min_new_tokens:
        bias |= dict.fromkeys(stop_ids(running, eos_token_ids), -float("inf"))
    return bias
