"""What each launch of a compiled step reads, writes and computes, read off the optimised program.

The bytes are those of the arrays that a launch is given and makes. A weight that is not the kernel of a product, such
as the embedding table, counts with at most the bytes that the launch makes, because a gather reads only the rows that
it wants. What is changed in place counts nothing. In jsg's own kernels the KV pool and the states of requests count
nothing either: how many of them a kernel reads is not in a program. Any other launch that is given one would copy it.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bench.hlo import VIEWS, Array, arrays_in
from bench.tp.compiled import KINDS

NO_LAUNCH = "all-reduce-done|all-gather-done|constant|partition-id|iota|after-all"
IGNORED = re.compile(rf"({'|'.join(VIEWS)}|{NO_LAUNCH}|({KINDS})(-start)?)$")
"""Operations that are no launch, and exchanges between devices, which `bench.tp` counts."""
ATTENTION_KERNELS = ("_decode_kernel", "_prefix_kernel", "ragged_paged_attention", "delta_")
"""Those that read the pool. Linear attention reads and writes states, which may take as long as many keys."""
EXPERT_KERNEL = "grouped_matmul_kernel"
KERNEL_OF_FEW_BITS = "few_bits_matmul_kernel"
KERNEL_OF_E4M3 = "fp8_matmul_kernel"


class Kind(enum.StrEnum):
    """What decides how fast a launch can be."""

    @property
    def has_experts(self) -> bool:
        """Whether its kernels are those of experts."""
        return self in (Kind.EXPERTS, Kind.EXPERTS_OF_E4M3)

    @property
    def is_in_e4m3(self) -> bool:
        """Whether rows and kernels are in e4m3, for which cards have twice the peak."""
        return self in (Kind.PRODUCT_OF_E4M3, Kind.EXPERTS_OF_E4M3)

    PRODUCT = "product"
    PRODUCT_OF_FEW_BITS = "product of few bits"
    PRODUCT_OF_E4M3 = "product of e4m3 with e4m3"
    EXPERTS = "experts"
    EXPERTS_OF_E4M3 = "experts of e4m3 with e4m3"
    ATTENTION = "attention"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one launch.

    Attributes:
        kernel: The shape of the weights that it multiplies by; empty if it is no product.
        kernel_bytes: Their bytes; those of all experts, and those of scales with numbers of 4 bits.
        other_bytes: The bytes of everything else that it reads and writes.
    """

    kind: Kind
    kernel: tuple[int, ...]
    kernel_bytes: int
    other_bytes: int

    @property
    def is_in_8_bits(self) -> bool:
        """Whether its weights are in 8 bits."""
        return self.kernel_bytes == math.prod(self.kernel)


def works(hlo: str, pools: Collection[int]) -> list[Work]:
    """The work of every launch of an optimised program, in the order of the text.

    Args:
        hlo: The program.
        pools: The numbers of elements, on one device, of the arrays of a layer with keys, or states.
    """
    multiplying = {name for name, line in _lines(hlo) if " dot(" in line}
    known: dict[str, tuple[Array, ...]] = {}
    parameters: set[str] = set()
    found = []
    for computation, line in _lines(hlo):
        match = re.match(r" +(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line)
        if computation != "ENTRY" or match is None:
            continue
        name, result, operation, rest = match.groups()
        arrays = arrays_in(result)
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        if operation == "get-tuple-element":
            index = re.search(r"index=(\d+)", rest)
            assert index is not None
            arrays = (known[operands[0]][int(index[1])],)
        known[name] = arrays
        if operation == "parameter" or (operation == "bitcast" and operands[0] in parameters):
            parameters.add(name)
        if IGNORED.match(operation):
            continue
        called = re.search(r"calls=%(\S+?)[,\s]", rest + " ")
        is_product = "__cublas" in rest or (called is not None and called[1] in multiplying)
        kernel_name = re.search(r'[{ ]name = "(\w+)"', rest)
        kind = _kind(kernel_name[1] if kernel_name else "", is_product=is_product)
        found.append(
            _work(
                kind,
                weights=[known[each][0] for each in operands if each in parameters],
                inputs=[array for each in operands if each not in parameters for array in known[each][:1]],
                results=[array for array in arrays if array.dtype != "s8" or len(arrays) == 1],  # no workspace
                pools=pools if operation == "custom-call" else (),
            )
        )
    return found


def _kind(kernel: str, *, is_product: bool) -> Kind:
    if kernel.startswith(ATTENTION_KERNELS):
        return Kind.ATTENTION
    if kernel.startswith(EXPERT_KERNEL):
        return Kind.EXPERTS
    if kernel.startswith(KERNEL_OF_E4M3):
        return Kind.EXPERTS_OF_E4M3  # or the product of one kernel, by its shape
    if kernel.startswith(KERNEL_OF_FEW_BITS):
        return Kind.PRODUCT_OF_FEW_BITS
    return Kind.PRODUCT if is_product else Kind.OTHER


def _work(
    kind: Kind, *, weights: list[Array], inputs: list[Array], results: list[Array], pools: Collection[int]
) -> Work:
    if kind is Kind.PRODUCT_OF_FEW_BITS:
        kernel = max(weights, key=lambda each: math.prod(each.shape))
        of_all, others = (sum(each.num_bytes for each in arrays) for arrays in (weights, [*inputs, *results]))
        if kernel.dtype == "s8":
            return Work(kind, kernel.shape, kernel.num_bytes, others + of_all - kernel.num_bytes)
        pairs, width = kernel.shape
        return Work(kind, (2 * pairs, width), of_all, others)
    kernel = None
    if kind is Kind.PRODUCT or kind.has_experts or kind.is_in_e4m3:
        # A kernel that another launch has converted is no weight any more; cuBLAS is given it second.
        kernel = max(weights, key=lambda each: math.prod(each.shape)) if weights else inputs[1]
        if kind.is_in_e4m3 and kernel.shape[0] == 1:
            kind = Kind.PRODUCT_OF_E4M3
        if kind.has_experts and weights:  # gates and what they let through are one kernel with the columns of both
            alike, weights = weights.count(kernel), [each for each in weights if each != kernel]
            kernel = dataclasses.replace(kernel, shape=(*kernel.shape[:-1], kernel.shape[-1] * alike))
    if kind is Kind.ATTENTION:
        inputs = [each for each in inputs if each.dtype != "s32"]  # the page table, of which it reads a few rows
    rest = [each for each in inputs if each is not kernel and math.prod(each.shape) not in pools]
    weights = [each for each in weights if each is not kernel and math.prod(each.shape) not in pools]
    in_place = {each.shape for each in weights}
    made = sum(each.num_bytes for each in results if each.shape not in in_place and math.prod(each.shape) not in pools)
    # Beside those of experts a launch may read the whole kernels of a block that all tokens use.
    least = [each.num_bytes if kind is Kind.EXPERTS and len(each.shape) > 1 else made for each in weights]
    other = made + sum(each.num_bytes for each in rest)
    other += sum(min(each.num_bytes, most) for each, most in zip(weights, least, strict=True))
    return Work(kind, kernel.shape if kernel else (), kernel.num_bytes if kernel else 0, other)


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """Every line with the name of the computation that it is in; that of the program itself is ENTRY."""
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(", line):
            computation = "ENTRY" if header[1] else header[2]
        yield computation, line
