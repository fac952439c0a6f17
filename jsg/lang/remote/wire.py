"""The seam between sessions and the APIs of others: a call, its answer, and its failure."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Protocol

from jsg.lang.words.ir import Role, SamplingArgs


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture, which is encoded once for all calls.

    Attributes:
        media_type: The media type of its file.
        base64: The file in Base64.
    """

    media_type: str
    base64: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn: texts and pictures in the order of the program. No two texts are next to each other."""

    role: Role
    parts: tuple[str | Picture, ...]

    @property
    def text(self) -> str:
        """Its texts as one."""
        return "".join(part for part in self.parts if isinstance(part, str))


ModelPrompt = str | tuple[Message, ...]
"""The prompt of a call: a text, or turns. If the last turn is the assistant's, the model continues it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        prompt: The prompt, which is not empty.
        args: The arguments, with `max_tokens` and `temperature`; `stop` has only the stops that the API looks for.
        wants_tokens: Whether the tokens of the answer are reported.
        num_alternatives: The number of likeliest tokens that are reported at each position.
        choices: The texts of which the answer must be one.
        allowed: The only tokens that may come, on a text API.
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
        text: Its text. For a part of a character it may be empty, or differ from the text of the answer.
        logprob: The natural logarithm of its probability; None where it is not known.
        top: The log-probabilities of the likeliest tokens at this position, by text.
    """

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """The tokens of one call, as the API counts them."""

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
        text: The text, which may be empty.
        index: The index of the answer, with n > 1.
        tokens: The tokens of this text; None where the API does not report them.
        finish: Why the answer ends here: "stop", "length", or the API's own word.
        matched: The stop text that ended it, where the API reports it.
        bill: The cost of the call so far. One of the last deltas has that of the whole call.
    """

    text: str = ""
    index: int = 0
    tokens: tuple[Token, ...] | None = None
    finish: str | None = None
    matched: str | None = None
    bill: Bill | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """The scores of the prompt, alone and with each choice after it.

    Attributes:
        texts: The tokens of the prompt, and then of the prompt with each choice.
        bill: The cost of the call.
    """

    texts: tuple[tuple[Token, ...], ...]
    bill: Bill


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an attempt.

    Attributes:
        message: The message of the API.
        status: The HTTP status; None where there was no answer.
        is_passing: Whether the same call may succeed later.
        retry_after_s: The seconds that the API asked to wait.
    """

    message: str
    status: int | None = None
    is_passing: bool = False
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of an API.

    Attributes:
        continues: Whether it continues an open turn of the assistant. A text API always continues its text.
        reports_tokens: Whether it reports the tokens of an answer.
        max_stops: The largest number of stop texts in a call.
        takes_blank_stops: Whether a stop text may be only white space.
        takes_temperature: Whether it takes a temperature.
        takes_stop_regex: Whether it ends an answer at the match of a pattern.
        has_n: Whether one call can give several answers.
        forces_choices: Whether it can force one of several answers at the beginning of a turn.
        forces_choices_inside: Whether it can do so within a turn.
        max_alternatives: The largest number of likeliest tokens that it reports at each position.
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
    """One API with one model. It has no state but its connections."""

    name: str
    """Its name in messages."""
    abilities: Abilities
    failures: tuple[type[Exception], ...]
    """The exceptions of an attempt that `explain` knows."""

    def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """Makes one attempt. Closing the iterator early aborts. Raises UnsupportedError, or one of `failures`."""
        ...

    def explain(self, error: Exception) -> Failure:
        """Explains one of `failures`."""
        ...

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """Scores choices after a prompt; gives None where the API cannot. Raises the same as `stream`."""
        ...

    async def models(self) -> list[Any]:
        """Gives the models of the API. Raises one of `failures`."""
        ...

    async def close(self) -> None:
        """Closes all connections, of all event loops."""
        ...

    def shutdown(self) -> None:
        """Does the same as `close`, for code that is no coroutine."""
        ...
