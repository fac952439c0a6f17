"""What the scheduler keeps of each request, and the batch it hands to the engine."""

import dataclasses
import enum
import itertools
from collections.abc import Sequence

import numpy as np

from jsg.cache.radix import PrefixLock
from jsg.cache.watch import Watch
from jsg.media import MIN_TOKENS
from jsg.sched.buckets import BucketKey
from jsg.sched.positions import Layout, cached_shifts
from jsg.types import CacheReport, ConstraintReport, Request, TokenLogprob


@dataclasses.dataclass(slots=True)
class SchedulerTotals:
    """What has happened since the start. Requests are counted when they end, tokens at first admission."""

    num_retracts: int = 0
    num_aborted: int = 0
    num_expired: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_holds_broken: int = 0
    branch_tokens: int = 0
    branch_tokens_computed: int = 0


class RequestState(enum.Enum):
    """Where a request is.

        NEW ─┬─▶ WAITING ◀─┬─▶ RUNNING ──▶ KEPT
             └─▶ JOINING ◀─┘

    Admission makes a request run, and a retract sends it back to where it came from. From every state but NEW it may
    end.
    """

    NEW = "new"
    WAITING = "waiting"
    """It is in the waiting queue and watches its cached prefix."""
    JOINING = "joining"
    """It is a joined request without a row, whose branches are computed or wait for that."""
    RUNNING = "running"
    """It has a placement, and takes part in steps."""
    KEPT = "kept"
    """Its prompt is computed and its pages are kept, without a row: a hold, or a branch whose siblings are not done."""
    ENDED = "ended"


