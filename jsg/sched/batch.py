"""One step as the scheduler hands it to the engine, and what the engine hands back."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jsg.errors import JsgError
from jsg.sched.buckets import BucketKey
from jsg.sched.request import Placement, RunningRequest
from jsg.step_reports import ConstraintReport
from jsg.token_scores import ScorePart
from jsg.types import TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a request's last one.

    Attributes:
        tokens: At least one, in their order.
        is_forced: Whether they are taken whatever the model says. Otherwise they are taken as far as the model agrees.
        num_sure: How many of the first ones a grammar forces, so that the step has them if there is room.
        chances: For each the chance that it and all before it are right; empty where all are sure.
    """

    tokens: tuple[int, ...]
    is_forced: bool
    num_sure: int
    chances: tuple[float, ...] = ()


@dataclasses.dataclass(slots=True, eq=False)
class BatchEntry:
    """One request in a step. Only drafts and `put_off` change it. It is not frozen, since that takes longer to make.

    Attributes:
        running: The request.
        place: Its placement when the step was planned. If the request has another placement, the entry is stale.
        start: Index of its first new token.
        num_new: How many new tokens it has: 1 in decode, a chunk in prefill.
        write_start: The tokens before this index are in the radix tree already and must not be written.
        output_index: Index among the output tokens of the first token that the step may sample.
        from_device: Whether the only new token is read from the table on the device, where an earlier step sampled it.
        samples: Whether the step samples its next token.
        ends_prefill: Whether this is the last chunk of a prompt.
        num_drafts: How many of its last new tokens are drafts. Each draft, and the token before the drafts, has a row
            of logits, from which the next token is sampled.
        proposal: What the drafts are the first tokens of.
        is_known: Whether a step has run the first new token before, so that the state of the request has it.
        state_source: The slot in which the step reads the state of the request.
        state_slot: The slot in which it writes it.
        vision_ids: int32, the ids that the model reads in place of the new tokens. Ids from the vocabulary's size on
            are rows of the vision pool. None if no new token belongs to an image.
    """

    running: RunningRequest
    place: Placement
    start: int
    num_new: int
    write_start: int
    output_index: int
    from_device: bool = False
    samples: bool = False
    ends_prefill: bool = False
    num_drafts: int = 0
    proposal: Proposal | None = None
    is_known: bool = False
    state_source: int = 0
    state_slot: int = 0
    vision_ids: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_drafts + 1

    @property
    def is_forced(self) -> bool:
        """Whether the drafts are taken whatever is sampled in their places."""
        return self.proposal is not None and self.proposal.is_forced

    @property
    def num_sure(self) -> int:
        """How many of the drafts a grammar forces."""
        return 0 if self.proposal is None else min(self.num_drafts, self.proposal.num_sure)

    @property
    def drafts(self) -> list[int]:
        """The drafts, until the step is committed."""
        end = self.start + self.num_new
        return self.running.tokens[end - self.num_drafts : end].tolist()

    def taken(self, sampled: Sequence[int]) -> list[int]:
        """The sampled tokens that count: those up to the first one that differs from its draft."""
        num_equal = 0
        for draft, token in zip(self.drafts, sampled, strict=False):
            if draft != token:
                break
            num_equal += 1
        return list(sampled[: num_equal + 1])

    @property
    def scores_prompt(self) -> bool:
        """Whether this chunk must give log-probabilities of prompt tokens, because some of them are still missing."""
        running = self.running
        if self.from_device or running.has_reported or not running.request.wants_prompt_logprobs:
            return False
        return len(running.prompt_logprobs) < running.num_prompt - running.request.logprob_start_len

    @property
    def is_stale(self) -> bool:
        """Whether the request has ended or was retracted after this step was planned."""
        return self.running.place is not self.place


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A tile of an image or a frame of a video that a step needs and the vision pool lacks.

    Attributes:
        pixels: float32 [3, S, S].
        rows: int32, the rows of the vision pool that its features are written to.
        is_video: Whether it is a frame.
    """

    pixels: np.ndarray
    rows: np.ndarray
    is_video: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests of a decode step whose first tokens are in the same pages.

    Attributes:
        members: Indices among the entries of the batch, ascending; no entry is in two groups.
        num_tokens: Tokens that they share: whole pages, and fewer than any member has.
    """

    members: tuple[int, ...]
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step. One-token entries come first.

    Attributes:
        key: Its padded shape.
        entries: Its requests, in packed order.
        num_singles: Leading entries with one new token.
        admitted: Its requests that were admitted for this step. Their tables on the device must be written first.
        dirty_rows: Rows of the request table whose copy on the device is older.
        groups: Prefixes that should be read once for several entries. A step may ignore them.
        has_drafts: Whether some entry has drafts.
        is_deterministic: Whether each token must be computed by the same loops, whatever the other tokens are.
        copies: KV slots to copy before the step, sources and targets: those of joined requests if a page has several
            tokens.
        encodings: Tiles and frames to encode before the step.
        lacking: By row, and there for each page group of the device, the indices of the row's pages that the tree had
            without keys and values in the layers of this group. The step writes these.
    """

    key: BucketKey
    entries: tuple[BatchEntry, ...]
    num_singles: int
    admitted: tuple[RunningRequest, ...]
    dirty_rows: tuple[int, ...]
    groups: tuple[PrefixGroup, ...] = ()
    has_drafts: bool = False
    is_deterministic: bool = False
    copies: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    encodings: tuple[Encoding, ...] = ()
    lacking: Mapping[int, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """New tokens, without padding."""
        return sum(entry.num_new for entry in self.entries)

    @property
    def num_rows(self) -> int:
        """Rows of logits, without padding."""
        return sum(entry.num_rows for entry in self.entries)

    @property
    def first_rows(self) -> Sequence[int]:
        """The first row of logits of each entry."""
        if not self.has_drafts:
            return range(len(self.entries))
        return list(itertools.accumulate((entry.num_rows for entry in self.entries[:-1]), initial=0))


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, on the host.

    Attributes:
        token_ids: The sampled token of each row of logits (see `Batch.first_rows`). It is -1 if the logits were not
            finite, and means nothing if the entry does not sample.
        logprobs: By row of logits, for the entries that ask for them.
        prompt_logprobs: By index of the entry, those of the prompt tokens that its chunk predicts.
        failed: Requests for which the host raised an error before or after the step. They end with an error.
        reasons: By rid, that error if the client may know it.
        kept_mass: By row of logits, the probability that the grammar left, for requests that report it.
        constraints: By index of the entry, one report for each of its tokens, if the request asks for it. A report says
            what the grammar did to all tokens of the step up to that token.
        ended: By index of the entry, the number of tokens after which its grammar allows no token, not even EOS.
        vectors: By index of the entry, for requests that embed.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[int, list[ScorePart]] = dataclasses.field(default_factory=dict)
    failed: list[RunningRequest] = dataclasses.field(default_factory=list)
    reasons: dict[str, JsgError] = dataclasses.field(default_factory=dict)
    kept_mass: dict[int, float] = dataclasses.field(default_factory=dict)
    constraints: dict[int, list[ConstraintReport]] = dataclasses.field(default_factory=dict)
    ended: dict[int, int] = dataclasses.field(default_factory=dict)
    vectors: dict[int, bytes] = dataclasses.field(default_factory=dict)
