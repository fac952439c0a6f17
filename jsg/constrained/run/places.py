"""The places of a grammar that texts have been in, linked by the tokens that lead from one to the next.

    place ──token──▶ place ──token──▶ place ──EOS──▶ ended
      │ mask, forced bytes, whether complete: each is worked out when it is first asked for

A cursor that goes where another one has been follows links, which takes one dictionary lookup a token. The links are
only a memo. When they take too much memory, all of them are cut, and places that no cursor stands on are forgotten with
the frames that only they used. A place that somebody holds stays the same object.
"""

import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from jsg.constrained.limits import Account
from jsg.constrained.run.machine import Config, Machine
from jsg.constrained.run.mask_cache import Mask, MaskCache
from jsg.constrained.run.vocab import Vocabulary
from jsg.errors import GrammarError

MAX_FORCED_BYTES = 4096
_MAX_CHAR_BYTES = 4
_FULL = 0.5
"""Of what a machine may make; above it what nobody needs is forgotten."""
_LEAST_ROOM = 0.1
_BYTES_PER_PLACE, _BYTES_PER_HEAD = 700, 130
"""A place, its configuration, and the link to it, about: for each, and for each way to read the text."""


class Place:
    """One configuration of the machine, and what is known about it. Only `Places` changes it.

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

    @property
    def known_config(self) -> Config:
        """The configuration of a text that has not ended."""
        assert self.config is not None, "a text that has ended has its mask, and what is forced, from the start"
        return self.config


class Places:
    """All places of one grammar over one vocabulary. Threads may share it.

    Invariants: two places have two configurations, and `ended` has none; what is memoised may be forgotten at any time
    without changing an answer.
    """

    def __init__(self, machine: Machine, vocabulary: Vocabulary, memo_bytes: int):
        self.machine = machine
        self.vocabulary = vocabulary
        self.masks = MaskCache(machine, vocabulary)
        self._memo_bytes = memo_bytes
        self._lock = threading.RLock()
        self._by_config: WeakValueDictionary[Config, Place] = WeakValueDictionary()
        self._link_bytes = 0
        self._fullest = _FULL
        self.ended = Place(None, is_complete=True)
        self.ended.mask = self.masks.ended
        self.ended.forced = b""
        self.ended.next = dict.fromkeys(vocabulary.eos_ids, self.ended)
        self.start = self._at(machine.start())

    @property
    def num_bytes(self) -> int:
        """About how much memory states, places and masks take."""
        return self.machine.num_bytes + self.masks.num_bytes + self._link_bytes

    def step(self, place: Place, token_id: int, account: Account | None = None) -> Place | None:
        """The place that a token leads to, or None where it is not allowed."""
        with self._lock:
            if place.config is None:
                return place.next.get(token_id)
            if token_id in self.vocabulary.eos_ids:
                after = self.ended if place.is_complete else None
            else:
                after = self._worked_out(account, lambda: self._after(place, self.vocabulary.text_of(token_id)))
            if after is not None:
                place.next[token_id] = after
                self._link_bytes += _BYTES_PER_PLACE + _BYTES_PER_HEAD * len(after.config or ())
                self._bound()
            return after

    def mask(self, place: Place, account: Account | None = None) -> Mask:
        """Which tokens may come next; see `MaskCache.find` for what it raises."""
        with self._lock:
            mask = place.mask
            if mask is None:
                mask = self._worked_out(account, lambda: self.masks.find(place.known_config, place.is_complete))
                place.mask = mask
                self._bound()  # which may forget it
            return mask

    def forced(self, place: Place, account: Account | None = None) -> bytes:
        """The bytes that must come next; at most `MAX_FORCED_BYTES` of them."""
        with self._lock:
            forced = place.forced
            if forced is None:
                run = self.machine.forced_run
                forced = place.forced = self._worked_out(account, lambda: run(place.known_config, MAX_FORCED_BYTES))
                self._link_bytes += len(forced)
                self._bound()
            return forced

    def can_continue(self, place: Place, account: Account | None = None) -> bool:
        """Whether anything but the end may come next."""
        with self._lock:
            return place.config is not None and self._worked_out(
                account, lambda: self.machine.can_continue(place.known_config)
            )

    def forget(self) -> None:
        """Cuts all links, and forgets the masks, and the places and frames that no cursor uses."""
        with self._lock:
            for place in list(self._by_config.values()):
                place.next.clear()
                place.mask = None
            self.masks.forget()
            self._link_bytes = 0
            # What is still known is held by a cursor. States and frames get new numbers; it stays the same object.
            held = list(self._by_config.values())
            renamed = self.machine.compact([place.config for place in held if place.config is not None])
            self._by_config.clear()
            for place in held:
                assert place.config is not None, "only the end has no configuration, and it has no name"
                place.config = renamed[place.config]
                self._by_config[place.config] = place

    def _after(self, place: Place, text: bytes) -> Place | None:
        """Where the bytes of a token lead to."""
        config = self.machine.advance(place.known_config, text) if text else None
        if config is None:
            return None
        after, forced = self._at(config), place.forced
        # What is forced after a token is the rest of what was before it, unless that was cut off, or is shorter. Where
        # there is no rest it is asked anew: the run may have been too much work to follow to its end.
        is_whole = forced and len(forced) <= MAX_FORCED_BYTES - _MAX_CHAR_BYTES
        if after.forced is None and forced and is_whole and forced.startswith(text) and forced != text:
            after.forced = forced[len(text) :]
            self._link_bytes += len(after.forced)
        return after

    def _at(self, config: Config) -> Place:
        place = self._by_config.get(config)
        if place is None:
            place = Place(config, self.machine.is_accepting(config))
            self._by_config[config] = place
        return place

    def _worked_out[T](self, account: Account | None, work: Callable[[], T]) -> T:
        """The result of `work`, which is paid for. It may be called twice; states then have other numbers."""
        for is_again in (False, True):
            try:
                with self.machine.paid_by(account):
                    return work()
            except GrammarError:
                # No text is refused for what others have left behind, and none leaves too much to others.
                needs_room = self.machine.needs_room
                if self.machine.fullness > _FULL:
                    self.forget()
                if is_again or not needs_room or self.machine.fullness > _FULL:
                    raise
        raise AssertionError("the second time it succeeds or raises")

    def _bound(self) -> None:
        """Forgets everything that is memoised where it takes too much memory, or uses too many frames or states.

        States are forgotten at half of what there may be, so that no text is refused for those that others made.
        """
        num_bytes = self.masks.num_bytes + self._link_bytes
        if num_bytes <= self._memo_bytes and self.machine.fullness <= self._fullest:
            return
        self.forget()
        # What cursors still use stays, so that many of them must not mean forgetting at every step: next time half of
        # what room they leave has to be used.
        fullness = self.machine.fullness
        self._fullest = max(_FULL, fullness + max(1 - fullness, _LEAST_ROOM) / 2)
