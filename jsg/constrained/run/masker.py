"""A cursor on a compiled grammar: it says which tokens may come next in one text, and which bytes must."""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.limits import Account
from jsg.constrained.run.places import Place, Places


class TokenMasker(Protocol):
    """Follows one text, token by token. Maskers may share memory, and no answer depends on another masker.

    Once an EOS token was accepted, the text is over and only EOS tokens may come.
    """

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. Returns False where the token is not allowed; then nothing has changed."""
        ...

    def fill_mask(self, out: NDArray[np.uint32]) -> bool:
        """Writes which tokens may come next: token t is bit t & 31 of word t >> 5. Changes no state.

        Args:
            out: uint32[W].

        Returns:
            False where every token of the vocabulary is allowed; `out` is then left as it is.

        Raises:
            GrammarError: No token is allowed: the vocabulary cannot spell what the grammar asks for, or the text is
                complete, cannot go on, and there is no EOS token. Or the grammar needs more states, or
                more work, than it may have.
        """
        ...

    def mask_key(self) -> bytes | None:
        """Names the mask by its content: equal keys, equal masks. None where every token is allowed.

        Changes no state; raises as `fill_mask` does.
        """
        ...

    def forced_bytes(self) -> bytes:
        """The bytes that must come next, b"" where there is a choice or the text may end. Changes no state."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens that were accepted.

        Raises:
            ValueError: There are not so many.
        """
        ...

    def is_complete(self) -> bool:
        """Whether the text matches the grammar as it is. Changes no state."""
        ...


class GrammarMasker:
    """A `TokenMasker` on the places of a compiled grammar.

    It keeps a list of the places that it has passed. To go back it forgets the last ones, and a fork copies the list.

    Attributes:
        places: Shared with all maskers of the grammar.
    """

    __slots__ = ("_account", "_passed", "_place", "places")

    def __init__(self, places: Places):
        self.places = places
        self._place = places.start
        self._passed: list[Place] = []
        self._account = Account()

    @property
    def num_accepted(self) -> int:
        """Tokens that were accepted and not taken back."""
        return len(self._passed)

    @property
    def num_steps(self) -> int:
        """Work that was done for this text, in the steps of `Limits.mask_steps`; nothing for what was known already."""
        return self._account.num_steps

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; see `TokenMasker.accept`."""
        place = self._place
        after = place.next.get(token_id) or self.places.step(place, token_id, self._charged())
        if after is None:
            return False
        self._passed.append(place)
        self._place = after
        return True

    def fill_mask(self, out: NDArray[np.uint32]) -> bool:
        """Writes which tokens may come next; see `TokenMasker.fill_mask`."""
        mask = self._place.mask or self.places.mask(self._place, self._charged())
        if mask.key is None:
            return False
        out[...] = mask.words
        return True

    def mask_key(self) -> bytes | None:
        """Names the mask by its content; see `TokenMasker.mask_key`."""
        return (self._place.mask or self.places.mask(self._place, self._charged())).key

    def forced_bytes(self) -> bytes:
        """The bytes that must come next; see `TokenMasker.forced_bytes`."""
        forced = self._place.forced
        return self.places.forced(self._place, self._charged()) if forced is None else forced

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens; see `TokenMasker.rollback`."""
        if not 0 <= num_tokens <= len(self._passed):
            raise ValueError(
                f"a rollback must take back no more tokens than the {len(self._passed)} accepted, and none or more, "
                f"but got {num_tokens}"
            )
        if num_tokens:
            self._charged()
            self._place = self._passed[-num_tokens]
            del self._passed[-num_tokens:]

    def is_complete(self) -> bool:
        """Whether the text matches the grammar as it is; see `TokenMasker.is_complete`."""
        return self._place.is_complete

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing but EOS can follow. Changes no state."""
        return self._place.is_complete and not self.places.can_continue(self._place, self._charged())

    def fork(self) -> "GrammarMasker":
        """Another masker that stands where this one does, with the same tokens to take back."""
        other = GrammarMasker(self.places)
        other._place = self._place
        other._passed = self._passed.copy()
        other._account = dataclasses.replace(self._charged())
        return other

    def _charged(self) -> Account:
        """The account of this text, with all tokens that it ever had."""
        account = self._account
        account.num_tokens = max(account.num_tokens, len(self._passed))
        return account
