"""Sizes that the scheduler shares with the kernels; here alone, so that the scheduler loads no JAX."""

QUERY_TILE = 64
"""Packed tokens of one request in a query tile, at most."""
SHORT_TILE = 16
"""Tokens of a short query tile, at most: what a request with drafts brings."""
GROUP_TILE = 16
"""Requests in a group tile, at most: together with the query heads of one key-value head they fill a matmul."""
MIN_GROUP = 4
"""Requests that must share a prefix before a pass of its own pays."""
MIN_SHARED_TOKENS = 256
"""Tokens that they must share."""
MAX_POOL_ELEMENTS = 2**31
"""Numbers in an array of the KV pool that 32-bit offsets reach. The kernels for NVIDIA take 64-bit ones above 2^32
bytes, which is late where a number is one byte."""
