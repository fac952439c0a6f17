"""Block sizes are data: complete, dated, and found by device and rows."""

import datetime
import importlib.resources
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jsg.kernels_pallas import cascade, paged_decode
from jsg.kernels_pallas.tuning import OTHER, sizes_for

FILES = sorted((Path(str(importlib.resources.files("jsg.kernels_pallas"))) / "tuning").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_what_it_is_for_and_has_sizes_for_any_number_of_rows(file: Path):
    content = json.loads(file.read_text("utf-8"))
    assert bool(content["devices"]) == (file.stem != OTHER)
    assert content["how"]
    datetime.date.fromisoformat(content["date"])
    for entries in content["kernels"].values():
        rows = [entry["rows"] for entry in entries]
        assert rows[0] == 0
        assert rows == sorted(set(rows))


def test_takes_the_entry_for_the_most_rows_that_are_not_more():
    entries = json.loads((FILES[0].parent / "sm_90.json").read_text("utf-8"))["kernels"]["paged_decode"]
    for entry, following in itertools.pairwise(entries):
        for rows in (entry["rows"], following["rows"] - 1):
            assert sizes_for("paged_decode", rows=rows, device="NVIDIA H200") | {"rows": entry["rows"]} == entry


def test_every_file_has_sizes_of_the_same_kernels():
    first, *others = (json.loads(file.read_text("utf-8"))["kernels"] for file in FILES)
    assert others and all(other.keys() == first.keys() for other in others)


def test_a_device_is_named_by_a_beginning_of_its_name_and_others_share_a_file():
    def sizes(device: str | None) -> dict[str, int]:
        return sizes_for("grouped_matmul", rows=8192, device=device)

    assert sizes("NVIDIA H100 80GB HBM3") == sizes("NVIDIA H200") != sizes("NVIDIA L4")
    assert sizes("NVIDIA L4") == sizes("cpu") == sizes(None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_sizes_are_those_that_the_kernels_take(dtype: str):
    keys = jnp.zeros((2, 1, 1, 64), dtype)
    for rows in (1, 8, 64, 256):
        sizes = cascade.default_sizes(rows, rows, keys)
        assert sizes.rest == paged_decode.default_sizes(rows, keys)
        for part in (sizes, sizes.rest):
            assert part.block_k % 16 == 0
            assert part.splits >= 1
