"""How the memory of the KV pool is shared out among layers with and without windows."""

import dataclasses
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.config import EngineConfig
from jsg.engine.device.memory import plan_memory
from jsg.engine.device.pool_sizes import PoolSizes, pool_sizes
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec
from jsg.window import Window
from tests.models.specs import changed

GIB = 2**30
CONTEXT = 32_768
PUBLISHED = {  # layers that see all, others, their window, key-value heads, width, bytes of all, bytes with windows
    "Gemma 3 27B": (10, 52, 1024, 16, 128, 15.50, 3.73),
    "gpt-oss-20b": (12, 12, 128, 8, 64, 1.50, 0.80),
}


def windowed(directory: pathlib.Path, windows: list[int | None], heads: int = 2, head_dim: int = 16) -> ModelSpec:
    """A model with these windows in its layers."""
    model = changed(read_spec(directory), attention={"heads": heads, "kv_heads": heads, "head_dim": head_dim})
    layer = model.layers[0]
    attentions = [dataclasses.replace(layer.attention, window=w and Window(w)) for w in windows]
    return dataclasses.replace(model, layers=tuple(dataclasses.replace(layer, attention=a) for a in attentions))


def sizes_of(model: ModelSpec, *, max_running: int = 1, context_length: int = CONTEXT, page_size: int = 16):
    fixed = {"num_devices": 1, "chunk": 2048, "max_running": max_running, "context_length": context_length}
    return pool_sizes(model, 2, page_size=page_size, **fixed)