NEXT_STATES = {
    RequestState.NEW: {RequestState.WAITING, RequestState.JOINING},
    RequestState.WAITING: {RequestState.RUNNING, RequestState.ENDED},
    RequestState.JOINING: {RequestState.RUNNING, RequestState.ENDED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.JOINING, RequestState.KEPT, RequestState.ENDED},
    RequestState.KEPT: {RequestState.ENDED},
    RequestState.ENDED: frozenset[RequestState](),
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """The pages of a prompt without a row. They stay until `RequestTable.drop`, and nobody reads them meanwhile.

    Attributes:
        lock: Protects the pages that the radix tree owns from eviction.
        pages: int32, of the prompt's tokens from page `first_page` on.
        own: The pages that the tree does not own, whether `pages` lists them or not.
        first_page: Pages before it are not listed.
    """

    lock: PrefixLock
    pages: np.ndarray
    own: np.ndarray
    first_page: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Placement:
    """Where a running request lives. It is made at admission and dropped when the request stops running.

    Attributes:
        row: Its row in the request table, from 1. Row 0 takes the writes of padding.
        lock: Protects its cached prefix from eviction.
        num_tree_pages: Leading pages that the radix tree owns. The others are the row's own ("uncached").
        num_dispatched: Positions whose keys and values are computed, or will be by a step in flight.
        is_prefilling: Some tokens that were known at admission are not dispatched yet; or a step that should have
            sampled did not (`put_off`), so that the last token runs again.
        num_in_flight: 1 while a step that samples for it is not committed yet, else 0. With drafts that step may give
            several tokens; then it is committed before the next is planned.
        device_has_last: The table on the device holds its last token. After a step with drafts it does not.
        branches: Of a joined request: the pages of its branches. It is never put into the tree itself.
        num_prefix_pages: Of a joined request: leading pages that are the path from the root of the tree to its lock.
    """

    row: int
    lock: PrefixLock
    num_tree_pages: int
    num_dispatched: int
    is_prefilling: bool = True
    num_in_flight: int = 0
    device_has_last: bool = True
    branches: tuple[KeptPrefix, ...] = ()
    num_prefix_pages: int = 0

    @property
    def num_path_pages(self) -> int:
        """Leading pages of the row that are those from the root of the tree to the lock."""
        return self.num_prefix_pages if self.branches else self.num_tree_pages


@dataclasses.dataclass(frozen=True, slots=True)
class FirstAdmission:
    """What a request is told of its first admission.

    Attributes:
        cached_tokens: Prompt tokens that were found in the cache.
        queue_s: Seconds from arrival to admission.
        report: Why the cached prefix ended where it did, when the client asked for that.
    """

    cached_tokens: int = 0
    queue_s: float = 0.0
    report: CacheReport | None = None


@dataclasses.dataclass(slots=True, eq=False)
class RunningRequest:
    """One request from arrival to its end. It is the one mutable record; only the scheduler changes it.

    Attributes:
        request: What the client asked for. Of a branch it says everything but the tokens.
        arrival: Its number in the order of arrival.
        tokens: int32, prompt and committed output, with room for the rest; `num_known` of them are real.
        num_prompt: Prompt tokens.
        num_known: Prompt tokens and committed output tokens.
        state: Where it is; see `enter`.
        watch: Keeps its longest cached prefix up to date while it is WAITING; else None.
        place: Where it lives while it is RUNNING; else None.
        kept: Its pages while it is KEPT; else None.
        arrived_s: Time of arrival, for the report only.
        admission: What its first admission gave; None before that.
        prompt_logprobs: Of the chunks that are committed.
        has_reported: An output was made of it.
        layout: Its positions and what the tree finds its tokens by, where that is not indices and tokens.
        branch_of: The joined request whose branch this one computes.
    """

    request: Request
    arrival: int
    tokens: np.ndarray
    num_prompt: int
    num_known: int
    state: RequestState = RequestState.NEW
    watch: Watch | None = None
    place: Placement | None = None
    kept: KeptPrefix | None = None
    arrived_s: float = 0.0
    admission: FirstAdmission | None = None
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    has_reported: bool = False
    layout: Layout | None = None
    branch_of: "RunningRequest | None" = None

    def enter(self, state: RequestState) -> None:
        """Changes the state; asserts that this is one of the changes that `NEXT_STATES` allows."""
        assert state in NEXT_STATES[self.state], f"a request that is {self.state.value} becomes {state.value}"
        self.state = state

    @property
    def whole(self) -> "RunningRequest":
        """The request that a client knows: the joined one whose branch this computes, or else itself."""
        return self.branch_of or self

    @property
    def first_arrival(self) -> int:
        """The smallest arrival number that it or one of its branches has: theirs come just before its own."""
        return self.arrival - len(self.request.joined)

    @property
    def key(self) -> np.ndarray:
        """int32: what `tokens` are found by in the radix tree."""
        return self.tokens if self.layout is None else self.layout.key

    def trusted(self, num_tokens: int, page_size: int) -> int:
        """How many of its first tokens it may share with others, of those that the tree has too; whole pages.

        Where they end inside of an image, behind fewer than `MIN_TOKENS` of its words, these words do not prove that it
        is the same image. Then nothing of the image is shared.
        """
        for item in reversed(self.request.media):
            num_tokens -= num_tokens % page_size
            if item.start < num_tokens < item.start + MIN_TOKENS:
                num_tokens = item.start
        return num_tokens - num_tokens % page_size

    @property
    def shifts(self) -> list[int]:
        """By how much positions of cached tokens exceed their indices. The shifts of a branch are its whole's."""
        if self.layout is None or self.branch_of is not None:
            return []
        return cached_shifts(self.request, self.layout.positions)

    @property
    def is_put_off(self) -> bool:
        """A step that it took part in did not sample for it: it runs its last token again."""
        return self.place is not None and self.place.is_prefilling and self.place.num_dispatched == self.num_known

    def append(self, token: int) -> None:
        """Adds a committed output token."""
        self.tokens[self.num_known] = token
        if self.layout is not None:
            self.layout.put(self.num_known, token)
        self.num_known += 1

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return self.num_known - self.num_prompt

    @property
    def num_to_come(self) -> int:
        """Output tokens that are neither committed nor in flight, at most."""
        in_flight = self.place.num_in_flight if self.place else 0
        return self.request.sampling.max_new_tokens - self.num_output - in_flight

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: a step that samples needs one, prompt logprobs their positions."""
        request = self.request
        if request.wants_prompt_logprobs and self.num_output == 0:
            return max(request.logprob_start_len - 1, 0)
        if request.sampling.max_new_tokens == 0:
            return self.num_known
        return self.num_known - 1


def new_running_request(request: Request, arrival: int, now_s: float) -> RunningRequest:
    """The record of a request that has just arrived."""
    prompt = np.asarray(request.input_ids, np.int32)
    tokens = np.zeros(len(prompt) + request.sampling.max_new_tokens, np.int32)
    tokens[: len(prompt)] = prompt
    return RunningRequest(request, arrival, tokens, len(prompt), len(prompt), arrived_s=now_s)


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
