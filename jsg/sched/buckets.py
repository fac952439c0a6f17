"""The fixed shapes a step may have. Every batch is padded to one of them, so that after warm-up nothing compiles."""

import bisect
import dataclasses
import enum
import itertools

from jsg.errors import ConfigError
from jsg.kernels_pallas.tile import MIN_GROUP, QUERY_TILE

SMALLEST_EXTEND = 64
SMALLEST_GROUPED = 32
DRAFT_ROWS = 64
"""Rows of logits for drafts beside those of the requests."""
ENOUGH = 0.75
"""Of a shape for drafts that must be filled before it is worth more than a smaller one with fewer drafts."""


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
        num_groups: Group tiles (see `AttentionInputs`); 0 where prefixes that rows share are not read together.
    """

    phase: Phase
    num_tokens: int
    num_rows: int
    num_groups: int = 0

    @property
    def num_singles(self) -> int:
        """Leading tokens that may be alone in their row."""
        return min(self.num_tokens, self.num_rows)

    @property
    def num_tiles(self) -> int:
        """Query tiles that any batch of this shape needs at most."""
        return 0 if self.phase is Phase.DECODE else self.num_tokens // QUERY_TILE + min(self.num_rows, self.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """All shapes of one engine.

    Attributes:
        decode: Keys of decode steps, smallest first; empty in deterministic mode.
        extend: Keys of extend steps, smallest first; exactly one in deterministic mode.
        chunk: New tokens in one step at most.
        drafts: Keys of extend steps with logits for every token, smallest first; empty in deterministic mode, where the
            one shape has them anyway.
        encode: Tiles that the vision encoder takes at once, smallest first; empty where the model has none.
        grouped: Keys of decode steps that read shared prefixes once, smallest first; empty where nothing can. Each has
            room for the groups of any batch of its size.
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
    def max_rows(self) -> int:
        """Requests in one step at most."""
        return self.extend[-1].num_rows

    @property
    def max_tokens(self) -> int:
        """New tokens in one step at most."""
        return self.extend[-1].num_tokens

    def pick(self, phase: Phase, num_tokens: int) -> BucketKey:
        """The smallest shape that holds a step of `num_tokens`."""
        keys = self.decode if phase is Phase.DECODE and self.decode else self.extend
        return keys[bisect.bisect_left(keys, num_tokens, key=lambda key: key.num_tokens)]

    def pick_drafts(self, num_tokens: int, num_rows: int) -> BucketKey:
        """The smallest extend shape that holds so many new tokens and rows of logits; there must be one."""
        return self.holding(num_tokens, num_rows)[0]

    def rows_worth(self, least: int, wanted: int, most: int) -> int:
        """How many rows of logits a step with drafts should have at most, `most` being all it may have now.

        A step costs what its shape costs, so one that would be filled too little is left for the next smaller one,
        unless that has no room for half of the drafts.

        Args:
            least: Rows without any draft.
            wanted: Rows with every draft.
            most: A number of rows.
        """
        sizes = [key.num_rows for key in self.drafts if least < key.num_rows <= most]
        for size, larger in itertools.pairwise(sizes):
            if wanted < ENOUGH * larger and 2 * (size - least) >= wanted - least:
                return size
        return most

    def holding(self, num_tokens: int, num_rows: int) -> list[BucketKey]:
        """Extend shapes that hold so many new tokens and rows of logits, those for drafts included, smallest first.

        A shape for many tokens may stand in for one for drafts that has more rows than a step fills.
        """
        keys = self.extend + self.drafts
        return sorted(key for key in keys if key.num_tokens >= num_tokens and key.num_rows >= num_rows)

    def pick_grouped(self, num_tokens: int) -> BucketKey | None:
        """The smallest decode shape that reads shared prefixes once and holds `num_tokens`; None where there is none.

        Larger ones are no stand-in: their padding may cost more than a shared prefix saves.
        """
        return next((key for key in self.grouped if key.num_tokens >= num_tokens), None)


def make_buckets(max_running: int, chunk: int, *, row_multiple: int = 1, shares_prefixes: bool = False) -> Buckets:
    """Shapes for at most `max_running` requests and `chunk` new tokens a step.

    Decode has 1, the powers of two from 4 to 64 rows, then steps of 32 (finer where padding would cost most); extend
    has the powers of two from 64 tokens. With `shares_prefixes` decode has the powers of two from 32 rows once more,
    with room for groups: fewer, because a step may always go without.

    Args:
        max_running: Requests in one step.
        chunk: New tokens in one step.
        row_multiple: Every number of rows is a multiple of it.
        shares_prefixes: Steps may read a prefix once for several requests.

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

    XLA compiles each shape for itself, and what it makes of two shapes may differ in the last bits; a row of one shape
    is the same to the last bit whatever stands in the other rows.

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
    """One with room for drafts beside a full batch, and smaller ones for few requests with drafts."""
    most = -(-max_rows // DRAFT_ROWS) * DRAFT_ROWS + DRAFT_ROWS
    smaller = [DRAFT_ROWS] if max_rows > DRAFT_ROWS else [DRAFT_ROWS // 4, DRAFT_ROWS // 2, DRAFT_ROWS]
    return [BucketKey(Phase.EXTEND, size, size) for size in (*smaller, most)]


def _grouped_keys(max_rows: int) -> list[BucketKey]:
    """A group of n >= `MIN_GROUP` members has at most n // `MIN_GROUP` tiles, so all of a batch have no more."""
    powers = [2**i * SMALLEST_GROUPED for i in range(32)]
    sizes = [size for size in powers if size < max_rows] + [max_rows]
    return [BucketKey(Phase.DECODE, size, size, size // MIN_GROUP) for size in sizes if size >= MIN_GROUP]
