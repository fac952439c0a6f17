"""One step as the scheduler hands it to the engine, and what the engine hands back."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jsg.sched.buckets import BucketKey
from jsg.sched.request import Placement, RunningRequest
from jsg.types import ConstraintReport, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a request's last one, at least one.

    Attributes:
        tokens: In their order.
        is_forced: They are taken whatever the model says; otherwise as far as it says the same.
    """

    tokens: tuple[int, ...]
    is_forced: bool


@dataclasses.dataclass(slots=True, eq=False)
class BatchEntry:
    """One request's part of a step. Changed by `put_off` only; not frozen: building it would take five times as long.

    Attributes:
        running: The request.
        place: Its placement when the step was planned; a later one means the entry is stale.
        start: Position of its first new token.
        num_new: New tokens: 1 in decode, a chunk in prefill.
        write_start: Positions before it are in the radix tree already and must not be written.
        output_index: Index among the output tokens of the first token that the step may sample.
        from_device: The one new token was sampled by an earlier step and is read from the device's own table.
        samples: The step samples its next token.
        ends_prefill: The last chunk of a prompt.
        num_drafts: New tokens at its end that are not committed but proposed. Each, and the token before them, has a
            row of logits and samples its next token.
        is_forced: The drafts are taken whatever is sampled in their places.
        vision_ids: int32, what the model is given in place of the new tokens where some of them are of an image: ids
            from the vocabulary's size on are rows of the vision pool. None where there are tokens only.
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
    is_forced: bool = False
    vision_ids: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_drafts + 1

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens; only until the step is committed."""
        end = self.start + self.num_new
        return self.running.tokens[end - self.num_drafts : end].tolist()

    def taken(self, sampled: Sequence[int]) -> list[int]:
        """Of the tokens sampled in its rows those that count: up to the first that is not the draft in its place."""
        num_equal = 0
        for draft, token in zip(self.drafts, sampled, strict=False):
            if draft != token:
                break
            num_equal += 1
        return list(sampled[: num_equal + 1])

    @property
    def scores_prompt(self) -> bool:
        """The log-probabilities of prompt tokens are wanted of this chunk: not all are there yet."""
        running = self.running
        if self.from_device or running.has_reported or not running.request.wants_prompt_logprobs:
            return False
        return len(running.prompt_logprobs) < running.num_prompt - running.request.logprob_start_len

    @property
    def is_stale(self) -> bool:
        """The request finished, was aborted or retracted after this step was planned."""
        return self.running.place is not self.place


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A tile of an image or a frame of a video that a step needs and the vision pool lacks.

    Attributes:
        pixels: float32 [3, S, S].
        rows: int32, of the vision pool: where its features are to be written.
        is_video: It is a frame.
    """

    pixels: np.ndarray
    rows: np.ndarray
    is_video: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests of a decode step whose first tokens are in the very same pages.

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
        admitted: Those of its requests that were admitted for this step: their device tables must be written first.
        dirty_rows: Rows of the request table whose host copy is ahead of the device's.
        groups: Prefixes worth reading once for several entries. A hint: a step may ignore them.
        has_drafts: Some entry has.
        copies: KV slots to be copied before the step, from and to: the branches of joined requests, where pages have
            several tokens.
        is_deterministic: Every token must be computed by the same loops, whatever it comes with.
        encodings: What is to be encoded before the step.
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
    """What a step computed, on the host.

    Attributes:
        token_ids: The sampled token of each row of logits (see `Batch.first_rows`): -1 where the logits were not
            finite, meaningless where the entry does not sample.
        logprobs: By row, of entries that asked for them.
        prompt_logprobs: Per entry, by its index in the batch: one per prompt token that its chunk predicts.
        failed: Requests for which the work of the host, before or after the step, raised: they end with an error.
        reasons: What the error says, by rid, where that is the client's to know.
        kept_mass: By row, where a request reports what its grammar did.
        constraints: What grammars did, by entry; of requests that report it. One report for each of its tokens, of all
            tokens up to it.
        ended: By entry, after how many of its tokens its grammar lets nothing follow, not even an EOS token.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = dataclasses.field(default_factory=dict)
    failed: list[RunningRequest] = dataclasses.field(default_factory=list)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    kept_mass: dict[int, float] = dataclasses.field(default_factory=dict)
    constraints: dict[int, list[ConstraintReport]] = dataclasses.field(default_factory=dict)
    ended: dict[int, int] = dataclasses.field(default_factory=dict)
