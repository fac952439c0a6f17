"""A backend for the tests of programs: it gives the answers that a test has written, and runs no model.

    with ScriptedBackend({"The capital of France is": " Paris."}) as backend:
        assert capital.run("France", backend=backend)["city"] == " Paris"

The end of the `with` block checks that the program has made the calls for which the script has answers.
"""

import asyncio
import dataclasses
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast, final

from jsg.constrained.compiler import compile_tables
from jsg.constrained.report import check_text
from jsg.constrained.run.machine import Machine
from jsg.constrained.stop_patterns import stop_patterns
from jsg.errors import ScriptError
from jsg.lang.tokens.session import sampling_of
from jsg.lang.words.backend import Piece, PromptItem, Selection, with_answers
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video
from jsg.processing.parts import file_size
from jsg.processing.stop_strings import find_stops
from jsg.types import GrammarSpec, SamplingParams

type Answer = str | Sequence[str] | Piece | Exception
"""What the model says: a text, which comes token by token; its pieces; a `Piece` with more of the report; a failure."""
type Choice = str | Exception
"""One of the choices of a select, or a failure."""
type Script[What, Said] = (
    str | Piece | Exception | Sequence[Said] | Mapping[str, Said] | Callable[[str, What], Said | Awaitable[Said]]
)
"""What is said to each call: always the same, one after the other, by the end of the prompt, or by a function."""

_SHOWN_CHARS = 200  # of the end of a prompt, in an error
_MARKERS = re.compile(r"(?:\[/?(?:system|user|assistant)\])+\Z")
_TOKEN = re.compile(r"\s*\S+|\s+\Z")


