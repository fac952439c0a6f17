"""The scheduler's record of each request: its state, its tokens, and where it lives."""

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np

from jsg.cache.radix import PrefixLock
from jsg.cache.states import State
from jsg.cache.watch import Watch
from jsg.cache_report import CacheReport
from jsg.media import MIN_TOKENS
from jsg.sched.positions import Layout, cached_shifts
from jsg.token_scores import TokenScores
from jsg.types import Request
from jsg.waits import Waited


class RequestState(enum.Enum):
    """Where a request is.

        NEW ─┬─▶ WAITING ◀─┬─▶ RUNNING ──▶ KEPT
             └─▶ JOINING ◀─┘

    Admission makes a request run, and a retract sends it back to its state before. A request may end from every state
    but NEW.
    """

    NEW = "new"
    WAITING = "waiting"
    """It is in the waiting queue and watches its cached prefix."""
    JOINING = "joining"
    """It is a joined request without a row. Its branches are computed, or wait for that."""
    RUNNING = "running"
    """It has a placement, and takes part in steps."""
    KEPT = "kept"
    """It is a hold or a branch whose prompt is computed. It has no row, but its pages are kept."""
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
        pages: int32, the pages of the prompt's tokens from page `first_page` on.
        own: The pages that the tree does not own. Some of them may come before `first_page`.
        first_page: The first page that `pages` lists.
        states: They give back what is kept of further kinds of state.
    """

    lock: PrefixLock
    pages: np.ndarray
    own: np.ndarray
    first_page: int = 0
    states: Sequence[Callable[[], None]] = ()


@dataclasses.dataclass(slots=True, eq=False)
class RowState:
    """The state of a row. A step reads a state that nobody writes any more, or the one in the row's own slot.

    Attributes:
        slot: Where the next step writes the state; 0 for a model without states.
        read: The states that the next step, and the planned one, read in place of the slot. The last is the newest.
        origin: The state of the cached prefix with which the row began.
        above: The last state of a prefix that the row has made or continued.
        points: After how many of its tokens its state is kept for other requests, in ascending order, and the
            `State.num_expected` of each.
        missed: The pages for which there was no room to keep a state; None if there was.
    """

    slot: int = 0
    read: list[State] = dataclasses.field(default_factory=list)
    origin: State | None = None
    above: State | None = None
    points: dict[int, int] = dataclasses.field(default_factory=dict)
    missed: np.ndarray | None = None

    @property
    def source(self) -> int:
        """Where the next step reads the state."""
        return self.read[-1].slot if self.read else self.slot


@dataclasses.dataclass(slots=True, eq=False)
class Placement:
    """Where a running request lives. It is made at admission and dropped when the request stops running.

    Attributes:
        row: Its row in the request table, from 1. Row 0 takes the writes of padding.
        lock: Protects its cached prefix from eviction; for a joined request, what is cached from `first_page` on.
        num_tree_pages: How many leading pages the radix tree or `before` owns. The others are the row's own
            ("uncached").
        num_dispatched: How many positions have keys and values that are computed, or will be by a step in flight.
        is_prefilling: Whether some tokens that were known at admission are not dispatched yet, or the last token must
            run again since a step did not sample (`put_off`).
        num_in_flight: 1 while a step that samples for the request is not committed yet, else 0. With drafts that step
            may give several tokens, so it is committed before the next step is planned.
        device_has_last: Whether the table on the device has the last token. After a step with drafts it has not.
        before: The pages of a joined request before those of its own path: of the prefix, then of each branch.
        first_page: The page of the row with which its path in the tree begins. For a joined request it is the first
            page that is not one of `before`.
        seen_from: For each group of layers with a window, the first page of the row that counts as in its window.
        num_again: How many of its last dispatched tokens its state lacks, because a draft among them was wrong or is
            not verified yet. They run again, but their keys and values are there.
        state: Its state.
    """

    row: int
    lock: PrefixLock
    num_tree_pages: int
    num_dispatched: int
    is_prefilling: bool = True
    num_in_flight: int = 0
    device_has_last: bool = True
    before: tuple[KeptPrefix, ...] = ()
    first_page: int = 0
    seen_from: list[int] = dataclasses.field(default_factory=list)
    num_again: int = 0
    state: RowState = dataclasses.field(default_factory=RowState)

    @property
    def num_applied(self) -> int:
        """How many tokens its state has."""
        return self.num_dispatched - self.num_again

    @property
    def leading_lock(self) -> PrefixLock:
        """The lock at the end of the path of which the leading pages of the row are."""
        return self.before[0].lock if self.before else self.lock

    @property
    def num_leading_pages(self) -> int:
        """How many pages that path has."""
        return len(self.before[0].pages) if self.before else self.num_tree_pages


@dataclasses.dataclass(frozen=True, slots=True)
class FirstAdmission:
    """What a request reports of its first admission to its client.

    Attributes:
        cached_tokens: How many prompt tokens were found in the cache.
        queue_s: Seconds from arrival to admission.
        report: Why the cached prefix ended where it did, if the client asked for that.
        waited: Its waits, after retracts too, that no output has reported yet.
    """

    cached_tokens: int = 0
    queue_s: float = 0.0
    report: CacheReport | None = None
    waited: Waited | None = None


@dataclasses.dataclass(slots=True, eq=False)
class RunningRequest:
    """One request from arrival to its end. It is the one mutable record; only the scheduler changes it.

    Attributes:
        request: What the client asked for; for a branch, all of it but the tokens.
        arrival: Its place in the order of arrival, in which a post with many prompts is spread (see `Rounds`).
        tokens: int32, prompt and committed output; `num_known` of them are real. Before the first output it may be the
            array of the prompt, which all answers to it share; `make_room` gives the request its own.
        num_prompt: Prompt tokens.
        num_known: Prompt tokens and committed output tokens.
        state: Where it is; see `enter`.
        watch: Keeps its longest cached prefix up to date while it is WAITING; else None.
        place: Where it lives while it is RUNNING; else None.
        kept: Its pages while it is KEPT; else None.
        arrived_s: Time of arrival.
        admission: Its first admission; None before that.
        prompt_logprobs: Those of the chunks that are committed, until the first output takes them.
        has_reported: Whether an output was made of it.
        layout: Its positions and its key in the tree; None if these are the indices and the tokens.
        branch_of: The joined request whose branch this request computes.
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
    prompt_logprobs: TokenScores = dataclasses.field(default_factory=TokenScores)
    has_reported: bool = False
    layout: Layout | None = None
    branch_of: "RunningRequest | None" = None

    def enter(self, state: RequestState) -> None:
        """Changes the state; asserts that this is one of the changes that `NEXT_STATES` allows."""
        assert state in NEXT_STATES[self.state], f"a request that is {self.state.value} becomes {state.value}"
        self.state = state

    @property
    def whole(self) -> "RunningRequest":
        """The request that a client knows: for a branch its joined request, for any other request itself."""
        return self.branch_of or self

    @property
    def first_arrival(self) -> int:
        """The smallest arrival number of the request and its branches, whose numbers come just before its own."""
        return self.arrival - len(self.request.joined)

    @property
    def key(self) -> np.ndarray:
        """int32: the key by which the radix tree finds `tokens`."""
        return self.tokens if self.layout is None else self.layout.key

    @property
    def namespace(self) -> str:
        """The namespace of its path in the tree; for a joined request, of the path that follows its branches."""
        behind = self.layout.namespace if self.layout else None
        return self.request.namespace if behind is None else behind

    def trusted(self, num_tokens: int, page_size: int) -> int:
        """How many of its first `num_tokens`, all of which the tree has, it may share: a number of whole pages.

        If they end inside an image, after fewer than `MIN_TOKENS` of its words, these words do not prove that it is
        the same image. Then nothing of the image is shared.
        """
        for item in reversed(self.request.media):
            num_tokens -= num_tokens % page_size
            if item.start < num_tokens < item.start + MIN_TOKENS:
                num_tokens = item.start
        return num_tokens - num_tokens % page_size

    @property
    def shifts(self) -> list[int]:
        """The shifts of its tokens (see `PositionWords`). Those of a branch belong to its joined request."""
        if self.layout is None or self.branch_of is not None:
            return []
        return cached_shifts(self.request, self.layout.positions)

    @property
    def is_put_off(self) -> bool:
        """Whether its last token runs again, because a step did not sample for it."""
        return self.place is not None and self.place.is_prefilling and self.place.num_dispatched == self.num_known

    def make_room(self) -> None:
        """Gives the request tokens of its own, with room for its output, if it has none."""
        if len(self.tokens) < (size := self.num_prompt + self.request.sampling.max_new_tokens):
            own = np.zeros(size, np.int32)
            own[: self.num_known] = self.tokens[: self.num_known]
            self.tokens = own

    def append(self, token: int) -> None:
        """Adds a committed output token."""
        if self.num_known == len(self.tokens):
            self.make_room()
        self.tokens[self.num_known] = token
        if self.layout is not None:
            self.layout.put(self.num_known, token)
        self.num_known += 1

    @property
    def num_output(self) -> int:
        """How many output tokens are committed."""
        return self.num_known - self.num_prompt

    @property
    def num_to_come(self) -> int:
        """How many output tokens may come beside those that are committed or in flight."""
        in_flight = self.place.num_in_flight if self.place else 0
        return self.request.sampling.max_new_tokens - self.num_output - in_flight

    @property
    def match_limit(self) -> int:
        """The most tokens that may come from the cache.

        The last token must run in a step that samples, and so must the tokens whose logprobs are asked for.
        """
        request = self.request
        if request.wants_prompt_logprobs and self.num_output == 0:
            return max(request.logprob_start_len - 1, 0)
        if request.sampling.max_new_tokens == 0:
            return self.num_known
        return self.num_known - 1


def new_running_request(request: Request, arrival: int, now_s: float) -> RunningRequest:
    """The record of a request that arrives now."""
    tokens = request.input_ids.array
    return RunningRequest(request, arrival, tokens, len(tokens), len(tokens), arrived_s=now_s)
