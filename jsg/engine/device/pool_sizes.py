"""How many tokens each page group of the KV pool holds: layers with a window keep the last tokens of a request only.

A request of n tokens that runs with new tokens C, in pages of P tokens, takes in a group of b bytes for each token

    b * ceil(n / P) * P                                     where layers see all tokens
    b * min(ceil(n / P), ceil((W - 1 + C) / P) + 1) * P     with a window W
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jsg.cache.pool import HIDDEN_KEPT
from jsg.models.spec import ModelSpec
from jsg.window import Window

MOST_REPEATS = 4
"""Tokens that a model's own layer drafts one after another."""

SEQUENCE_WINDOWS = 4
"""Sequences in the pool, which run or are cached, are taken to be so many windows long at most. Of shorter ones, layers
with a window hold fewer than the other layers could."""


class WindowPool(NamedTuple):
    """The pool of the layers of one window: tokens that it holds, without the dump page, and bytes of one."""

    window: Window
    tokens: int
    bytes_per_token: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """The formula of the memory plan for the KV pool on one device.

    Attributes:
        bytes_per_token: For each page group (see `ModelSpec.page_groups`) the bytes of a token in its layers.
        page_size: Tokens in a page.
        chunk: New tokens of a step at most.
        max_running: Requests that run at a time at most.
        context_length: Tokens of a request at most.
    """

    bytes_per_token: dict[Window | None, int]
    page_size: int
    chunk: int
    max_running: int
    context_length: int

    @property
    def windows(self) -> dict[Window, int]:
        """The bytes of a token, by window."""
        return {window: size for window, size in self.bytes_per_token.items() if window is not None}

    def sequence_length(self, window: Window) -> int:
        """How many tokens long sequences are taken to be that a window's group has room for.

        In windows it is the ratio of the bytes of all layers to those of layers that see all tokens. With one window at
        least half as many requests run then, however long they are, as if the pool were shared out for their length. It
        is `SEQUENCE_WINDOWS` at most, since most requests are not longer.
        """
        of_all, windows = sum(self.bytes_per_token.values()), SEQUENCE_WINDOWS * window.length
        if (of_full := self.bytes_per_token.get(None)) is not None:
            windows = min(windows, window.length * of_all // of_full)
        return min(windows, max(self.context_length, window.length))

    def window_tokens(self, window: Window, pool_tokens: int) -> int:
        """Tokens of a window's group beside so many tokens in all: a window for each sequence, and a chunk.

        There are no more sequences than requests may run, and what fits beside one request of the longest context.
        """
        size, length = self.page_size, self.sequence_length(window)
        beside = -(-max(pool_tokens - self.context_length, 0) // length)
        sequences = min(-(-pool_tokens // length), self.max_running + beside)
        pages = max(sequences, 1) * (-(-(window.length - 1) // size) + 1) + -(-self.chunk // size)
        return min(pool_tokens // size, pages) * size

    def num_bytes(self, pool_tokens: int) -> int:
        """Bytes of all groups, without dump pages, if requests may have so many tokens in all."""
        windows = sum(size * self.window_tokens(window, pool_tokens) for window, size in self.windows.items())
        return windows + self.bytes_per_token.get(None, 0) * pool_tokens

    def tokens_in(self, num_bytes: int) -> int:
        """The most tokens for which so many bytes suffice; below 0 if these are."""
        if not self.windows:
            return num_bytes // self.bytes_per_token[None]
        size, least = self.page_size, 0
        if num_bytes < 0:
            return -size
        if (per_token := self.bytes_per_token.get(None)) is not None:
            most = num_bytes // per_token // size
        else:  # tokens that no window reaches take no memory of the device, but some of the host
            most = max(self.context_length, SEQUENCE_WINDOWS * num_bytes // sum(self.windows.values())) // size
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.num_bytes(middle * size) <= num_bytes else (least, middle - 1)
        return least * size

    def window_pools(self, pool_tokens: int, num_bytes: int) -> tuple[WindowPool, ...]:
        """The pools of groups with windows. What the formula leaves of the bytes goes to them too, for the cache."""
        left, pools = num_bytes - self.num_bytes(pool_tokens), []
        for window, size in self.windows.items():
            tokens = self.window_tokens(window, pool_tokens)
            more = min(max(left, 0) // size // self.page_size * self.page_size, pool_tokens - tokens)
            left -= more * size
            pools.append(WindowPool(window, tokens + more, size))
        return tuple(pools)


def pool_sizes(
    model: ModelSpec,
    kv_itemsize: int,
    *,
    num_devices: int,
    page_size: int,
    chunk: int,
    max_running: int,
    context_length: int,
) -> PoolSizes:
    """The formula for a model of which several devices share the key-value heads."""
    sizes = model.group_bytes_per_token(kv_itemsize)
    return PoolSizes(
        bytes_per_token={window: size // num_devices for window, size in sizes.items()},
        page_size=page_size,
        chunk=chunk,
        max_running=max_running,
        context_length=context_length,
    )


def own_pages(page_size: int) -> int:
    """Pages of a request row in the layer that drafts, for tokens that no step has run: see `step.draft`."""
    return -(-MOST_REPEATS // page_size)


def layer_pages(
    model: ModelSpec, by_window: Mapping[Window | None, int], num_rows: int, page_size: int
) -> Sequence[int]:
    """The pages of each layer with keys, of which some windows have fewer. That which drafts has those of rows too."""
    pages = [by_window[window] for window in model.layer_windows]
    return pages if model.draft is None else [*pages[:-1], pages[-1] + num_rows * own_pages(page_size)]


def draft_row_bytes(model: ModelSpec, page_size: int, itemsize: int, kv_itemsize: int) -> int:
    """The bytes that a request row has for drafts of the model itself: hidden states, and pages of its own."""
    if model.draft is None:
        return 0
    own_bytes = own_pages(page_size) * page_size * model.kv_shapes[-1].numbers * kv_itemsize
    return HIDDEN_KEPT * model.hidden_size * itemsize + own_bytes
