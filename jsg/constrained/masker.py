"""Which tokens may come next in one text, and which bytes must: a cursor on a compiled grammar."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMasker(Protocol):
    """Follows one text, token by token. What it shares with other maskers changes no answer of either.

    Once an EOS token was accepted the text is over, and nothing but EOS tokens may come.
    """

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. False where it is not allowed: then nothing changed."""
        ...

    def fill_mask(self, out: NDArray[np.uint32]) -> bool:
        """Writes which tokens may come next: token t is bit t & 31 of word t >> 5. Changes no state.

        Args:
            out: uint32[W].

        Returns:
            False where every token of the vocabulary is allowed; `out` is then left as it is.

        Raises:
            GrammarError: No token is allowed: the vocabulary cannot spell what the grammar asks for, or the text is
                complete, cannot go on, and there is no EOS token. Or the grammar needs more states than it may have.
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
