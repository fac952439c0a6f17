"""The kernels without a model around them: whether their results are right, and how fast attention reads the pool."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention_cases, attention_check
from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from jsg.kernels_pallas import ops, tuning
from jsg.kernels_pallas.inputs import AttentionInputs, PrefixGroups
from jsg.kernels_pallas.reference_penalties import Penalties
from jsg.kernels_pallas.reference_threshold import sortable
from jsg.kernels_pallas.tile import GROUP_TILE, MIN_GROUP

MAX_DIFFERING_ROWS = 0.02
"""The fraction of rows whose kept tokens may differ. The kernel adds up probabilities for top-p in another order, so a
row may end one token earlier or later."""
CASES_OF_ALL = ("decode", "mixed")
"""The cases that are checked for every model and type; other cases only for the plan's heads and type."""
QUEUED_BYTES = 32 * 2**30
"""The bytes of keys and values read between two readings of the clock. They take so many queued programs that the time
to start one is hidden."""
COLD_BYTES = 2**30
"""The bytes of different keys and values that a chain of calls reads. They are far more than fit in the device's
caches."""


def check(part: Part) -> None:
    """Checks `ops.paged_attention` against float64 for the cases of the table, then the other kernels."""
    plan, shape = part.plan, part.plan.shape
    own = f"{shape['num_attention_heads']}/{shape['num_key_value_heads']}/{shape['head_dim']}"
    heads = {own: (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])}
    heads |= {name: attention_cases.MODELS[name] for name in plan.check_models}
    correctness = Correctness(part)
    _note_card(part)

    def one(name: str, case: attention_cases.Case, dtype: str, sizes: tuple[int, int, int]) -> None:
        found = attention_check.largest_error(case, dtype, heads=sizes[0], kv_heads=sizes[1], head_dim=sizes[2])
        correctness.add(f"attention error, {name}", found, MAX_ERROR[dtype], ops.ATTENTION)

    for model, sizes in heads.items():
        for dtype in dict.fromkeys((plan.dtype, "float32")):
            for case in attention_check.BATCHES:
                is_asked = case.name in (plan.checks or [case.name])
                is_first = model == own and dtype == plan.dtype
                if is_asked and (is_first or case.name in CASES_OF_ALL):
                    name = f"{case.name} {model}, {dtype}"
                    run = functools.partial(one, name, case, dtype, sizes)
                    # If only other models' heads do not compile, this model need not be computed by plain jnp.
                    part.attempt(f"attention, {name}", run, op=ops.ATTENTION if is_first else None)
    for dtype in dict.fromkeys((plan.dtype, "float32")):
        run = functools.partial(_check_write, correctness, dtype, heads[own])
        op = "rotate_and_write"
        part.attempt(f"{op}, {dtype}", run, op=op if dtype == plan.dtype else None)
    part.attempt("top-k and top-p", functools.partial(_check_threshold, part, correctness), op="kept_threshold")
    part.attempt("penalties", functools.partial(_check_penalties, part, correctness), op="penalised")
    part.attempt("best tokens", functools.partial(_check_top, part, correctness), op="top_logits")
    correctness.end()


def _note_card(part: Part) -> None:
    """Sends what a failure of a kernel has to name: the card's compute capability, and the file of block sizes."""
    capability = tuning.target_capability()
    if capability is not None:
        sizes = f"jsg/kernels_pallas/tuning/{tuning.class_of(capability).name}.json"
        part.header(compute_capability="{}.{}".format(*capability), block_sizes=sizes)


