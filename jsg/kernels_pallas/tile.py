"""A size that the scheduler shares with the kernels; here alone, so that the scheduler loads no JAX."""

QUERY_TILE = 64
"""Packed tokens of one request in a query tile, at most."""
