"""The fixed shapes that a step may have. Each batch is padded to one of them, so after warm-up nothing compiles."""

import bisect
import dataclasses
import enum
import itertools

from jsg.errors import ConfigError
from jsg.kernels_pallas.tile import MIN_GROUP, QUERY_TILE

SMALLEST_EXTEND = 64
SMALLEST_GROUPED = 32
DRAFT_ROWS = 64
"""The rows of logits for drafts, beside those of the requests."""
SMALLER_DRAFTS = (8, 16, 32, 64)
"""Rows of logits of the shapes for few requests with drafts. Where there are many other shapes, the last must do."""
REPEATED_ROWS = (1, 8, 32)
"""Rows for which there are programs that draft, beside the most: few, since each is a program to compile."""
ENOUGH = 0.75
"""The fraction of a shape for drafts that must be filled. Otherwise a smaller shape with fewer drafts is better."""


class Phase(enum.StrEnum):
    """DECODE: every request brings one token. EXTEND: some bring a chunk of their prompt."""

    DECODE = "decode"
    EXTEND = "extend"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class BucketKey:
    """The shape of one step.

    Attributes:
        phase: Decode or extend.
        num_tokens: Packed new tokens, padding included; in a decode step also the rows.
        num_rows: Rows of logits, padding included.
        num_groups: Group tiles (see `AttentionInputs`); 0 if the step does not read shared prefixes once.
    """

    phase: Phase
    num_tokens: int
    num_rows: int
    num_groups: int = 0

    @property
    def num_singles(self) -> int:
        """Leading tokens that may be the only new one of their request."""
        return min(self.num_tokens, self.num_rows)

    @property
    def num_tiles(self) -> int:
        """The most query tiles that a batch of this shape needs."""
        return 0 if self.phase is Phase.DECODE else self.num_tokens // QUERY_TILE + min(self.num_rows, self.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """All shapes of one engine.

    Attributes:
        decode: Keys of decode steps, smallest first. Deterministic mode has none.
        extend: Keys of extend steps, smallest first. Deterministic mode has exactly one.
        chunk: The most new tokens that a plan puts into a step.
        grouped: Keys of decode steps that read shared prefixes once, smallest first; empty if no kernel can do that.
            Each key has room for the groups of any batch of its size.
        drafts: Keys of extend steps with logits for every token, smallest first. Deterministic mode has none, since its
            only shape has logits for every token.
        encode: Numbers of tiles that the vision encoder takes at once, smallest first; empty without an encoder.
    """

    decode: tuple[BucketKey, ...]
    extend: tuple[BucketKey, ...]
    chunk: int
    grouped: tuple[BucketKey, ...] = ()
    drafts: tuple[BucketKey, ...] = ()
    encode: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[BucketKey, ...]:
        """Every key."""
        return self.decode + self.extend + self.drafts + self.grouped

    @property
    def repeats(self) -> tuple[int, ...]:
        """Rows of the programs with which a model drafts tokens itself, smallest first."""
        sizes = [key.num_rows for key in self.decode] or [self.max_rows]
        return tuple(size for size in sizes if size in REPEATED_ROWS or size == sizes[-1])

    @property
    def max_rows(self) -> int:
        """The most requests in one step."""
        return self.extend[-1].num_rows

    @property
    def max_tokens(self) -> int:
        """The most new tokens in one step, padding included."""
        return self.extend[-1].num_tokens

    def pick(self, phase: Phase, num_tokens: int) -> BucketKey:
        """The smallest shape with room for `num_tokens` new tokens."""
        keys = self.decode if phase is Phase.DECODE and self.decode else self.extend
        return keys[bisect.bisect_left(keys, num_tokens, key=lambda key: key.num_tokens)]

    def rows_worth(self, least: int, wanted: int, most: int) -> int:
        """How many rows of logits a step with drafts should have.

        A step costs as much as its shape. So the next smaller shape replaces a shape that would not be filled enough,
        unless the smaller one has no room for half of the drafts.

        Args:
            least: Rows without any draft.
            wanted: Rows with every draft.
            most: The most rows that the step may have now.
        """
        sizes = [key.num_rows for key in self.drafts if least < key.num_rows <= most]
        for size, larger in itertools.pairwise(sizes):
            if wanted < ENOUGH * larger and 2 * (size - least) >= wanted - least:
                return size
        return most

    def with_room(self, num_tokens: int, num_rows: int) -> list[BucketKey]:
        """All extend shapes with room for so many new tokens and rows of logits, smallest first.

        These include the shapes for drafts. But if few rows are needed, a shape for many tokens may be better.
        """
        keys = self.extend + self.drafts
        return sorted(key for key in keys if key.num_tokens >= num_tokens and key.num_rows >= num_rows)

    def pick_grouped(self, num_tokens: int) -> BucketKey | None:
        """The smallest decode shape that reads shared prefixes once and has room for `num_tokens`, or None.

        A larger shape must not replace it, since padding may cost more than a shared prefix saves.
        """
        return next((key for key in self.grouped if key.num_tokens >= num_tokens), None)


def make_buckets(max_running: int, chunk: int, *, row_multiple: int = 1, shares_prefixes: bool = False) -> Buckets:
    """Shapes for at most `max_running` requests and `chunk` new tokens a step.

    Decode steps have 1 row, a power of two from 4 to 64, or a multiple of 32, so that the shapes are finest where
    padding costs most. Extend steps have a power of two of tokens, from 64 on. With `shares_prefixes` there are decode
    shapes with room for groups too, for powers of two from 32 rows on: few, since a step can do without groups.

    Args:
        max_running: Requests in one step.
        chunk: New tokens in one step.
        row_multiple: Every number of rows is a multiple of it.
        shares_prefixes: Whether steps may read a prefix once for several requests.

    Raises:
        ConfigError: A chunk cannot hold one token of every running request.
    """
    _check_chunk(max_running, chunk)
    max_rows = -(-max_running // row_multiple) * row_multiple
    top = -(-max(chunk, max_rows) // SMALLEST_EXTEND) * SMALLEST_EXTEND
    extend = [size for size in (2**i * SMALLEST_EXTEND for i in range(32)) if size < top] + [top]
    return Buckets(
        decode=tuple(BucketKey(Phase.DECODE, size, size) for size in _decode_sizes(max_rows, row_multiple)),
        extend=tuple(BucketKey(Phase.EXTEND, size, max_rows) for size in extend),
        chunk=chunk,
        grouped=tuple(_grouped_keys(max_rows)) if shares_prefixes else (),
        drafts=tuple(_draft_keys(max_rows)),
    )


def make_deterministic_buckets(max_running: int, chunk: int, num_tokens: int) -> Buckets:
    """The one shape of deterministic mode: `num_tokens` new tokens and as many rows of logits, in every step.

    XLA compiles each shape by itself, and the results of two shapes may differ in their last bits. In one shape, a row
    has the same bits whatever the other rows are.

    Raises:
        ConfigError: A chunk cannot hold one token of every running request, or the shape cannot hold a chunk.
    """
    _check_chunk(max_running, chunk)
    if chunk > num_tokens:
        raise ConfigError(
            f"with --deterministic, --chunked-prefill-size must be at most {num_tokens} on this device, but got {chunk}"
        )
    return Buckets(decode=(), extend=(BucketKey(Phase.EXTEND, num_tokens, num_tokens),), chunk=chunk)


def _check_chunk(max_running: int, chunk: int) -> None:
    if chunk < max_running:
        raise ConfigError(
            f"--chunked-prefill-size must be at least --max-running-requests, but got {chunk} < {max_running}"
        )


def _decode_sizes(max_rows: int, multiple: int) -> list[int]:
    sizes = [1, 4, 8, 16, 32, 64, *range(96, max_rows, 32)]
    return [size for size in sizes if size < max_rows and size % multiple == 0] + [max_rows]


def _draft_keys(max_rows: int) -> list[BucketKey]:
    """One shape with room for drafts beside a full batch, and smaller ones for few requests with drafts."""
    most = -(-max_rows // DRAFT_ROWS) * DRAFT_ROWS + DRAFT_ROWS
    smaller = SMALLER_DRAFTS[-1:] if max_rows > DRAFT_ROWS else SMALLER_DRAFTS
    return [BucketKey(Phase.EXTEND, size, size) for size in (*smaller, most)]


def _grouped_keys(max_rows: int) -> list[BucketKey]:
    """A group of n >= `MIN_GROUP` members has at most n // `MIN_GROUP` tiles, so this suffices for all of a batch."""
    powers = [2**i * SMALLEST_GROUPED for i in range(32)]
    sizes = [size for size in powers if size < max_rows] + [max_rows]
    return [BucketKey(Phase.DECODE, size, size, size // MIN_GROUP) for size in sizes if size >= MIN_GROUP]
