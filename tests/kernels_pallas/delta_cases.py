"""Steps of the gated delta rule, and its definition token by token in float64."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, ScanWeights, StateCache

SLOTS = 8
EPS = 1e-3
STEPS = (0.2, 1.5)
"""Of a selective scan; some steps are outside."""


class Run(NamedTuple):
    """A piece: its tokens, its slots, and the position of its first token, which the state may know."""

    length: int
    source: int = 0
    target: int = 1
    position: int = 0
    is_known: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a layer and the pieces of a step."""

    name: str
    runs: tuple[Run, ...]
    heads: int = 2
    group: int = 2
    keys: int = 16
    values: int = 32
    dtype: str = "float32"
    padding: int = 3
    is_apart: bool = False
    has_delta: bool = True


PROMPTS = (Run(70), Run(1, 2, 2, 9), Run(3, 3, 4, 2), Run(5, 0, 5, 0), Run(0))
ROWS = (
    Run(1, 6, 6, 0, is_known=True),
    Run(1, 1, 1, 5),
    Run(1, 2, 2, 0),
    Run(1, 3, 4, 1),
    Run(1, 3, 5, 64),
    Run(0),
    Run(0),
)
KNOWN = (
    Run(2, 6, 6, 0, is_known=True),
    Run(1, 1, 1, 4, is_known=True),
    Run(6, 2, 3, 2, is_known=True),
    Run(130, 4, 5, 1, is_known=True),
)
CASES = (
    Case("prompts", PROMPTS),
    Case("rows", ROWS, padding=2),
    Case("known", KNOWN, heads=1, group=3),
    Case("bfloat16", PROMPTS, dtype="bfloat16", group=1, values=16),
    Case("nothing", (Run(0), Run(0))),
    Case("scan", PROMPTS, has_delta=False),
    Case("scanned rows", ROWS, padding=2, has_delta=False, values=48),
    Case("scan of known", KNOWN, heads=1, group=3, has_delta=False),
    Case("scan in bfloat16", PROMPTS, dtype="bfloat16", group=1, values=16, has_delta=False),
    Case("wide", (Run(2, 1, 1, 7), Run(66)), heads=1, keys=128, values=128),
    Case("prompts by channel", PROMPTS, keys=32, values=16, is_apart=True),
    Case("rows by channel", ROWS, padding=2, dtype="bfloat16", is_apart=True),
    Case("known by channel", KNOWN, group=1, is_apart=True),
    Case("wide by channel", (Run(2, 1, 1, 7), Run(66)), heads=1, group=1, keys=128, values=128, is_apart=True),
)


class Arrays(NamedTuple):
    """A case made into arguments. Slots from which nobody may read hold NaN."""

    joint: jnp.ndarray
    raw_gates: jnp.ndarray
    weights: DeltaWeights | ScanWeights
    cache: StateCache
    pieces: Pieces
    apart: GatesApart | None = None


def make(case: Case, *, decay: float = 1.0) -> Arrays:
    """Random tensors, made in NumPy: JAX would compile a program for each operation and shape."""
    rng = np.random.default_rng(len(case.name))
    heads, mixed = case.heads * case.group, 2 * case.keys + case.group * case.values
    total = sum(run.length for run in case.runs) + case.padding

    def drawn(*shape: int, dtype: str = case.dtype) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))

    def normal(*shape: int, dtype: str = case.dtype) -> jnp.ndarray:
        return jax.device_put(drawn(*shape, dtype=dtype))

    lens = np.array([run.length for run in case.runs])
    columns = [np.cumsum(lens) - lens, lens, *zip(*(run[1:] for run in case.runs), strict=True)]
    read = sorted({run.source for run in case.runs if run.length and (run.position or run.is_known)})

    def slots(*shape: int, dtype: str) -> jnp.ndarray:
        is_read = np.isin(np.arange(SLOTS), read).reshape(-1, *[1] * len(shape))
        return jax.device_put(np.where(is_read, drawn(SLOTS, *shape, dtype=dtype), jnp.dtype(dtype).type(np.nan)))

    inputs = slots(4, case.heads, mixed, dtype=case.dtype)
    cache = StateCache(inputs, slots(heads, case.values, case.keys, dtype="float32"))
    weights = DeltaWeights(
        taps=jax.device_put(drawn(4, case.heads, mixed) / jnp.dtype(case.dtype).type(2)),
        decay_rate=jax.device_put(np.float32(decay) * drawn(heads, dtype="float32")),
        decay_bias=normal(heads, *([case.keys] if case.is_apart else []), dtype="float32"),
        norm=normal(case.values, dtype="float32"),
        eps=EPS,
    )
    if not case.has_delta:
        of_heads = (normal(heads, dtype="float32") for _ in range(3))
        weights = ScanWeights(weights.taps, *of_heads, normal(case.heads, mixed), STEPS)
    pieces, gates = Pieces(*(jax.device_put(np.asarray(c, np.int32)) for c in columns)), case.group * case.values
    joint = normal(total, case.heads, mixed + (0 if case.is_apart else gates))
    raw = normal(total, case.heads, case.group * (1 if case.is_apart or not case.has_delta else 2))
    if not case.is_apart:
        return Arrays(joint, raw, weights, cache, pieces)
    apart = GatesApart(*(normal(total, case.heads, width) for width in (case.group * case.keys, gates)))
    return Arrays(joint, raw, weights, cache, pieces, apart)


