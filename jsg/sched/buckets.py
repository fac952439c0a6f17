"""The fixed shapes a step may have. Every batch is padded to one of them, so that after warm-up nothing compiles."""

import bisect
import dataclasses
import enum

from jsg.errors import ConfigError
from jsg.kernels_pallas.inputs import QUERY_TILE

DETERMINISTIC_MULTIPLE = 64
"""Rows of a matmul are a multiple of this in deterministic mode: within it XLA computes a row the same way."""


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
    """

    phase: Phase
    num_tokens: int
    num_rows: int

    @property
    def num_singles(self) -> int:
        """Leading tokens that may be alone in their row."""
        return min(self.num_tokens, self.num_rows)

    @property
    def num_tiles(self) -> int:
        """Query tiles that any batch of this shape needs at most."""
        return 0 if self.phase is Phase.DECODE else self.num_tokens // QUERY_TILE + self.num_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """All shapes of one engine.

    Attributes:
        decode: Keys of decode steps, smallest first; empty in deterministic mode, where every step is an extend.
        extend: Keys of extend steps, smallest first.
    """

    decode: tuple[BucketKey, ...]
    extend: tuple[BucketKey, ...]

    @property
    def all(self) -> tuple[BucketKey, ...]:
        """Every key."""
        return self.decode + self.extend

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


def make_buckets(max_running: int, chunk: int, *, deterministic: bool) -> Buckets:
    """Shapes for at most `max_running` requests and `chunk` new tokens a step.

    Decode has 1, the powers of two from 4 to 64 rows, then steps of 32 (finer where padding would cost most); extend
    has the powers of two from 64 tokens.

    Raises:
        ConfigError: A chunk cannot hold one token of every running request.
    """
    if chunk < max_running:
        raise ConfigError(
            f"--chunked-prefill-size must be at least --max-running-requests, but got {chunk} < {max_running}"
        )
    rows = _round_up(max_running, DETERMINISTIC_MULTIPLE) if deterministic else max_running
    top = _round_up(chunk, DETERMINISTIC_MULTIPLE)
    extend = [size for size in (2**i * DETERMINISTIC_MULTIPLE for i in range(32)) if size < top] + [top]
    decode = [] if deterministic else _decode_sizes(max_running)
    return Buckets(
        decode=tuple(BucketKey(Phase.DECODE, size, size) for size in decode),
        extend=tuple(BucketKey(Phase.EXTEND, size, rows) for size in extend),
    )


def _decode_sizes(max_running: int) -> list[int]:
    sizes = [1, 4, 8, 16, 32, 64, *range(96, max_running, 32)]
    return [size for size in sizes if size < max_running] + [max_running]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
