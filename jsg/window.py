"""Which tokens before it a token sees, in layers where it does not see all. No JAX."""

from typing import Any, NamedTuple


class Window(NamedTuple):
    """The tokens that a token sees: from the `first` one to itself.

    Attributes:
        length: The most of them, with the token itself.
        is_aligned: Windows begin at the multiples of their length, one after another, as those of Llama 4, whose files
            name them chunks. Else each token has a window that ends with it.
    """

    length: int
    is_aligned: bool = False

    def __str__(self) -> str:
        return f"{self.length}, from one multiple of it to the next" if self.is_aligned else str(self.length)

    def first(self, position: Any) -> Any:
        """The first position that a token at `position` sees, or one below 0. An int, or an array of either library."""
        return position - position % self.length if self.is_aligned else position + 1 - self.length