def test_one_request_of_published_models_takes_what_the_formula_says(small_model: pathlib.Path):
    for num_full, num_windowed, window, heads, head_dim, of_all, expected in PUBLISHED.values():
        model = windowed(small_model, [None] * num_full + [window] * num_windowed, heads, head_dim)
        sizes = sizes_of(model)
        assert sizes.num_bytes(CONTEXT) / GIB == pytest.approx(expected, abs=0.005)
        assert model.kv_bytes_per_token(2) * CONTEXT / GIB == pytest.approx(of_all, abs=0.005)
        per_row = min(CONTEXT // 16, -(-(window - 1 + 2048) // 16) + 1)
        assert sizes.window_tokens(Window(window), CONTEXT) == per_row * 16


def test_each_sequence_has_its_window(small_model: pathlib.Path):
    sizes = sizes_of(windowed(small_model, [None, 128, 128, 128, 128]), max_running=8, page_size=1)
    assert sizes.window_tokens(Window(128), CONTEXT) == 8 * 128 + 2048, "no more of them than run"
    assert sizes.window_tokens(Window(128), 2 * CONTEXT) == (8 + CONTEXT // 512) * 128 + 2048, "others are cached"
    assert sizes.window_tokens(Window(128), 3 * 512) == 3 * 512, "a pool has no more than all tokens"
    assert dataclasses.replace(sizes, chunk=0).window_tokens(Window(128), 3 * 512 - 1) == 3 * 128, (
        "they are four windows long"
    )


@settings(max_examples=100)
@given(st.data())
def test_no_group_starves_whatever_the_options(data: st.DataObject):
    """All requests of the longest context that the other layers have room for have their windows.

    And of requests of any length, with one window, at least half as many run as if the pool were shared out for them.
    """
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    windows = data.draw(st.lists(st.integers(page_size, 500), min_size=1, max_size=3, unique=True))
    of_full = data.draw(st.integers(1, 20))
    sizes = PoolSizes(
        bytes_per_token={None: of_full} | {Window(w): data.draw(st.integers(1, 3 * of_full)) for w in windows},
        page_size=page_size,
        chunk=data.draw(st.integers(1, 3000)),
        max_running=data.draw(st.integers(1, 300)),
        context_length=data.draw(st.integers(max(windows) + 16, 20_000)),
    )
    tokens = sizes.tokens_in(num_bytes := data.draw(st.integers(0, 10**7)))
    pools = {pool.window.length: pool.tokens for pool in sizes.window_pools(tokens, num_bytes)}

    def running(length: int) -> int:
        """How many requests of a length run at a time, and one of them computes a chunk."""
        counts = [min(sizes.max_running, tokens // (-(-length // page_size) * page_size))]
        for window, there in pools.items():
            pages = min(-(-length // page_size), -(-(window - 1) // page_size) + 1)
            if there < tokens:
                counts.append(max(there // page_size - -(-sizes.chunk // page_size), 0) // pages)
        return min(counts)

    if tokens >= sizes.context_length:
        assert running(sizes.context_length) >= min(sizes.max_running, tokens // (sizes.context_length + page_size))
    assert sum(count * sizes.windows[Window(window)] for window, count in pools.items()) + tokens * of_full <= num_bytes
    if len(windows) == 1 and sum(sizes.windows.values()) <= 3 * of_full:  # else they are taken to be four windows long
        length = data.draw(st.integers(16, sizes.context_length))
        of_chunk = (sizes.chunk + 2 * page_size) * sum(sizes.windows.values())
        of_each = of_full * (length + page_size)
        of_each += sum(b * (min(length, w.length) + 2 * page_size) for w, b in sizes.windows.items())
        best = min(sizes.max_running, max(num_bytes - of_chunk, 0) // of_each)
        assert running(length) >= best // 2 - 2, (running(length), best)  # tokens and pages are whole


def test_the_most_tokens_for_some_bytes(small_model: pathlib.Path):
    for windows in ([None, 128, 128], [64, 128], [None, None]):
        sizes = sizes_of(windowed(small_model, windows), max_running=8)
        for num_bytes in (0, 10**5, 10**7, 10**8):
            tokens = sizes.tokens_in(num_bytes)
            assert sizes.num_bytes(tokens) <= num_bytes and tokens >= 0
            if None in windows:
                assert sizes.num_bytes(tokens + 16) > num_bytes
        assert sizes.tokens_in(-1) < 0


def test_what_is_left_goes_to_windows_for_the_cache():
    sizes = PoolSizes(
        bytes_per_token={None: 10, Window(100): 5}, page_size=1, chunk=100, max_running=2, context_length=8000
    )
    needed = sizes.num_bytes(8000)
    assert needed == 8000 * 10 + 300 * 5
    assert sizes.window_pools(8000, needed)[0].tokens == sizes.window_pools(8000, 0)[0].tokens == 300
    assert sizes.window_pools(8000, needed + 5 * 1000 + 4)[0].tokens == 1300
    assert sizes.window_pools(8000, 10**9)[0].tokens == 8000


def test_a_window_that_no_request_leaves_is_none(small_model: pathlib.Path):
    model = windowed(small_model, [64, None, 32, 64])
    assert model.for_context(65) == model
    assert model.page_groups == (None, Window(32), Window(64)) and model.layer_groups == (2, 0, 1, 2)
    assert model.for_context(64).page_groups == (None, Window(32)) and model.for_context(64).layer_groups == (
        0,
        0,
        1,
        0,
    )
    assert not any(model.for_context(32).layer_windows)
    assert windowed(small_model, [64, 64]).page_groups == (Window(64),)


@pytest.mark.parametrize("windows", [[None, 128, 128, 128], [128, 128]])
def test_the_plan_of_a_model_with_windows_has_room_for_more_tokens(small_model: pathlib.Path, windows: list):
    def plan(model: ModelSpec):
        return plan_memory(
            EngineConfig(),
            model,
            platform="gpu",
            limit_bytes=2 * GIB,
            page_size=16,
            kv_itemsize=2,
            weights_bytes=0,
            temporary_bytes=0,
            max_running=64,
            context_length=CONTEXT,
            chunk=2048,
        )

    heads, head_dim = 16, 128
    made = plan(windowed(small_model, windows, heads, head_dim))
    (pool,) = made.windows
    assert made.pool_tokens > 2 * plan(windowed(small_model, [None] * len(windows), heads, head_dim)).pool_tokens
    assert made.pool_bytes < made.limit_bytes and made.needed_bytes <= made.limit_bytes
    assert pool.window == Window(128) and pool.tokens < made.pool_tokens
    assert f"layers with a window of 128 for {pool.tokens}" in str(made)
