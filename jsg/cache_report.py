"""Why the prefix cache had no more of a prompt."""

import dataclasses
import enum


class EvictionCause(enum.Enum):
    """For what a prefix was evicted."""

    PROMPT = "prompt"
    ANSWERS = "answers"
    FLUSH = "flush"
    POSITIONS = "positions"
    FAILURE = "failure"


class MissReason(enum.Enum):
    """Why no more of a prompt came from the cache."""

    OFF = "off"
    WINDOW = "window"
    STATE = "state"
    EVICTED = "evicted"
    PICTURE = "picture"
    NAMESPACE = "namespace"
    NEW = "new"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Why the cached prefix of a request ended where it did, at its first admission.

    Attributes:
        matched_tokens: How many prompt tokens were found in the cache.
        matchable_tokens: How many prompt tokens may come from the cache. These are whole pages, without the last token,
            which must run to give logits, and without tokens whose log-probabilities are asked for.
        first_difference: Index of the first prompt token that is not cached; None if all matchable tokens are, or if
            more are than can be used (`unusable_tokens`).
        cached_continuations: At most 8 token ids that are cached at that index instead, in the same namespace.
        evicted_at: When the continuation at that index was evicted, in seconds since the epoch; None if no such
            eviction is remembered.
        evicted_tokens: How many of its tokens were evicted together.
        evicted_for: For what.
        evicted_for_own: Whether that was for a prompt of the same namespace; None if it was for no single prompt.
        unusable_tokens: How many more tokens are cached than can be used, because layers with a window have forgotten
            what is before them, or because no state was kept after them that recurrent layers need.
        why: All this in a word; None if all matchable tokens were found.
    """

    matched_tokens: int
    matchable_tokens: int
    first_difference: int | None = None
    cached_continuations: tuple[int, ...] = ()
    evicted_at: float | None = None
    evicted_tokens: int = 0
    evicted_for: EvictionCause | None = None
    evicted_for_own: bool | None = None
    unusable_tokens: int = 0
    why: MissReason | None = None