def convolution(x: np.ndarray, taps: np.ndarray, inputs: np.ndarray, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """The causal convolution of each channel, zero for tokens in no piece, and the inputs after a step."""
    out, left, count = np.zeros(x.shape), inputs.copy(), len(taps)
    for start, length, source, target, position, _ in np.array(pieces).T:
        before = [inputs[source, p % count] for p in range(max(position - count, 0), position)]
        seen = np.stack([*[np.zeros_like(x[0])] * (count - len(before)), *before, *x[start : start + length]])
        for token in range(length):
            out[start + token] = np.sum(seen[token + 1 : token + 1 + count] * taps, axis=0)
        for back in range(count if length else 0):
            left[target, (position + length - 1 - back) % count] = seen[-1 - back]
    return out, left


def definition(arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, inputs and states after a step."""
    joint, raw, taps, inputs, states = (
        np.array(x, np.float64) for x in (arrays.joint, arrays.raw_gates, arrays.weights.taps, *arrays.cache)
    )
    rate, bias, scale = (np.asarray(x, np.float64) for x in arrays.weights[1:4])
    apart = None if arrays.apart is None else [np.asarray(x, np.float64) for x in arrays.apart]
    _, all_heads, values, keys = states.shape
    group, mixed = all_heads // joint.shape[1], taps.shape[2]
    out, given = np.zeros((len(joint), all_heads, values)), states.copy()
    convolved, inputs = convolution(joint[..., :mixed], taps, inputs, arrays.pieces)
    if isinstance(arrays.weights, ScanWeights):
        convolved += np.asarray(arrays.weights.bias, np.float64)
    convolved = _silu(convolved)
    for start, length, source, target, position, is_known in np.array(arrays.pieces).T:
        if not length:
            continue
        state = given[source] if position or is_known else np.zeros_like(given[0])
        for token in range(start, start + length):
            for head in range(all_heads):
                k_head, member = divmod(head, group)
                query, key = (convolved[token, k_head, i * keys : (i + 1) * keys] for i in range(2))
                value = convolved[token, k_head, 2 * keys + member * values :][:values]
                if isinstance(arrays.weights, ScanWeights):
                    step = np.clip(np.logaddexp(0, raw[token, k_head, member] + bias[head]), *STEPS)
                    if token > start or not is_known:
                        state = state.copy()
                        state[head] = state[head] * np.exp(-np.exp(rate[head]) * step) + step * np.outer(value, key)
                    out[token, head] = state[head] @ query + scale[head] * value
                    continue
                query, key = (x / np.sqrt(x @ x + 1e-6) for x in (query, key))
                if token > start or not is_known:
                    if apart is None:
                        says = raw[token, k_head, group + member]
                    else:
                        says = apart[0][token, k_head, member * keys :][:keys]
                    decay = np.exp(-np.exp(rate[head]) * np.logaddexp(0, says + bias[head]))
                    strength = 1 / (1 + np.exp(-raw[token, k_head, member]))
                    state = state.copy()
                    state[head] *= decay
                    state[head] += strength * np.outer(value - state[head] @ key, key)
                y = state[head] @ query * keys**-0.5
                if apart is None:
                    gate = _silu(joint[token, k_head, mixed + member * values :][:values])
                else:
                    gate = 1 / (1 + np.exp(-apart[1][token, k_head, member * values :][:values]))
                out[token, head] = y / np.sqrt(y @ y / values + EPS) * scale * gate
        states[target] = state
    return out, inputs, states


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
