"""The regular expressions of the types of values that a program can ask for."""

from jsg.lang.words.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR, Dtype

__all__ = ["DTYPE_PATTERNS", "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR"]

DTYPE_PATTERNS: dict[Dtype, str] = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
"""The pattern that an answer of a type must match."""
