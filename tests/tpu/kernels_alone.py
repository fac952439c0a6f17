"""Compiles kernels for TPUs alone and prints their loops as JSON: `python -m tests.tpu.kernels_alone FOLDER CASES`.

It is a process of its own, because libtpu reads its flags, of which the folder of a dump is one, once.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from bench.tpu.program import loops
from jsg.cache.pool import make_pool
from jsg.engine.device.tpus import mesh_of
from jsg.kernels_pallas import tpu, tpu_write
from jsg.kernels_pallas.inputs import Scoring

NUM, PAGES = 64, 1000


def attention(size: int, table: Any, pool: Any, queries: Any, of_tiles: Any, end: Any) -> Any:
    """Of tiles of one size."""
    tiles = tpu.Tiles(of_tiles, of_tiles, of_tiles, of_tiles, 0, end)
    return tpu._attend(None, queries, pool, table, end, tiles, size, scoring=Scoring(0.1), sinks=None)


def compile_one(target: str, size: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    """Attention of tiles of this size, or the write if the size is 0."""
    mesh = mesh_of(target)

    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    kv_shapes, type_of = [(kv_heads, head_dim)], jnp.dtype(dtype)
    made = jax.eval_shape(lambda: make_pool(kv_shapes, PAGES, tpu.PAGE_SIZE, type_of, is_by_head=True)).layers[0][0]
    pool = shape(*made.shape, dtype=type_of)
    function: Callable[..., Any] = tpu_write._write  # the entries of `ops` would rotate too, and have several launches
    arguments: tuple[Any, ...] = pool, shape(NUM), shape(NUM, *made.shape[1:3], made.shape[4], dtype=type_of)
    if size:
        queries = shape(NUM * size, heads, head_dim, dtype=jnp.bfloat16)
        function, arguments = (
            jax.tree_util.Partial(attention, size),
            (shape(NUM, 128), pool, queries, shape(NUM), shape()),
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function, donate_argnums=() if size else 0).lower(*arguments).compile()


def main(folder: Path, cases: list[list[Any]]) -> None:
    """Compiles each case and prints the depth and the bundles of each loop of its kernel."""
    for case in cases:
        compile_one(*case)
        (file,) = filter(
            re.compile(r".*/\d+-(attention_of|write_by_head).*-\d+-final_bundles.txt").match, map(str, folder.iterdir())
        )
        print(
            json.dumps([(loop.depth, loop.bundles) for loop in loops(Path(file).read_text(errors="replace"))]),
            flush=True,
        )
        for each in folder.iterdir():
            each.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
