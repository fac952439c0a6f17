"""What the readers of one call have in common: its text and its arguments, as far as they were read."""


class ReadCall:
    """A call as far as it has been read.

    Invariant: the fragments that were taken, and what is left to take, are together the JSON of the arguments.

    Attributes:
        name: The tool's name, once it is known.
        has_arguments: Whether the arguments have begun.
    """

    def __init__(self, name: str | None = None) -> None:
        """Begins a call, whose name may be known."""
        self.name = name
        self.has_arguments = name is not None
        self._raw: list[str] = []
        self._fragments: list[str] = []

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def num_read(self) -> int:
        """The number of characters that were read."""
        return len(self._raw)

    def take_fragment(self) -> str:
        """The part of the arguments, as JSON, that was read since the last call of this method."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        return fragment
