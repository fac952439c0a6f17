"""Sizes that the scheduler shares with the kernels, in a file of their own so that the scheduler loads no JAX."""

QUERY_TILE = 64
"""The most packed tokens in a query tile, all of one request."""
SHORT_TILE = 16
"""The most tokens in a short query tile, which a request with drafts brings."""
GROUP_TILE = 16
"""The most requests in a group tile. With the query heads of one key-value head they fill a matmul."""
MIN_GROUP = 4
"""The least requests that must share a prefix for a group."""
MIN_SHARED_TOKENS = 256
"""The least tokens that they must share."""
LANES = 128
"""The numbers of a row in a tile of a TPU's memory, and in a row of its vector registers."""
MAX_POOL_ELEMENTS = 2**31
"""The most numbers in an array of the KV pool that 32-bit offsets reach. The kernels for NVIDIA use 64-bit offsets
above 2^32 bytes, which is too late for numbers of one byte."""
