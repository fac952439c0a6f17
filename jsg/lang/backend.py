"""The seam between programs and what executes them.

A `Backend` opens a `Session` for each stream of a program; the session is that stream's prompt on that backend, and
all that a backend remembers of a program is in its sessions, so programs never meet. Everything runs on one event loop.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

from jsg.lang.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video

PromptItem = Text | RoleBegin | RoleEnd | Image | Video
"""What extends a prompt without asking the model."""
OnUnsupported = Literal["error", "warn"]
"""What to do with an argument that a backend cannot honour."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What came of a continuation since the piece before.

    Attributes:
        text: New text.
        meta: In the last piece: `prompt_tokens`, `completion_tokens`, `cached_tokens`, `finish_reason` and what else
            the backend reports.
        others: In the last piece of a gen with n > 1: the texts of the second and further continuations.
    """

    text: str
    meta: dict[str, Any] | None = None
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen.

    Attributes:
        choice: One of the choices; the session goes on behind it.
        probabilities: Of each choice, in their order; they sum to 1. None where the backend cannot tell.
        meta: As in `Piece`.
    """

    choice: str
    probabilities: tuple[float, ...] | None
    meta: dict[str, Any]


class Session(Protocol):
    """One stream's prompt. Its methods are called one at a time, each when the one before has ended."""

    async def extend(self, item: PromptItem) -> str:
        """Appends; gives the text that this added to the prompt, markers of a turn included. Calls no model."""
        ...

    def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        """Continues the prompt, which then ends with the (first) continuation. Closing it early aborts.

        Raises:
            JsgError: An argument is wrong or not supported, or the backend failed.
        """
        ...

    async def select(self, select: Select) -> Selection:
        """Chooses; the prompt then ends with the choice. Raises as `generate`."""
        ...

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "Sequence[Session]":
        """So many sessions that begin as this one is now. Computes the common prompt first where that saves work."""
        ...

    async def join(self, branches: "Sequence[Session]") -> None:
        """Appends what each branch has behind the common prompt, each as it would be without the others."""
        ...

    async def close(self) -> None:
        """Gives back what it holds. A second time does nothing."""
        ...


class BlockSession(Session, Protocol):
    """A session that would rather see a whole turn of the assistant before it asks the model.

    The stream collects what a program appends between `RoleBegin("assistant")` and its end, or until somebody waits for
    one of its variables, and hands it over at once.
    """

    @property
    def wants_blocks(self) -> bool:
        """Whether `generate_block` is to be used."""
        ...

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        """Continues the open turn by these; one last `Piece`, with the whole text, for each `Gen`.

        Raises as `generate`.
        """
        ...


class HintSession(Session, Protocol):
    """A session whose backend keeps prefixes."""

    async def hint(self) -> None:
        """Computes the prompt as it is now, so that what begins like it finds it cached, and keeps it until `close`.

        The prompt does not change by it, nor how what follows is encoded. Ends when it is computed, or when the backend
        has no room for it: never an error.
        """
        ...


class Backend(Protocol):
    """What executes programs."""

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """An empty session.

        Args:
            num_api_spec_tokens: New tokens that one call may ask for beyond the gen at hand, to answer later gens.

        Raises:
            JsgError: The backend has no use for an argument.
        """
        ...

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False where requests run. Raises JsgError where there is no cache to reach."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """What is known of model and server."""
        ...

    async def close(self) -> None:
        """Closes connections. Sessions must have been closed."""
        ...


class BackendSource(Protocol):
    """Something that is no backend itself but has one: `jsg.Engine`, `jsg.Runtime`."""

    def as_backend(self) -> Backend:
        """The backend, always the same one."""
        ...
