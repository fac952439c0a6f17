"""What can go wrong in a part, and how its kind is read from the text of an error. No JAX here."""

import dataclasses
import enum
import re

OPS_OF_KERNELS = {
    "decode": "paged_attention",
    "ragged": "paged_attention",
    "cascade": "paged_attention",
    "combine": "paged_attention",
    "rotate_and_write": "rotate_and_write",
    "expert_routes": "expert_routes",
    "grouped_matmul": "grouped_matmul",
    "token_threshold": "kept_threshold",
    "delta": "gated_delta",
    "attention_of": "paged_attention",
    "write_by_head": "rotate_and_write",
    "rotated": "rotate_and_write",
    "few_bits_matmul": "matmul",
    "kept_threshold": "kept_threshold",
    "penalised": "penalised",
    "gated": "gated",
}
"""The operation of `jsg.kernels_pallas.ops` that calls a kernel, by a part of the kernel's name."""

GONE = r"UNAVAILABLE|core halted|initialize backend 'tpu'|TPU is already in use"
"""Signs that a device does not answer any more, or belongs to another process."""


class Kind(enum.StrEnum):
    """Kinds of failures, each of which asks for something else."""

    COMPILE = "compile"
    WRONG = "wrong"
    MEMORY = "memory"
    HANG = "hang"
    CRASH = "crash"
    OTHER = "other"


SIGNS = (
    # What does not fit into a kernel's shared or vector memory is RESOURCE_EXHAUSTED too, so it comes first.
    (Kind.COMPILE, r"shared memory|memory space [vs]mem|Mosaic failed to compile"),
    (
        Kind.MEMORY,
        r"RESOURCE_EXHAUSTED|out of memory|OutOfMemory|MemoryError|bad_alloc|tokens, but memory is left",
    ),
    (Kind.COMPILE, r"CompileError|NotImplementedError|must compile for|cannot cast|ptxas|LoweringException"),
    (Kind.WRONG, r"ArithmeticError|AssertionError"),
    (Kind.CRASH, rf"exit status|ILLEGAL_ADDRESS|illegal memory access|CUDA_ERROR|DeviceLost|{GONE}"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Something that has no figure, or a wrong one.

    Attributes:
        kind: What kind of failure it is.
        reason: What failed, and the error, in one line.
        op: The operation whose kernel is the cause, if it is known.
    """

    kind: Kind
    reason: str
    op: str | None = None

    @classmethod
    def from_reason(cls, reason: str, op: str | None = None) -> "Failure":
        """The failure that a line describes. Its kind, and the operation if none is given, are read from the text."""
        kind = next((kind for kind, sign in SIGNS if re.search(sign, reason, re.IGNORECASE)), Kind.OTHER)
        return cls(kind, reason, op or (_op_of(reason) if kind is Kind.COMPILE else None))


def _op_of(reason: str) -> str | None:
    """The operation of the only kernel that an error of the compiler names; None if it names none, or several."""
    named = re.search(r"\(kernels: ([^)]*)\)", reason)
    found = {op for kernel, op in OPS_OF_KERNELS.items() if named and kernel in named[1]}
    return found.pop() if len(found) == 1 else None
