"""The seam between sessions and the APIs of others: one call, what comes back of it, and how it fails."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

from jsg.lang.ir import Role, SamplingArgs


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture, encoded once, however many calls carry it.

    Attributes:
        media_type: Of its file.
        base64: Its file.
    """

    media_type: str
    base64: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn: texts and pictures in the order of the program; never two texts next to each other."""

    role: Role
    parts: tuple[str | Picture, ...]

    @property
    def text(self) -> str:
        """Its texts."""
        return "".join(part for part in self.parts if isinstance(part, str))


ModelPrompt = str | tuple[Message, ...]
"""What a model is asked to go on with: a text, or turns. Turns that end with the assistant's are gone on with in it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        prompt: Not empty.
        args: `max_tokens` and `temperature` are set; `stop` is what the API itself looks for.
        wants_tokens: The answer's tokens are to be told apart.
        num_alternatives: So many of the most likely tokens are to be reported at each place.
        choices: The answer must be one of these.
        allowed: No other tokens may come; a text API only.
    """

    prompt: ModelPrompt
    args: SamplingArgs
    wants_tokens: bool = False
    num_alternatives: int = 0
    choices: tuple[str, ...] = ()
    allowed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    Attributes:
        text: Its text; may be empty, or not what the answer shows, where it is part of a character.
        logprob: Natural logarithm; None where it is not known.
        top: The most likely tokens at this place, as text → logprob.
    """

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """What one call cost, as the API says."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


def cost_of(bills: Iterable[Bill | None]) -> dict[str, int]:
    """What several calls cost together, and `api_calls`, their number."""
    paid = [bill or Bill() for bill in bills]
    total = {field.name: sum(getattr(bill, field.name) for bill in paid) for field in dataclasses.fields(Bill)}
    return total | {"api_calls": len(paid)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text of one answer.

    Attributes:
        text: May be empty.
        index: Of the answer, with n > 1.
        tokens: Of this text; None where they are not told apart.
        finish: Why the answer ends here: "stop", "length", or the API's own word.
        matched: The stop text that ended it, where the API says so.
        bill: Of the call so far; of the whole call in one of the last deltas.
    """

    text: str = ""
    index: int = 0
    tokens: tuple[Token, ...] | None = None
    finish: str | None = None
    matched: str | None = None
    bill: Bill | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """The prompt with each choice behind it.

    Attributes:
        texts: Their tokens, in the order of the choices.
        bill: Of the call.
    """

    texts: tuple[tuple[Token, ...], ...]
    bill: Bill


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """How one attempt failed.

    Attributes:
        message: What the API said.
        status: Of HTTP; None where there was no answer.
        is_passing: The same call may do better later.
        retry_after_s: What the API asked to wait.
    """

    message: str
    status: int | None = None
    is_passing: bool = False
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What an API can do, as far as sessions care.

    Attributes:
        continues: It goes on in an open turn of the assistant. A text API always does.
        reports_tokens: It tells tokens apart.
        max_stops: Stop texts that it takes in one call.
        takes_blank_stops: Stop texts may be white space only.
        takes_temperature: Its answers can be made more or less likely ones.
        takes_stop_regex: It ends an answer at the match of a pattern.
        has_n: It gives several answers at once.
        forces_choices: It can be held to a list of choices, at the beginning of a turn...
        forces_choices_inside: ... and within one.
        max_alternatives: Most likely tokens that it reports at each place.
    """

    continues: bool
    reports_tokens: bool
    max_stops: int
    takes_blank_stops: bool = True
    takes_temperature: bool = True
    takes_stop_regex: bool = False
    has_n: bool = True
    forces_choices: bool = False
    forces_choices_inside: bool = False
    max_alternatives: int = 0


class Api(Protocol):
    """One API with one model. All state is in its connections."""

    name: str
    """In messages."""
    abilities: Abilities
    failures: tuple[type[Exception], ...]
    """What an attempt raises that `explain` knows."""

    def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """One attempt. Closing it early aborts. Raises UnsupportedError, or one of `failures`."""
        ...

    def explain(self, error: Exception) -> Failure:
        """What one of `failures` means."""
        ...

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """The tokens of the prompt with each choice behind it; None where the API does not tell. Raises as `stream`."""
        ...

    async def models(self) -> list[Any]:
        """The models on offer. Raises one of `failures`."""
        ...

    async def close(self) -> None:
        """Closes all connections, on whatever loop they are."""
        ...

    def shutdown(self) -> None:
        """`close` for code that is no coroutine."""
        ...
