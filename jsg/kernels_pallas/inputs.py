"""The inputs of paged attention beside queries, keys and values. Letters: `jsg/models/inputs.py`."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Num

from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.window import Window

LayerCache = tuple[Float[Array, "P _ _ *rest"], ...]
"""One layer of the KV pool: see `KVPool.layers`. Only the ops look inside."""


PANEL_WIDTH = 16
"""Columns of a panel: the float32 of one AVX-512 register, of two of AVX2, of four of NEON."""
TOGETHER = {"float32": 1, "bfloat16": 2, "int8": 1, "e4m3": 1, "int4": 4, "uint4": 4, "e2m1": 4}
"""How many stored numbers of each column lie side by side, by the type of a kernel. The matrix unit of a CPU (AMX)
multiplies pairs of bfloat16. Four bytes of numbers in 4 bits fill a lane of 32 bits, and shifts get at each of them."""


class Panels(NamedTuple):
    """A kernel [D, F] as a CPU reads it: `PANEL_WIDTH` columns side by side, from the first input to the last.

    Attributes:
        values: [F / PANEL_WIDTH, D / together, PANEL_WIDTH, together], where `TOGETHER` has the last one. In 4 bits D
            is half as long, because a byte has two inputs.
        form: How a kernel in few bits is kept; None for others.
        scale: [F / PANEL_WIDTH, groups, PANEL_WIDTH, 1], if groups of inputs have scales.
        zero: Likewise their zeros.
        factor: [F / PANEL_WIDTH, 1, PANEL_WIDTH, 1], what each column's sum is multiplied with, if anything; or if
            scales have factors in blocks, these.
        order: [D] The inputs in the order in which the panels have them; None for their own.
        step: [F / PANEL_WIDTH, blocks, PANEL_WIDTH, 1], the steps of zeros, if they have any.
    """

    values: Num[Array, "panels D_part width together"]
    form: Form | None = None
    scale: Num[Array, "panels groups width 1"] | None = None
    zero: Int[Array, "panels groups width 1"] | None = None
    factor: Float[Array, "panels blocks width 1"] | None = None
    order: Int[Array, " D"] | None = None
    step: Float[Array, "panels blocks width 1"] | None = None

    @property
    def kind(self) -> str:
        """The kind of its numbers, a key of `TOGETHER`."""
        return str(self.values.dtype) if self.form is None else self.form.numbers


class Fp8Kernel(NamedTuple):
    """A kernel in e4m3 for products whose rows are rounded to e4m3 too. Its inputs are the last axis.

    So the tensor cores read it: they want both sides of a product with what is summed side by side.

    Attributes:
        values: [*out, D], or those of several experts [E, F, D].
        scale: [groups, *out], or [E, groups, F]: one for each group of consecutive inputs, or for all of them.
    """

    values: Any
    scale: Any


class Fp8Rows(NamedTuple):
    """Rows rounded to e4m3.

    Attributes:
        values: [R, D] The numbers.
        scale: [R, groups] What they are multiplied with: one for each group of consecutive numbers of a row.
    """

    values: Any
    scale: Any


class PrefixGroups(NamedTuple):
    """Singles whose first tokens are in the same pages, cut into group tiles of at most `GROUP_TILE` members.

    They are a hint: an implementation that uses them reads a shared prefix once per tile instead of once per member.

    Attributes:
        shared_lens: How many keys of packed token b, from its first on, its group tile covers; 0 if it is in no tile.
        rows: A request row whose pages hold the shared prefix of the tile.
        lens: Tokens of the shared prefix, a multiple of the page size; 0 if there is no such tile.
        members: The packed tokens of the tile; -1 for none. Real ones come first.
    """

    shared_lens: Int[Array, " B"]
    rows: Int[Array, " U"]
    lens: Int[Array, " U"]
    members: Int[Array, "U members"]


class Chunks(NamedTuple):
    """Chunks of prompts that an implementation may compute in another way: see `chunks.py`.

    Attributes:
        rows: Request row.
        starts: The first packed token.
        lens: Tokens; 0 if there is no such chunk.
        positions: Position of the first token in its sequence.
        places: Where its own keys begin among those of all chunks, side by side.
    """

    rows: Int[Array, " M"]
    starts: Int[Array, " M"]
    lens: Int[Array, " M"]
    positions: Int[Array, " M"]
    places: Int[Array, " M"]


class AttentionInputs(NamedTuple):
    """The place of each packed query token in its own request.

    New tokens are packed. Rows that bring one token may stand first, one packed token each (`single_*`). Every other
    token is in a query tile. No array has a context dimension, because attention loops over real lengths.

    Attributes:
        page_table: Request row → its pages, in order of position. Entries past a row's length are 0 or stale.
        single_rows: Request row of packed token b, for the leading tokens that are alone in their row.
        single_kv_lens: Keys that packed token b sees, with its own; 0 if b is not such a token.
        tile_rows: Request row of each query tile: at most `QUERY_TILE` consecutive packed tokens of one request. A row
            brings one single, or tiles of which only the last is shorter. Buckets have room for as many.
        tile_starts: Index of the tile's first token among the packed tokens.
        tile_lens: Tokens in the tile.
        tile_positions: Position of the tile's first token in its sequence; its token i sees keys 0..position+i.
        num_tiles: The number of real tiles, which come first.
        groups: Shared prefixes of singles; None if the step has no room for them.
        num_short_tiles: The number of leading tiles with at most `SHORT_TILE` tokens each, which may be computed in
            another way. It is a hint, and 0 in deterministic mode.
        chunks: Long chunks, if an implementation takes them in another way; else, and in deterministic mode, None.
    """

    page_table: Int[Array, "R C"]
    single_rows: Int[Array, " B"]
    single_kv_lens: Int[Array, " B"]
    tile_rows: Int[Array, " Q"]
    tile_starts: Int[Array, " Q"]
    tile_lens: Int[Array, " Q"]
    tile_positions: Int[Array, " Q"]
    num_tiles: Int[Array, ""]
    groups: PrefixGroups | None = None
    num_short_tiles: Int[Array, ""] | int = 0
    chunks: Chunks | None = None

    @property
    def num_tokens(self) -> Int[Array, ""]:
        """The packed tokens that are no padding, which stand first."""
        return (self.single_kv_lens > 0).sum() + self.tile_lens.sum()


class GroupKernels(NamedTuple):
    """A kernel for each group of rows. See `ops.grouped_matmul`.

    Attributes:
        values: The kernels. Those in few bits that have scales of groups are a `Quantised`, or on a CPU in panels.
        scale: The factor of the sums of each column; None if the kernels are as long as the rows, or have scales.
        bias: What is added to each column; None for nothing.
    """

    values: Num[Array, "E D F"] | Quantised | Panels | Fp8Kernel
    scale: Float[Array, "E 1 F"] | None = None
    bias: Float[Array, "E F"] | None = None


class SharedKernels(NamedTuple):
    """The kernels of a block that all tokens use, beside those of experts. See `ops.experts_beside`.

    Attributes:
        opened: Those of gates, if there are any, and of what they let through, side by side.
        down: That of what is let through.
    """

    opened: Num[Array, "D parts F"]
    down: Num[Array, "F D"]


class Scoring(NamedTuple):
    """How queries and keys become scores; the same for a whole call.

    Attributes:
        scale: Multiplies queries · keys; above zero.
        window: Which positions up to its own a token sees; None for all.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
    """

    scale: float
    window: Window | None = None
    softcap: float | None = None


class HeadNorms(NamedTuple):
    """The RMS norms that some families apply to every head's query and key, and value.

    Attributes:
        query: Weights of queries. What is normed is rounded to their type, multiplied by them, and rounded to its own.
        key: Weights of keys, of the same type.
        eps: Added to the mean square before the root.
        is_late: Queries and keys are normed after rotation, and not before it.
        norms_values: Values are normed too, without weights.
    """

    query: Float[Array, " H"]
    key: Float[Array, " H"]
    eps: float
    is_late: bool = False
    norms_values: bool = False


class Pieces(NamedTuple):
    """Runs of consecutive packed tokens of one request, for layers that keep a state of each request in slots.

    A state is never copied: a piece reads one slot and writes the state after its last token to a slot, which may be
    the same one. No slot that one piece writes is read by another. Padding has length 0. Tokens in no piece come last.

    Attributes:
        starts: Index of the first token among the packed tokens.
        lens: Tokens.
        sources: The slot that is read, whatever it holds if the first token has position 0 and is not known.
        targets: The slot that is written.
        positions: Position of the first token in its sequence.
        is_known: 1 if the state in the source has the first token already, so that it is only read for it; else 0.
    """

    starts: Int[Array, " W"]
    lens: Int[Array, " W"]
    sources: Int[Array, " W"]
    targets: Int[Array, " W"]
    positions: Int[Array, " W"]
    is_known: Int[Array, " W"]


class PieceTiles(NamedTuple):
    """The pieces of a step cut into tiles, for implementations that compute many tokens at a time.

    Attributes:
        starts: Index of a tile's first token among the packed tokens.
        lens: Tokens of the tile, at most `QUERY_TILE`, all of one piece. Padding has length 0.
        firsts: The first tile of each piece. Its others follow, of which only the last may be shorter.
    """

    starts: Int[Array, " Q"]
    lens: Int[Array, " Q"]
    firsts: Int[Array, " W"]


class StateCache(NamedTuple):
    """The states of all slots in one layer of linear attention. Slot 0 is that of padding.

    Attributes:
        inputs: The last inputs of the convolution, that of position p in column p modulo the taps.
        states: For each head a matrix, values by keys.
    """

    inputs: Float[Array, "slots taps K mixed"]
    states: Float[Array, "slots N Dv Dk"]


class DeltaWeights(NamedTuple):
    """The parameters of a gated delta rule beside its projections. Those of decay are float32, for each head.

    Attributes:
        taps: The convolution, the tap of the newest token last.
        decay_rate: The logarithm of the fastest decay.
        decay_bias: Added to what a token says of its decay. [N, Dk] if each number of a key has a decay of its own.
        norm: The weight of the norm of a head's output.
        eps: Added to the mean square before its root.
    """

    taps: Float[Array, "taps K mixed"]
    decay_rate: Float[Array, " N"]
    decay_bias: Float[Array, "N *keys"]
    norm: Float[Array, " Dv"]
    eps: float


class GatesApart(NamedTuple):
    """What projections of their own say of gates, as in Kimi Linear.

    Attributes:
        decay: For each key head what its heads say of their decays, one for each number of a key.
        output: Likewise the gates of their outputs, which are multiplied by the sigmoid of these.
    """

    decay: Float[Array, "T K G·Dk"]
    output: Float[Array, "T K G·Dv"]


class ScanWeights(NamedTuple):
    """The parameters of a selective scan (Mamba-2) in place of a gated delta rule. Those of heads are float32.

    The difference of a value from what the state has is not taken: a token writes its value, times its step.

    Attributes:
        taps: See `DeltaWeights`, likewise the next.
        decay_rate: The logarithm of the decay of a step of 1.
        step_bias: Added to what a token says of its step.
        skip: What multiplies the value of a token in its own output.
        bias: The bias of the convolution.
        steps: The smallest and the largest step.
    """

    taps: Float[Array, "taps K mixed"]
    decay_rate: Float[Array, " N"]
    step_bias: Float[Array, " N"]
    skip: Float[Array, " N"]
    bias: Float[Array, "K mixed"]
    steps: tuple[float, float]
