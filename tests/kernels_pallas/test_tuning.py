"""Block sizes are data: complete, dated, found by class of cards and rows, and smaller where a card has less memory."""

import datetime
import functools
import importlib.resources
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import attention_block, cascade, grouped_matmul, paged_decode, ragged_paged_attention, tuning
from jsg.kernels_pallas.tuning import FALLBACK, class_of, fitting, sizes_for

FILES = sorted((Path(str(importlib.resources.files("jsg.kernels_pallas"))) / "tuning").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_what_it_is_for_and_has_sizes_for_any_number_of_rows(file: Path):
    content = json.loads(file.read_text("utf-8"))
    assert content["capabilities"] and content["how"]
    datetime.date.fromisoformat(content["date"])
    for entries in content["kernels"].values():
        rows = [entry["rows"] for entry in entries]
        assert rows[0] == 0
        assert rows == sorted(set(rows))


def test_takes_the_entry_for_the_most_rows_that_are_not_more():
    entries = json.loads((FILES[0].parent / "sm_90.json").read_text("utf-8"))["kernels"]["paged_decode"]
    for entry, following in itertools.pairwise(entries):
        for rows in (entry["rows"], following["rows"] - 1):
            assert sizes_for("paged_decode", rows=rows, capability=(9, 0)) | {"rows": entry["rows"]} == entry


def test_every_file_has_sizes_of_the_same_kernels():
    first, *others = (json.loads(file.read_text("utf-8"))["kernels"] for file in FILES)
    assert others and all(other.keys() == first.keys() for other in others)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_86"),
        ((11, 0), FALLBACK),
        (None, FALLBACK),
    ],
)
def test_a_class_has_cards_of_some_capabilities_and_others_share_a_file(capability, name: str):
    assert class_of(capability).name == name
    assert class_of(capability).shared_bytes >= class_of(None).shared_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_sizes_are_those_that_the_kernels_take(dtype: str):
    keys = jnp.zeros((2, 1, 1, 64), dtype)
    for rows in (1, 8, 64, 256):
        queries = jnp.zeros((rows, 4, 64), jnp.bfloat16)
        sizes = cascade.default_sizes(rows, queries, keys)
        assert sizes.rest == paged_decode.default_sizes(queries, keys)
        for part in (sizes, sizes.rest):
            assert part.block_k % 16 == 0
            assert part.splits >= 1


def with_memory(monkeypatch: pytest.MonkeyPatch, shared_bytes: int) -> None:
    """A card with so much shared memory."""
    card = class_of(None)._replace(shared_bytes=shared_bytes)
    monkeypatch.setattr(tuning, "class_of", lambda _: card)


def test_what_does_not_fit_gets_smaller_blocks_and_then_fewer_stages(monkeypatch: pytest.MonkeyPatch):
    best = paged_decode.Sizes(splits=4, block_k=64, num_warps=4, num_stages=3)
    found = []
    for shared_bytes in (192, 191, 48, 47):
        with_memory(monkeypatch, shared_bytes)
        sizes = fitting(best, lambda sizes: sizes.block_k * sizes.num_stages)
        found.append((sizes.block_k, sizes.num_stages))
    assert found == [(64, 3), (32, 3), (16, 3), (16, 2)]
    with_memory(monkeypatch, 31)
    with pytest.raises(NotImplementedError, match="a program has 31 bytes of shared memory on this card, but needs 32"):
        fitting(best, lambda sizes: sizes.block_k * sizes.num_stages)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float8_e5m2"])
def test_attention_fits_on_every_card_with_heads_of_any_size(file: Path, stored: str, monkeypatch: pytest.MonkeyPatch):
    """Of up to 32 query heads for a key-value head."""
    major, minor = json.loads(file.read_text("utf-8"))["capabilities"][0].split(".")
    monkeypatch.setattr(tuning, "target_capability", lambda: (int(major), int(minor)))
    most = class_of(tuning.target_capability()).shared_bytes
    dtype = jnp.float32 if stored == "float32" else jnp.bfloat16
    for head_dim, group in itertools.product((16, 64, 80, 128, 256), (1, 4, 8, 32)):
        queries = jax.device_put(np.zeros((64, 2 * group, head_dim), dtype))
        keys = jax.device_put(np.zeros((1, 1, 2, head_dim), jnp.dtype(stored)))
        sizes = cascade.default_sizes(64, queries, keys)
        ragged = ragged_paged_attention.default_sizes(queries, keys)
        for rows, cut in ((cascade.rows_of(queries, keys), sizes), (group, sizes.rest), (ragged.block_m, ragged)):
            rows = attention_block.padded_rows(rows)
            assert attention_block.shared_bytes(rows, cut.block_k, cut.num_stages, queries, keys) <= most
    for rows in (16, 512, 8192):
        cut = grouped_matmul.default_sizes(rows, 8, jnp.dtype(dtype), jnp.dtype(stored))
        assert grouped_matmul.shared_bytes(cut, jnp.dtype(dtype), jnp.dtype(stored)) <= most


def test_groups_of_as_many_rows_have_the_same_blocks():
    """However many groups there are; with fewer than were measured, the rows count."""
    one = functools.partial(grouped_matmul.default_sizes, dtype=jnp.dtype("bfloat16"), stored=jnp.dtype("bfloat16"))
    assert one(16 * 512, 128) == one(512, 8) == one(512, 2) != one(16 * 512, 8)