@final
class Call:
    """A call of the model.

    Attributes:
        kind: "generate" or "select".
        what: The `Gen` or `Select`, with the arguments of its run: `what.name`, `what.args.temperature`.
    """

    def __init__(
        self, kind: str, prompt: str | None, what: Any, items: "Sequence[PromptItem] | Item | None" = None
    ) -> None:
        """Notes a call. A `prompt` that is None is written when it is read, and so is what is after an `Item`."""
        self.kind = kind
        self.what = what
        self._prompt = prompt
        self._items = items

    def __repr__(self) -> str:
        return f"Call({self.kind!r}, {self.prompt!r}, {self.what!r})"

    @property
    def prompt(self) -> str:
        """The text before the answer.

        A turn is written `[user]...[/user]`, a picture of 5 bytes `<image 5>`, and a video of 5 bytes with 8 frames
        `<video 5/8>`.
        """
        return "".join(map(written, self.items)) if self._prompt is None else self._prompt

    @property
    def items(self) -> tuple[PromptItem, ...]:
        """All that the prompt has, in order. What the model wrote is `Text`."""
        return tuple(self._items if isinstance(self._items, Sequence) else _items_to(self._items))

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt."""
        return self._items.num_tokens if isinstance(self._items, Item) else 0

    def ends(self, length: int) -> str:
        """The end of the prompt, of at least so many characters if it has them."""
        texts, item = list[str](), self._items
        while isinstance(item, Item) and length > 0:
            texts.append(written(item.item))
            length -= len(texts[-1])
            item = item.before
        return "".join(reversed(texts))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Item:
    """An item of a prompt, after all items before it, which several prompts may share.

    Attributes:
        item: The item.
        before: The item before it.
        num_words, ends_in: The words up to its end, and the kind of the last character.
    """

    item: PromptItem
    before: "Item | None"
    num_words: int
    ends_in: Literal["", "word", "space"]

    @classmethod
    def behind(cls, before: "Item | None", item: PromptItem) -> "Item":
        """Makes an item after another one."""
        text, ends_in = written(item), before.ends_in if before is not None else ""
        words = len(text.split())
        goes_on = ends_in == "word" and text[:1].strip() != ""  # the word before goes on
        if text:
            ends_in = "space" if text[-1].isspace() else "word"
        return cls(item, before, (0 if before is None else before.num_words) + words - goes_on, ends_in)

    @property
    def num_tokens(self) -> int:
        """The tokens of all text up to its end, as `tokens_of` counts them."""
        return self.num_words + (self.ends_in == "space")


def _items_to(end: "Item | None", start: "Item | None" = None) -> list[PromptItem]:
    """Gives the items after one, up to another one."""
    items = list[PromptItem]()
    while end is not start and end is not None:
        items.append(end.item)
        end = end.before
    return items[::-1]


@final
class ScriptedBackend:
    """A backend that answers from a script. It runs everything that a backend runs, and one may be used many times.

    An answer ends as one of a model would: before a text of `stop` or a match of `stop_regex`, and at `max_tokens`. It
    must have the form that the gen asks for. The other arguments of a gen change nothing. A token is a word with the
    white space before it, or one of the pieces of an answer; reports count these, and none is cached.

    Attributes:
        calls: The calls of the model, in the order in which they began.
        aborted: The gens whose call was cancelled before its end.
    """

    def __init__(self, answers: Script[Gen, Answer] | None = None, choices: Script[Select, Choice] | None = None):
        """Makes a backend.

        Args:
            answers: The answers of gens. A text or an exception is the answer of each gen, and a sequence has those of
                one call after the other. A mapping has them by the end of the prompt, without the markers of turns
                after it; the longest end counts, and "" is the end of every prompt. A function, `def` or `async def`,
                is given prompt and `Gen`. For branches and batches, whose calls have no order, use one of the latter
                two. An exception that is an answer is raised. A gen with n > 1 takes n answers.
            choices: The choices of selects and the labels of decisions, in the same way.
        """
        self.calls: list[Call] = []
        self.aborted: list[Gen] = []
        self._answers = _Answers("answers", answers)
        self._choices = _Answers("choices", choices)
        self._failures: list[ScriptError] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()

    def check(self) -> None:
        """Checks that calls and script have met; a `with` block does so at its end. Wait for the end of the runs first.

        Raises:
            ScriptError: A call found no answer, whoever read this error, or a part of the script was not used.
        """
        if self._failures:
            raise self._failures[0]
        if left := [*self._answers.left(), *self._choices.left()]:
            raise ScriptError(
                f"the script was not used up, it still has: {'; '.join(left)}. Leave this out, or read the last "
                "variable or call `state.sync()` before, because a run returns before its calls are made"
            )

    def open(self, *, num_api_spec_tokens: int | None = None) -> "ScriptedSession":
        """Opens an empty prompt. `num_api_spec_tokens` never changes an answer."""
        return ScriptedSession(self)

    async def flush_cache(self) -> bool:
        """Does nothing, because nothing is cached."""
        return True

    @property
    def model_info(self) -> dict[str, Any]:
        """The name of the model, "scripted"."""
        return {"model_path": "scripted"}

    async def server_info(self) -> dict[str, Any]:
        """Gives `model_info`."""
        return self.model_info

    async def close(self) -> None:
        """Does nothing, because nothing is open."""

    async def _take(self, call: Call) -> Any:
        script = self._answers if isinstance(call.what, Gen) else self._choices
        try:
            return await script.take(call)
        except ScriptError as error:
            self._failures.append(error)
            raise


@final
class ScriptedSession:
    """A prompt, which is kept as text."""

    def __init__(self, backend: ScriptedBackend, end: Item | None = None):
        """The prompt goes on after an item."""
        self._backend = backend
        self._end = self._fork = end

    @property
    def items(self) -> tuple[PromptItem, ...]:
        """All that it has, in order."""
        return tuple(_items_to(self._end))

    @property
    def text(self) -> str:
        """The prompt as `Call.prompt` shows it."""
        return "".join(map(written, self.items))

    def _add(self, item: PromptItem) -> None:
        self._end = Item.behind(self._end, item)

    async def extend(self, item: PromptItem) -> str:
        """Appends an item."""
        self._add(item)
        return written(item)

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        """Continues the prompt by the answer of the script."""
        call = self._called("generate", gen)
        is_done = False
        try:
            replies = [await self._reply(call) for _ in range(gen.args.n or 1)]
            reply, others = replies[0], tuple(other.text for other in replies[1:])
            for piece in reply.pieces[:-1]:
                yield Piece(piece)
                await asyncio.sleep(0)  # so that the program goes on between two tokens
            self._add(Text(reply.text))
            is_done = True
            meta = with_answers([reply.meta for reply in replies])
            yield Piece(reply.pieces[-1] if reply.pieces else "", meta, others)
        except (GeneratorExit, asyncio.CancelledError):
            if not is_done:
                self._backend.aborted.append(gen)
            raise

    async def select(self, select: Select) -> Selection:
        """Chooses what the script says; its probability is 1."""
        call = self._called("select", select)
        choice = await self._backend._take(call)
        if choice not in select.choices:
            raise self._failed(call, f"{choice!r}, which is none of the choices {', '.join(map(repr, select.choices))}")
        self._add(Text(choice))
        meta = _meta(call, len(tokens_of(choice)), {"type": "stop"})
        return Selection(choice, tuple(float(one == choice) for one in select.choices), meta)

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[ScriptedSession]":
        """Copies the prompt. A text has no positions, so offsets change nothing."""
        return [ScriptedSession(self._backend, self._end) for _ in range(size)]

    async def join(self, branches: "Sequence[ScriptedSession]") -> None:
        """Appends what each branch has after the fork."""
        for branch in branches:
            for item in _items_to(branch._end, branch._fork):
                self._add(item)

    async def close(self) -> None:
        """Does nothing, because nothing is held."""

    def _called(self, kind: Literal["generate", "select"], what: Gen | Select) -> Call:
        call = Call(kind, None, what, self._end)
        self._backend.calls.append(call)
        return call

    async def _reply(self, call: Call) -> "_Reply":
        said = await self._backend._take(call)
        if not _is_answer(said):
            raise self._failed(call, f"{said!r}, which is no answer: that is a text, a list of its pieces or a Piece")
        reply, form = _reply(said, call)
        if form is not None:
            raise self._failed(call, f"{reply.text!r}, which {form}")
        return reply

    def _failed(self, call: Call, said: str) -> ScriptError:
        error = ScriptError(f"the script says {said}; it is said to {_described(call)}")
        self._backend._failures.append(error)
        return error


@final
class _Answers:
    """The script of one kind of call."""

    def __init__(self, name: str, script: Script[Any, Any] | None):
        is_known = isinstance(script, str | Piece | Exception | Sequence | Mapping | None) or callable(script)
        if not is_known or isinstance(script, type):
            raise ScriptError(
                f"{name} must be a text, an exception, a list of texts, a dict of them or a function, but got a "
                f"{type(script).__name__}"
            )
        self._name = name
        self._script = script
        self._unused = dict.fromkeys(script) if isinstance(script, Mapping) else {}
        self._lengths = sorted({len(end) for end in self._unused}, reverse=True)
        self._num_taken = 0

    async def take(self, call: Call) -> Any:
        said = self._found(call)
        if inspect.isawaitable(said):
            said = await said
        if isinstance(said, Exception):
            raise said
        return said

    def _found(self, call: Call) -> Any:
        match self._script:
            case str() | Exception() | Piece():
                return self._script
            case Mapping():
                return self._script[self._end_of(call)]
            case Sequence():
                if self._num_taken == len(self._script):
                    raise self._has_none(call, f"all {self._num_taken} that it has were taken; add one")
                self._num_taken += 1
                return self._script[self._num_taken - 1]
            case None:
                raise self._has_none(call, f"it has none at all; give {self._name}= to ScriptedBackend")
        return cast(Callable[..., Any], self._script)(call.prompt, call.what)

    def _end_of(self, call: Call) -> str:
        ends = cast(Mapping[str, Any], self._script)
        longest, length = max(self._lengths, default=0), 0
        tail = bare = ""
        while len(bare) < longest:  # the markers of turns after it may be any number
            length = 2 * length + longest
            tail = call.ends(length)
            bare = _MARKERS.sub("", tail)
            if len(tail) < length:
                break
        for length in self._lengths:
            for prompt in (tail, bare):
                end = prompt[max(0, len(prompt) - length) :]
                if len(end) == length and end in ends:
                    self._unused.pop(end, None)
                    return end
        shown = ", ".join(map(repr, ends)) or "none"
        raise self._has_none(call, f'its ends of prompts are {shown}; add one, or "" for every other prompt')

    def _has_none(self, call: Call, rest: str) -> ScriptError:
        return ScriptError(f"of {self._name} the script has none for {_described(call)}; {rest}")

    def left(self) -> list[str]:
        """Gives what was not used, in words."""
        left: Sequence[Any] = list(self._unused)
        if isinstance(self._script, Sequence) and not isinstance(self._script, str):
            left = self._script[self._num_taken :]
        return [f"{self._name} {', '.join(map(repr, left))}"] if left else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    """An answer as far as it goes.

    Attributes:
        pieces: Its text.
        meta: Its report.
    """

    pieces: Sequence[str]
    meta: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _is_answer(said: Any) -> bool:
    if isinstance(said, Sequence) and not isinstance(said, str):
        return all(isinstance(piece, str) for piece in said)
    return isinstance(said, str | Piece)


def _reply(answer: Answer, call: Call) -> tuple[_Reply, str | None]:
    """Gives an answer as far as a model would give it, and what is wrong with it."""
    more = (answer.meta or {}) if isinstance(answer, Piece) else {}
    text = answer.text if isinstance(answer, Piece) else answer
    pieces = tokens_of(text) if isinstance(text, str) else list(cast(Sequence[str], text))
    sampling = SamplingParams.from_dict(sampling_of(call.what.args))
    kept, reason = _kept(pieces, sampling)
    reply = _Reply(kept, _meta(call, len(kept), reason) | more)
    if call.what.args.return_logprob and "output_token_logprobs" not in more:
        return reply, "has no output_token_logprobs, but the gen has return_logprob; say Piece(text, {...}) with them"
    return reply, _wrong_form(reply.text, sampling, is_cut=reason["type"] == "length")


def _kept(pieces: Sequence[str], sampling: SamplingParams) -> tuple[Sequence[str], dict[str, Any]]:
    """Gives the pieces before a stop and within `max_new_tokens`, and the reason for the end."""
    limit = sampling.max_new_tokens
    shown = pieces[:limit]
    text = "".join(shown)
    if (stop := _first_stop(text, sampling)) is not None:
        end, matched = stop
        kept, start = [], 0
        for piece in shown:
            kept.append(piece[: end - start])
            start += len(kept[-1])
        return [piece for piece in kept if piece], {"type": "stop", "matched": matched}
    return shown, {"type": "stop"} if len(pieces) <= limit else {"type": "length", "length": limit}


def _first_stop(text: str, sampling: SamplingParams) -> tuple[int, str] | None:
    """Where the first match of a stop begins, and the string or pattern."""
    finder = find_stops(sampling.stop, stop_patterns(sampling))
    num_read, found_len = 0, 0
    while num_read < len(text) and not found_len:
        found_len = finder.advance(text[num_read])
        num_read += 1
    found_len = found_len or finder.finish()
    end = num_read - finder.len_after
    return (end - found_len, finder.pattern or text[end - found_len : end]) if found_len else None


def _wrong_form(text: str, sampling: SamplingParams, *, is_cut: bool) -> str | None:
    """Says what is wrong with an answer that the grammar of its gen does not allow."""
    grammar = sampling.grammar
    if not isinstance(grammar, GrammarSpec):
        return None
    if grammar.kind == "json_schema":  # as other backends write it, too
        grammar = dataclasses.replace(grammar, whitespace="flexible", property_order="free")
    data = text.encode()
    report = check_text(Machine(compile_tables(grammar)), data)
    if report.is_match or (is_cut and report.num_read == len(data)):
        return None
    what = f"{grammar.kind} of its gen"
    if report.num_read == len(data):
        return f"is only the beginning of a text that the {what} allows"
    return f"the {what} does not allow behind {data[: report.num_read].decode(errors='replace')!r}"


def _meta(call: Call, num_tokens: int, reason: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": call.num_tokens,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "finish_reason": reason,
    }


def _described(call: Call) -> str:
    kind = "gen" if call.kind == "generate" else "select"
    name = "without a name" if call.what.name is None else repr(call.what.name)
    end = call.ends(_SHOWN_CHARS + 1)
    start = "…" if len(end) > _SHOWN_CHARS else ""
    return f"the {kind} {name}, whose prompt ends with {start + end[-_SHOWN_CHARS:]!r}"


def tokens_of(text: str) -> list[str]:
    """Gives the tokens of a scripted backend: the words, each with the white space before it."""
    return _TOKEN.findall(text)


def written(item: PromptItem) -> str:
    """Gives the text that stands for an item in a scripted prompt."""
    match item:
        case Text(text):
            return text
        case RoleBegin(role):
            return f"[{role}]"
        case RoleEnd(role):
            return f"[/{role}]"
        case Image(data):
            return f"<image {len(data)}>"
        case Video(data, num_frames):
            return f"<video {file_size(data)}/{num_frames}>"
