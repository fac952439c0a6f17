"""Where texts can be in a grammar, linked by the tokens that lead from one place to the next.

    place ──token──▶ place ──token──▶ place ──EOS──▶ ended
      │ mask, forced bytes, whether complete: worked out when first asked for

A cursor that goes where another one has been follows links: a dictionary lookup a token. Links are only a memo. When
they take too much memory all are cut, places that no cursor stands on are forgotten, and the frames that only those
used; a place that somebody holds stays the same object.
"""

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakValueDictionary

from jsg.constrained.limits import Limits
from jsg.constrained.machine import Config, Machine
from jsg.constrained.mask_cache import Mask, MaskCache
from jsg.constrained.vocab import Vocabulary
from jsg.errors import GrammarError

MAX_FORCED_BYTES = 4096
_BYTES_PER_PLACE = 700
"""A place, its configuration, and the link to it, about."""


class Place:
    """One configuration of the machine, with what was found out about it. Only `Places` changes it.

    Attributes:
        config: Of the machine; None where the text has ended.
        next: Places by the token that leads there, as far as they were met.
        mask: Which tokens may come next, once known.
        forced: The bytes that must come next, once known.
        is_complete: Whether the text may end here.
    """

    __slots__ = ("__weakref__", "config", "forced", "is_complete", "mask", "next")

    def __init__(self, config: Config | None, is_complete: bool):
        self.config = config
        self.is_complete = is_complete
        self.next: dict[int, Place] = {}
        self.mask: Mask | None = None
        self.forced: bytes | None = None


class Places:
    """All places of one grammar over one vocabulary. Threads may share it.

    Invariants: two places have two configurations, and `ended` has none; what is memoised may be forgotten at any time
    without changing an answer.
    """

    def __init__(self, machine: Machine, vocabulary: Vocabulary, limits: Limits, memo_bytes: int):
        self.machine = machine
        self.vocabulary = vocabulary
        self.masks = MaskCache(machine, vocabulary)
        self._limits = limits
        self._memo_bytes = memo_bytes
        self._lock = threading.RLock()
        self._by_config: WeakValueDictionary[Config, Place] = WeakValueDictionary()
        self._num_links = 0
        self._max_frames = limits.frames
        self._max_states = limits.states // 2
        self.ended = Place(None, is_complete=True)
        self.ended.mask = self.masks.ended
        self.ended.forced = b""
        self.ended.next = dict.fromkeys(vocabulary.eos_ids, self.ended)
        self.start = self._at(machine.start())

    @property
    def num_places(self) -> int:
        """Places that are known now."""
        return len(self._by_config)

    @property
    def num_bytes(self) -> int:
        """Memory of all that was worked out so far, about: the machine's states, places and masks."""
        return self.machine.num_bytes + self.masks.num_bytes + self._num_links * _BYTES_PER_PLACE

    def step(self, place: Place, token_id: int) -> Place | None:
        """The place that a token leads to, or None where it is not allowed."""
        with self._lock:
            if place.config is None:
                return place.next.get(token_id)
            if token_id in self.vocabulary.eos_ids:
                after = self.ended if place.is_complete else None
            else:
                text = self.vocabulary.text_of(token_id)
                with self._states_forgotten_if_full():
                    config = self.machine.advance(place.config, text) if text else None
                after = self._at(config) if config is not None else None
            if after is not None:
                place.next[token_id] = after
                self._num_links += 1
                self._bound()
            return after

    def mask(self, place: Place) -> Mask:
        """Which tokens may come next; see `MaskCache.find` for what it raises."""
        with self._lock:
            mask = place.mask
            if mask is None:
                assert place.config is not None, "a text that has ended has its mask from the start"
                with self._states_forgotten_if_full():
                    mask = place.mask = self.masks.find(place.config, place.is_complete)
                self._bound()
            return mask

    def forced(self, place: Place) -> bytes:
        """The bytes that must come next; at most `MAX_FORCED_BYTES` of them."""
        with self._lock:
            if place.forced is None:
                assert place.config is not None, "where a text has ended nothing is forced, from the start"
                with self._states_forgotten_if_full():
                    place.forced = self.machine.forced_run(place.config, MAX_FORCED_BYTES)
            return place.forced

    def can_continue(self, place: Place) -> bool:
        """Whether anything but the end may come next."""
        with self._lock:
            return place.config is not None and self.machine.can_continue(place.config)

    def forget(self) -> None:
        """Cuts all links, and forgets the masks, and the places and frames that no cursor uses."""
        with self._lock:
            for place in list(self._by_config.values()):
                place.next.clear()
                place.mask = None
            self.masks.forget()
            self._num_links = 0
            # What is still known is held by a cursor. States and frames get new numbers; it stays the same object.
            held = list(self._by_config.values())
            renamed = self.machine.compact([place.config for place in held if place.config is not None])
            self._by_config.clear()
            for place in held:
                assert place.config is not None, "only the end has no configuration, and it has no name"
                place.config = renamed[place.config]
                self._by_config[place.config] = place

    def _at(self, config: Config) -> Place:
        place = self._by_config.get(config)
        if place is None:
            place = Place(config, self.machine.is_accepting(config))
            self._by_config[config] = place
        return place

    @contextlib.contextmanager
    def _states_forgotten_if_full(self) -> Iterator[None]:
        """One text that needs too many states must not leave later texts without any."""
        try:
            yield
        except GrammarError:
            if self.machine.num_states >= self._limits.states:
                self.forget()
            raise

    def _bound(self) -> None:
        """Forgets what is memoised where it takes too much memory, or uses too many frames or states.

        States are forgotten at half of what there may be, so that no text is refused for those that others made.
        """
        num_bytes, machine = self.masks.num_bytes + self._num_links * _BYTES_PER_PLACE, self.machine
        if (
            num_bytes <= self._memo_bytes
            and machine.num_frames <= self._max_frames
            and machine.num_states <= self._max_states
        ):
            return
        self.forget()
        # What cursors still use stays, so that many of them must not mean forgetting at every step.
        self._max_frames = max(self._limits.frames, 2 * machine.num_frames)
        self._max_states = max(self._limits.states // 2, 2 * machine.num_states)
