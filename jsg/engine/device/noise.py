"""Random numbers as a pure function of (seed, output index, vocabulary id): Threefry-2x32 as a counter-based generator.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the request's seed, and
the counter is the pair (output index, vocabulary id). In the paper thirteen rounds are the fewest that pass BigCrush.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
ROUNDS = 13
PARITY = 0x1BD11BDA

Words = tuple[UInt[Array, "..."], UInt[Array, "..."]]
"""Two arrays of 32-bit words, which broadcast with other words."""


def threefry(key: Words, counter: Words) -> Words:
    """Threefry-2x32-13: two random words from a two-word key and a two-word counter, elementwise."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(ROUNDS):
        x = x + y
        y = ((y << ROTATIONS[i % 8]) | (y >> (32 - ROTATIONS[i % 8]))) ^ x
        if i % 4 == 3:
            step = i // 4 + 1
            x = x + keys[step % 3]
            y = y + keys[(step + 1) % 3] + jnp.uint32(step)
    return x, y


def gumbel(
    seeds: UInt[Array, "R 2"], output_index: Int[Array, " R"], vocab: int, first: Array | int = 0
) -> Float[Array, "R {vocab}"]:
    """Standard Gumbel noise for each row and `vocab` vocabulary ids, the first of which is `first`."""
    key = (seeds[:, 0, None], seeds[:, 1, None])
    ids = jnp.arange(vocab, dtype=jnp.uint32) + jnp.uint32(first)
    counter = (output_index[:, None].astype(jnp.uint32), ids[None])
    bits, _ = threefry(key, counter)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