def _check_write(correctness: Correctness, dtype: str, sizes: tuple[int, int, int]) -> None:
    """Compares the kernel with plain `jnp` on the same device: rotated queries, and the pool after the write."""
    heads, kv_heads, head_dim = sizes
    count, page_size = 70, 16
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = jax.random.normal(keys[0], (count, kv_heads, (heads // kv_heads + 2) * head_dim), dtype)
    angles = jax.random.uniform(keys[1], (count, head_dim // 2), maxval=6.0)
    slots = jnp.asarray(np.r_[0, np.random.default_rng(0).permutation(160)[: count - 1] + page_size], jnp.int32)
    sides = (jax.random.normal(key, (11, page_size, kv_heads, head_dim), dtype) for key in keys[2:])
    cache = attention_cases.cache_of(*sides, is_by_head=ops.is_pool_by_head(jax.default_backend()))
    write = jax.jit(ops.rotate_and_write, static_argnames=("implementation",))
    found, expected = (
        write(qkv, jnp.cos(angles), jnp.sin(angles), slots, cache, implementation=name) for name in (None, "reference")
    )
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    error = max(float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))) for a, b in pairs)
    correctness.add(f"rotate_and_write error, {dtype}", error, MAX_ERROR[dtype], "rotate_and_write")


def _logits(part: Part) -> jax.Array:
    shape = (max(part.plan.sampling_rows), part.plan.shape["vocab_size"])
    return 3 * jax.random.normal(jax.random.key(0), shape)


def _check_threshold(part: Part, correctness: Correctness) -> None:
    """Checks over a whole vocabulary in how many rows kernel and plain `jnp` keep other tokens."""
    logits = _logits(part)
    rows = len(logits)
    ones = jnp.ones(rows)
    fields = (logits, ones, jnp.full(rows, 50, jnp.int32), 0.9 * ones)
    find = jax.jit(ops.kept_threshold, static_argnames=("implementation",))
    found, expected = (
        np.asarray(sortable(logits) >= find(*fields, implementation=name)[0][:, None]) for name in (None, "reference")
    )
    differing = float(np.mean(np.any(found != expected, axis=-1)))
    name = "rows of which top-k and top-p keep other tokens"
    correctness.add(name, differing, MAX_DIFFERING_ROWS, "kept_threshold")


def _check_penalties(part: Part, correctness: Correctness) -> None:
    """Compares penalised logits with plain `jnp` on the same device; of every second row the tables do not count."""
    logits = _logits(part)
    rows, vocab = logits.shape
    ones, own = jnp.ones(rows), jnp.arange(rows)
    counts, bias = jnp.tile(jnp.arange(vocab) % 7, (rows + 1, 1)), jnp.ones((rows + 1, vocab))
    penalties = Penalties(rows - own, own % 2 == 0, 1.5 * ones, 0.1 * ones, 0.3 * ones)
    change = jax.jit(ops.penalised, static_argnames=("implementation",))
    found, expected = (change(logits, counts, bias, penalties, implementation=name) for name in (None, "reference"))
    error = float(jnp.max(jnp.abs(found - expected)))
    correctness.add("penalties error", error, MAX_ERROR["float32"], "penalised")


def _check_top(part: Part, correctness: Correctness) -> None:
    """Checks over a whole vocabulary that kernel and plain `jnp` find the same best tokens."""
    logits = _logits(part)
    best = jax.jit(ops.top_logits, static_argnums=1, static_argnames=("implementation",))
    found, expected = (np.asarray(best(logits, 20, implementation=name)[1]) for name in (None, "reference"))
    correctness.add("best tokens that are others", float(np.mean(found != expected)), 0.0, "top_logits")


def measure(part: Part) -> None:
    """Measures gigabytes of keys and values per second that the attention of one layer reads in a decode step."""
    plan = part.plan
    for page_size in plan.page_sizes:
        layer, is_first = _Layer(part, page_size), page_size == plan.page_sizes[0]
        for context in plan.attention_contexts if is_first else _extremes(plan.attention_contexts):
            for rows in plan.attention_batches if is_first else _extremes(plan.attention_batches):
                name = f"attention B={rows} ctx {context} page {page_size}"
                part.attempt(name, functools.partial(_measure_decode, part, layer, name, rows, context))
        if is_first and jax.default_backend() != "tpu":  # no kernel reads a shared prefix once there
            part.attempt("cascade", functools.partial(_measure_cascade, part, layer))


def _extremes(values: Sequence[int]) -> list[int]:
    return sorted({min(values), max(values)})


class _Layer:
    """The KV pool of one layer, large enough for the largest case, and queries for it."""

    def __init__(self, part: Part, page_size: int):
        plan, shape = part.plan, part.plan.shape
        self.page_size = page_size
        self.heads, self.head_dim = shape["num_attention_heads"], shape["head_dim"]
        longest = max(*plan.attention_contexts, plan.context, plan.shared_context + page_size)
        num_tokens = max(plan.attention_batches) * -(-longest // page_size) * page_size
        self.num_pages = num_tokens // page_size
        pool = (self.num_pages + 1, page_size, shape["num_key_value_heads"], self.head_dim)
        # One random page is repeated, because making more random numbers would take longer than reading them.
        page = jax.random.normal(jax.random.key(0), (1, *pool[1:]), plan.dtype)
        one = attention_cases.cache_of(page, page, is_by_head=ops.is_pool_by_head(jax.default_backend()))
        self.cache = tuple(jnp.broadcast_to(each, (pool[0], *each.shape[1:])) for each in one)
        self.token_bytes = 2 * pool[2] * pool[3] * plan.itemsize
        self.dtype = plan.dtype

    def page_tables(self, rows: int, context: int, shared: int = 0) -> list[jax.Array]:
        """Page tables with different shuffled pages. The first `shared` tokens of all rows are in the same pages."""
        columns = -(-context // self.page_size)
        count = max(1, min(self.num_pages // (rows * columns), COLD_BYTES // (rows * context * self.token_bytes) + 1))
        pages = 1 + np.random.default_rng(0).permutation(self.num_pages)[: count * rows * columns].astype(np.int32)
        tables = pages.reshape(count, rows, columns)
        tables[:, :, : shared // self.page_size] = tables[:, :1, : shared // self.page_size]
        return [jnp.asarray(np.concatenate([np.zeros((1, columns), np.int32), table])) for table in tables]

    def time(
        self,
        part: Part,
        tables: Sequence[jax.Array],
        rows: int,
        context: int,
        groups: PrefixGroups | None = None,
    ) -> list[float]:
        """Microseconds of one call of attention, from programs of many calls that each depend on the call before."""
        num_bytes = rows * context * self.token_bytes
        length = max(1, min(part.plan.attention_calls, QUEUED_BYTES // num_bytes))
        num_queued = max(1, min(2 * part.plan.attention_calls, QUEUED_BYTES // (length * num_bytes)))
        program = jax.jit(functools.partial(_attend_repeatedly, length=length, scale=self.head_dim**-0.5))
        queries = jax.random.normal(jax.random.key(1), (rows, self.heads, self.head_dim), self.dtype)
        kv_lens = jnp.full(rows, context, jnp.int32)

        def run() -> None:
            outs = [program(queries, self.cache, list(tables), kv_lens, groups) for _ in range(num_queued)]
            outs[-1].block_until_ready()

        return [ms * 1e3 / (length * num_queued) for ms in part.time(run, budget_s=2)]


def _attend_repeatedly(
    queries: jax.Array,
    cache: tuple[jax.Array, ...],
    tables: Sequence[jax.Array],
    kv_lens: jax.Array,
    groups: PrefixGroups | None,
    *,
    length: int,
    scale: float,
) -> jax.Array:
    none = jnp.zeros(0, jnp.int32)
    for index in range(length):
        inputs = AttentionInputs(
            page_table=tables[index % len(tables)],
            single_rows=jnp.arange(1, len(queries) + 1, dtype=jnp.int32),
            single_kv_lens=kv_lens,
            tile_rows=none,
            tile_starts=none,
            tile_lens=none,
            tile_positions=none,
            num_tiles=jnp.int32(0),
            groups=groups,
        )
        queries = ops.paged_attention(queries, cache, inputs, scale=scale)
    return queries


def _measure_decode(part: Part, layer: _Layer, name: str, rows: int, context: int) -> None:
    samples = layer.time(part, layer.page_tables(rows, context), rows, context)
    num_bytes = rows * context * layer.token_bytes
    rates = [num_bytes / 1e3 / us for us in samples]
    flops = 4 * rows * context * layer.heads * layer.head_dim
    facts: dict[str, Any] = {"rows": rows, "context": context, "page_size": layer.page_size}
    facts |= {"ms": min(samples) / 1e3, "num_bytes": num_bytes, "num_flops": flops}
    if part.rates is not None:
        facts |= {"floor": part.rates[0] / 1e9, "of_floor": max(rates) * 1e9 / part.rates[0]}
    part.add(name, "GB/s", rates, kind="attention", **facts)


class _Sharing(NamedTuple):
    """How rows share a prefix in the figure of this name. `has_groups` says whether attention gets groups."""

    name: str
    has_groups: bool
    is_shared: bool


def _measure_cascade(part: Part, layer: _Layer) -> None:
    """Measures a decode step's attention with all rows in one group, without groups, and with unused tiles."""
    plan = part.plan
    rows, context, shared = max(plan.attention_batches), plan.context, plan.shared_context
    context = max(context, shared + layer.page_size)
    tables = layer.page_tables(rows, context, shared)
    best: dict[str, float] = {}
    for case in (
        _Sharing("plain", False, False),
        _Sharing("nothing shared", True, False),
        _Sharing("shared", True, True),
    ):
        groups = _groups(rows, shared if case.is_shared else 0) if case.has_groups else None
        samples = layer.time(part, tables, rows, context, groups)
        best[case.name] = min(samples)
        facts = {"times_plain": min(samples) / best["plain"], "rows": rows, "context": context, "shared": shared}
        name = f"attention B={rows} ctx {context}, {shared} of them shared, cascade: {case.name}"
        part.add(name, "us", samples, kind="attention-cascade", case=case.name, **facts)


def _groups(rows: int, shared: int) -> PrefixGroups:
    """All rows in one group. If `shared` is 0, the same room without a group in it."""
    num_tiles = max(rows // MIN_GROUP, -(-rows // GROUP_TILE))
    members = np.full((num_tiles, GROUP_TILE), -1, np.int32)
    lens = np.zeros(num_tiles, np.int32)
    group_rows = np.zeros(num_tiles, np.int32)
    if shared:
        used = -(-rows // GROUP_TILE)
        flat = members[:used].reshape(-1)
        flat[:rows] = np.arange(rows)
        members[:used] = flat.reshape(used, GROUP_TILE)
        lens[:used], group_rows[:used] = shared, 1
    arrays = (np.full(rows, shared, np.int32), group_rows, lens, members)
    return PrefixGroups(*(jnp.asarray(array) for array in arrays))


def prefill(part: Part) -> None:
    """Compares the ways to compute attention of a chunk, with cached tokens before it and without."""
    from bench import prefill_attention  # imports Pallas

    shape = part.plan.shape
    sizes = {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    for length, cached in itertools.product(part.plan.chunks, part.plan.cached):
        title = f"attention of a chunk, T={length} after {cached}"

        def one(length: int = length, cached: int = cached, title: str = title) -> None:
            kinds = {"cached": cached, "head_dim": shape["head_dim"]} | sizes
            for name, samples in prefill_attention.measure(length, part.plan.dtype, **kinds).items():
                facts = {"kind": "attention-prefill", "implementation": name, "length": length, "cached": cached}
                part.add(f"{title}, {name}", "ms", samples, **facts)

        part.attempt(title, one)
