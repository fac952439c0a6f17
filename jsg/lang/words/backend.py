"""The seam between programs and the backends that execute them.

A `Backend` opens a `Session` for each stream of a program. The session is the prompt of that stream on that backend.
A backend remembers nothing of a program outside of its sessions, so programs never meet. All runs on one event loop.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video

PromptItem = Text | RoleBegin | RoleEnd | Image | Video
"""An item that extends a prompt without a call of the model."""
OnUnsupported = Literal["error", "warn"]
"""Whether an argument that a backend cannot honour is an error, or is left out with a warning."""


def with_answers(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gives the report about a gen: that of its first answer, and where it has several, all of them as `answers`."""
    return metas[0] | {"answers": list(metas)} if len(metas) > 1 else metas[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a continuation, as it comes.

    Attributes:
        text: New text.
        meta: In the last piece `prompt_tokens`, `completion_tokens`, `cached_tokens`, `finish_reason` and whatever else
            the backend reports; of a gen with n > 1 also `answers`, the report of each.
        others: In the last piece of a gen with n > 1 the texts of the second and further continuations.
    """

    text: str
    meta: dict[str, Any] | None = None
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The result of a select.

    Attributes:
        choice: One of the choices. The prompt of the session now ends with it.
        probabilities: The probability of each choice; they sum to 1. None where the backend does not know.
        meta: As in `Piece`.
    """

    choice: str
    probabilities: tuple[float, ...] | None
    meta: dict[str, Any]


class Session(Protocol):
    """The prompt of one stream. A method is called only when the call before has ended."""

    async def extend(self, item: PromptItem) -> str:
        """Appends an item; gives the text that this added to the prompt, markers of a turn included. Calls no model."""
        ...

    def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        """Continues the prompt, which then ends with the (first) continuation. Closing the iterator early aborts.

        Raises:
            JsgError: An argument is wrong or not supported, or the backend failed.
        """
        ...

    async def select(self, select: Select) -> Selection:
        """Chooses one of the choices, with which the prompt then ends. Raises the same as `generate`."""
        ...

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "Sequence[Session]":
        """Makes `size` sessions that begin as this one is now. Computes the common prompt first if that saves work."""
        ...

    async def join(self, branches: "Sequence[Session]") -> None:
        """Appends what each branch has after the common prompt. No branch sees another one."""
        ...

    async def close(self) -> None:
        """Releases what the session holds. A second call does nothing."""
        ...


class BlockSession(Session, Protocol):
    """A session that needs a whole turn of the assistant before it calls the model.

    The stream collects what a program appends from `RoleBegin("assistant")` on, and hands it over at once when the turn
    ends or somebody waits for a variable of it.
    """

    @property
    def wants_blocks(self) -> bool:
        """Whether the stream has to call `generate_block`."""
        ...

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        """Continues the open turn by `items`; gives for each `Gen` one last `Piece`, which has its whole text.

        Raises the same as `generate`.
        """
        ...


class HintSession(Session, Protocol):
    """A session of a backend that keeps prefixes."""

    async def hint(self) -> None:
        """Computes the prompt and keeps it cached until `close`, for prompts that begin with it.

        Neither the prompt changes nor the way in which later text is encoded. Returns when the prompt is computed, or
        when the backend has no room for it, which is no error.
        """
        ...


class CopySession(Session, Protocol):
    """A session that can be copied before it calls the model."""

    def copy(self) -> Session:
        """Gives a session of another run that begins as this one is now."""
        ...


class BatchSession(Session, Protocol):
    """A session of a backend that can make use of what the runs of a batch have in common.

    Attributes:
        own_texts: Where one of these begins, the prompt parts from those of the other runs.
    """

    own_texts: frozenset[str]


class Backend(Protocol):
    """A model, or an API, that executes programs."""

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """Opens an empty session.

        Args:
            num_api_spec_tokens: New tokens that one call may ask for beyond its gen, to answer later gens with. A
                backend that keeps what it has computed has no use for it, and ignores it.

        Raises:
            JsgError: The backend cannot open one.
        """
        ...

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False while requests run. Raises JsgError where there is no access to a cache."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Gives what is known of the model and the server."""
        ...

    async def close(self) -> None:
        """Closes all connections. Sessions must be closed before."""
        ...


class BackendSource(Protocol):
    """An object that has a backend but is none: `jsg.Engine`, `jsg.Runtime`."""

    def as_backend(self) -> Backend:
        """Gives the backend, which is the same one each time."""
        ...
