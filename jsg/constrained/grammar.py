"""A grammar that is bound to a model's vocabulary, and the maskers that follow texts of it.

    place ──token──▶ place ──token──▶ place ──EOS──▶ ended
      │ mask, forced bytes, whether complete: each is worked out when it is first asked for

A place is where texts have been, and tokens link places. A masker that goes where another one has been follows links,
which takes one dictionary lookup a token. The links are only a memo. When they take too much memory, all of them are
cut, and the places at which no masker is are forgotten with the frames that only they used. A place that a masker
holds stays the same object.
"""

import dataclasses
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.limits import LIMITS, Account, Limits
from jsg.constrained.run.machine import Config, Machine
from jsg.constrained.run.mask_cache import Mask, MaskCache
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError

MEMO_BYTES = 32 << 20
"""Enough for 2 000 masks of 131 072 tokens; one schema in a hundred has more than 170."""
MAX_FORCED_BYTES = 4096
_MAX_CHAR_BYTES = 4
_FULL = 0.5
"""Share of what a machine may make. Above it, what nobody needs is forgotten."""
_LEAST_ROOM = 0.1
_BYTES_PER_PLACE, _BYTES_PER_HEAD = 700, 130
"""About what a place takes with its configuration and the link to it, and each way to read the text."""


class Place:
    """One configuration of the machine, and what is known about it. Only `CompiledGrammar` changes it.

    Attributes:
        config: The configuration; None where the text has ended.
        next: The places that were met after this one, by the token that leads there.
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


class CompiledGrammar:
    """The tables of a grammar bound to a vocabulary, with all places of its texts. Threads may share it.

    States, places and masks are made when a text first needs them and serve all later texts; texts do not disturb
    each other.

    Invariants: two places have two configurations, and `ended` has none; what is memoised may be forgotten at any time
    without changing an answer.
    """

    def __init__(
        self, static: StaticTables, vocabulary: Vocabulary, limits: Limits = LIMITS, memo_bytes: int = MEMO_BYTES
    ):
        """Binds the two. This takes almost no time, because everything is made when it is needed.

        Args:
            static: The tables of `compile_tables`.
            vocabulary: The vocabulary of the model.
            limits: What the states may cost while texts are read.
            memo_bytes: Memory of masks and links; beyond it they are forgotten, and made again when needed.
        """
        self.machine = Machine(static, limits, vocabulary.max_token_len)
        self.vocabulary = vocabulary
        self.masks = MaskCache(self.machine, vocabulary)
        self._static = static
        self._memo_bytes = memo_bytes
        self._lock = threading.RLock()
        self._by_config: WeakValueDictionary[Config, Place] = WeakValueDictionary()
        self._link_bytes = 0
        self._fullest = _FULL
        self.ended = Place(None, is_complete=True)
        self.ended.mask = self.masks.ended
        self.ended.forced = b""
        self.start = self._at(self.machine.start())

    def new_masker(self) -> "GrammarMasker":
        """A masker at the beginning of a text."""
        return GrammarMasker(self)

    @property
    def num_bytes(self) -> int:
        """About how much memory tables, states, places and masks take; it grows while texts are read."""
        return self._static.num_bytes + self.machine.num_bytes + self.masks.num_bytes + self._link_bytes

    def step(self, place: Place, token_id: int, account: Account | None = None) -> Place | None:
        """The place that a token leads to, or None where it is not allowed."""
        with self._lock:
            if place.config is None:
                return place if token_id in self.vocabulary.eos_ids else None
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
        """Cuts all links, and forgets the masks, and the places and frames that no masker uses."""
        with self._lock:
            self.cut()
            self.masks.forget()
            # The places that are still known are held by maskers. States and frames get new numbers.
            held = list(self._by_config.values())
            renamed = self.machine.compact([place.config for place in held if place.config is not None])
            self._by_config.clear()
            for place in held:
                assert place.config is not None, "only the end has no configuration, and it has no name"
                place.config = renamed[place.config]
                self._by_config[place.config] = place

    def cut(self) -> None:
        """Cuts all links. They are cycles, so without this the places wait for the collector when a grammar goes."""
        with self._lock:
            for place in list(self._by_config.values()):
                place.next.clear()
                place.mask = None
            self._link_bytes = 0

    def _after(self, place: Place, text: bytes) -> Place | None:
        """The place that the bytes of a token lead to; None where they cannot come."""
        config = self.machine.advance(place.known_config, text) if text else None
        if config is None:
            return None
        after, forced = self._at(config), place.forced
        # The text that is forced after a token is the rest of the text that was forced before it, if that was not cut
        # off. Where there is no rest the machine is asked: it may have stopped because the run was too much work.
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
                # No text is refused for the states of earlier ones, and none leaves too many to later ones.
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
        # The places of maskers stay. Where they are many, forgetting must not come at every step: half of the room that
        # they leave has to be used first.
        fullness = self.machine.fullness
        self._fullest = max(_FULL, fullness + max(1 - fullness, _LEAST_ROOM) / 2)


class GrammarMasker:
    """Follows one text, token by token, and says which tokens may come next and which bytes must.

    Maskers of a grammar share what is known of its places, and no answer depends on another masker. Once an EOS token
    was accepted, the text is over and only EOS tokens may come. A masker keeps a list of the places that it has passed
    since its last `commit`: a rollback cuts the list, and a fork copies it.
    """

    __slots__ = ("_account", "_num_committed", "_passed", "_place", "grammar")

    def __init__(self, grammar: CompiledGrammar):
        self.grammar = grammar
        self._place = grammar.start
        self._num_committed = 0
        self._passed: list[Place] = []
        self._account = Account()

    @property
    def num_accepted(self) -> int:
        """Tokens that were accepted and not taken back."""
        return self._num_committed + len(self._passed)

    @property
    def num_steps(self) -> int:
        """Work that was done for this text, in the steps of `Limits.mask_steps`; nothing for what was known already."""
        return self._account.num_steps

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. Returns False where the token is not allowed; then nothing has changed."""
        place = self._place
        after = place.next.get(token_id) or self.grammar.step(place, token_id, self._charged())
        if after is None:
            return False
        self._passed.append(place)
        self._place = after
        return True

    def commit(self) -> None:
        """Makes the tokens so far final. It then holds no place before; `forget` takes time for each that is held."""
        self._num_committed += len(self._passed)
        self._passed.clear()

    def fill_mask(self, out: NDArray[np.uint32]) -> bool:
        """Writes which tokens may come next: token t is bit t & 31 of word t >> 5. Changes no state.

        Args:
            out: uint32[W].

        Returns:
            False where every token of the vocabulary is allowed; `out` is then left as it is.

        Raises:
            GrammarError: No token is allowed: the vocabulary cannot spell what the grammar asks for, or the text is
                complete, cannot go on, and there is no EOS token. Or the grammar needs more states, or more work, than
                it may have.
        """
        mask = self._place.mask or self.grammar.mask(self._place, self._charged())
        if mask.key is None:
            return False
        out[...] = mask.words
        return True

    def mask_key(self) -> bytes | None:
        """Names the mask by its content: equal keys, equal masks. None where every token is allowed.

        Changes no state; raises as `fill_mask` does.
        """
        return (self._place.mask or self.grammar.mask(self._place, self._charged())).key

    def forced_bytes(self) -> bytes:
        """The bytes that must come next, b"" where there is a choice or the text may end. Changes no state."""
        forced = self._place.forced
        return self.grammar.forced(self._place, self._charged()) if forced is None else forced

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens that were accepted and are not final.

        Raises:
            ValueError: There are not so many.
        """
        if not 0 <= num_tokens <= len(self._passed):
            raise ValueError(
                f"a rollback must take back no more tokens than the {len(self._passed)} accepted since the last "
                f"commit, and none or more, but got {num_tokens}"
            )
        if num_tokens:
            self._charged()
            self._place = self._passed[-num_tokens]
            del self._passed[-num_tokens:]

    def is_complete(self) -> bool:
        """Whether the text matches the grammar as it is. Changes no state."""
        return self._place.is_complete

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing but EOS can follow. Changes no state."""
        return self._place.is_complete and not self.grammar.can_continue(self._place, self._charged())

    def fork(self) -> "GrammarMasker":
        """Another masker at the place of this one, with the same tokens to take back."""
        other = GrammarMasker(self.grammar)
        other._place = self._place
        other._num_committed, other._passed = self._num_committed, self._passed.copy()
        other._account = dataclasses.replace(self._charged())
        return other

    def _charged(self) -> Account:
        """The account of this text, with the most tokens that it ever had."""
        account = self._account
        account.num_tokens = max(account.num_tokens, self.num_accepted)
        return account
