"""One stream of a program on a model whose tokens jsg knows.

The prompt is a list of parts. What was sent to the model once is tokens and stays the same tokens; what a program has
appended since is text, and is encoded as one text when the model is asked next, or when the session is forked. So every
token that was computed is found in the prefix cache, and no token ends where a program happened to cut its text.
"""

import dataclasses
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, assert_never, cast, final

from jsg.errors import RequestError
from jsg.lang.backend import Piece, PromptItem, Selection, Session
from jsg.lang.choices import decide, method_named
from jsg.lang.ir import GEN, Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Select, Text, Video, check_forms
from jsg.lang.patterns import DTYPE_PATTERNS
from jsg.lang.tokens.model import Hold, TokenCall, TokenModel
from jsg.lang.tokens.shared_prefix import SharedPrefix, commit, try_hold
from jsg.lang.tokens.turn_writer import TurnWriter
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart

_SAMPLING_NAMES = {name: p.name for name, p in GEN.items() if p.role in ("sampling", "grammar")}
"""`SamplingArgs` → `SamplingParams`."""
_REPORT_NAMES = frozenset(name for name, p in GEN.items() if p.role == "report")
_NUMBER_STOPS = (" ", "\n")
"""A number could go on for ever; these end it, as its pattern allows them behind it."""


@final
class TokenSession:
    """A `backend.Session` on a `TokenModel`.

    Invariants: `_parts[:_floor]` is what it shares with the session it was forked from, and no text of it is encoded
    together with what follows. While `_prefix` is set, that comes before `_parts` and `_floor` is 0.
    """

    def __init__(self, model: TokenModel) -> None:
        """An empty prompt."""
        self._model = model
        self._prefix: SharedPrefix | None = None
        self._parts: list[Part] = []
        self._floor = 0
        self._turn = TurnWriter()
        self._held: list[SharedPrefix] = []
        self._hint: Hold | None = None
        self._point: object | None = None  # names the prompt as it was last forked; None once it has changed
        self._origin: object | None = None  # the same of the session that this one was forked from

    async def extend(self, item: PromptItem) -> str:
        """Appends; gives what this added to the prompt.

        White space at the end of a turn, which the template may take off, counts as added.

        Raises:
            RequestError: The model has no chat template, or it does not take this turn.
        """
        match item:
            case Text(text):
                return await self._extend_text(text)
            case RoleBegin(role):
                self._turn, markup = self._turn.open(await self._model.turns(), role, is_first=self._is_empty)
                return self._add_markup(markup)
            case RoleEnd():
                return await self._close_turn()
            case Image(data, media_type):
                return await self._extend_media(MediaPart("image", data, media_type))
            case Video(data, num_frames, media_type):
                return await self._extend_media(MediaPart("video", data, media_type, num_frames))
            case _:
                assert_never(item)

    async def generate(self, gen: Gen) -> AsyncGenerator[Piece]:
        """Continues the prompt, which then ends with the first continuation. Closing it early leaves it as it was.

        Raises:
            JsgError: An argument is wrong or not supported, or the model failed.
        """
        sampling, reports = sampling_of(gen.args), reports_of(gen.args)
        await self._begin_content(is_reply=True)
        prompt = await self._resolve()
        call = TokenCall(prompt=prompt, sampling=sampling, reports=reports)
        async with aclosing(cast(AsyncGenerator[Any], self._model.generate(call))) as deltas:
            async for delta in deltas:
                outcome = delta.outcome
                if outcome is None:
                    if delta.text:
                        yield Piece(delta.text)
                    continue
                self._commit(outcome.part_ids)
                self._add(TokenPart(outcome.kept_ids))
                self._add(TextPart(outcome.tail))
                yield Piece(delta.text, outcome.meta, outcome.others)

    async def select(self, select: Select) -> Selection:
        """Chooses; the prompt then ends with the tokens of the choice. Raises as `generate`."""
        method = method_named(select.method)
        await self._begin_content(is_reply=False)
        prompt = await self._resolve()
        scored = await self._model.score(prompt, select.choices, unconditional=method.needs_unconditional)
        selection = decide(select.choices, scored, method=method.name, temperature=select.temperature, seed=select.seed)
        end = len(prompt)
        while end and isinstance(prompt[end - 1], TextPart):
            end -= 1
        self._parts = self._parts[:end]
        self._commit(scored.part_ids)
        chosen = scored.choices[select.choices.index(selection.choice)]
        self._add(TokenPart(scored.common_ids + chosen.token_ids))
        return selection

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "Sequence[TokenSession]":
        """So many sessions that begin as this one is now; does not wait for the hint that it sends.

        Raises:
            RequestError: There is not one offset for each.
        """
        offsets = (0,) * size if position_ids_offset is None else tuple(position_ids_offset)
        if len(offsets) != size or any(offset < 0 for offset in offsets):
            raise RequestError(
                f"position_ids_offset must have {size} numbers from 0, one for each branch, but got {list(offsets)}",
                param="position_ids_offset",
            )
        prefix = None
        if not self._is_empty:
            self._merge()
            prefix = SharedPrefix(self._model, self._prefix, self._parts, size, is_held=size > 1)
            self._prefix, self._parts, self._floor = prefix, [], 0
        if self._point is None:
            self._point = object()
        return [self._branch(prefix, size, offset) for offset in offsets]

    async def join(self, branches: Sequence[Session]) -> None:
        """Puts what the branches have behind this prompt side by side. The conversation goes on as in the last of them.

        Raises:
            RequestError: One was not forked from what this session is now, or ends in another turn than it began in;
                or there are branches in the prompt already.
        """
        ours = [branch for branch in branches if isinstance(branch, TokenSession) and branch._origin is self._point]
        if self._point is None or len(ours) < len(branches):
            raise RequestError(
                "concate_and_append must join branches that were forked from what the state is now, but something was "
                "appended since, or they are of another state; join before appending, or gather their variables",
                param="mode",
            )
        turns = [branch._turn for branch in ours if branch._turn != self._turn]  # an empty branch has not gone on
        if any(turn.open_role != self._turn.open_role for turn in turns):
            raise RequestError(
                "concate_and_append must join branches that end in the turn in which they began, but one has opened or "
                "closed one; close in a branch what it opens, and nothing else",
                param="mode",
            )
        own = [(await branch._resolve())[branch._floor :] for branch in ours]
        if any(isinstance(part, JoinedPart) for part in await self._resolve()):
            raise RequestError(
                "concate_and_append must be used once at most in a state, but it was before; gather the variables of "
                "the branches, and append them as text",
                param="mode",
            )
        self._add(JoinedPart(tuple(own)))
        if turns:
            self._turn = turns[-1]

    async def hint(self) -> None:
        """Computes the prompt as it is now and keeps it cached until `close` or the next hint; changes nothing.

        Returns when it is computed, or when the model has refused.
        """
        prompt = await self._resolve()
        if not prompt or any(isinstance(part, JoinedPart) for part in prompt):
            return
        hold = await try_hold(self._model, prompt)
        if hold is None:
            return
        before, self._hint = self._hint, hold
        if before is not None:
            await before.release()
        await hold.cached()

    async def close(self) -> None:
        """Gives back the prefixes that it holds. A second time does nothing."""
        hint, self._hint = self._hint, None
        if hint is not None:
            await hint.release()
        held, self._held = self._held, []
        for prefix in held:
            await prefix.release()

    # Turns.

    async def _extend_text(self, text: str) -> str:
        if not self._turn.is_open:
            added = await self._begin_content(is_reply=False)
            self._add(TextPart(text, is_markup=True))
            return added + text
        if self._turn.opening is not None and self._turn.opening.trims_start:
            text = text.lstrip()
        if not text:
            return ""
        added = await self._begin_content(is_reply=False)
        self._add(TextPart(text))
        return added + text

    async def _extend_media(self, media: MediaPart) -> str:
        """In a turn the template's own text goes around it, as around a picture of a chat."""
        added = await self._begin_content(is_reply=False)
        before, behind = (await self._model.turns()).around_media(media.kind) if self._turn.is_open else ("", "")
        added += self._add_markup(before)
        self._add(media)
        return added + self._add_markup(behind)

    async def _begin_content(self, *, is_reply: bool) -> str:
        """Writes what the template still has to write before a content, or before a text outside of turns."""
        if self._turn.is_open:
            self._turn, markup = self._turn.begin(is_reply=is_reply)
        elif self._turn.roles:
            self._turn, markup = self._turn.end(await self._model.turns())
        else:
            return ""
        return self._add_markup(markup)

    async def _close_turn(self) -> str:
        if not self._turn.is_open:
            raise RequestError("a turn must be open to be closed, but none is; open one", param="role")
        added = await self._begin_content(is_reply=False)
        while self._turn.trims_end and len(self._parts) > self._floor and _is_plain(self._parts[-1]):
            last = cast(TextPart, self._parts.pop())
            if text := last.text.rstrip():
                self._parts.append(TextPart(text))
                break
        self._turn, markup = self._turn.close(await self._model.turns())
        return added + self._add_markup(markup)

    # Parts.

    @property
    def _is_empty(self) -> bool:
        """Nothing stands in the prompt yet."""
        return self._prefix is None and all(isinstance(part, OffsetPart) for part in self._parts)

    def _add_markup(self, text: str) -> str:
        self._add(TextPart(text, is_markup=True, is_template=True))
        return text

    def _add(self, part: Part) -> None:
        """Appends a part, an empty one of text or tokens left out."""
        match part:
            case TextPart("", is_template=True) if self._is_empty:
                pass  # says that the prompt begins as the template has it, though that writes nothing here
            case TextPart("") | TokenPart(()):
                return
        self._point = None
        self._parts.append(part)

    async def _resolve(self) -> tuple[Part, ...]:
        """The whole prompt, as soon as what it shares is known."""
        if self._prefix is not None:
            shared = await self._prefix.parts()
            self._prefix, self._parts, self._floor = None, [*shared, *self._parts], len(shared)
        self._merge()
        return tuple(self._parts)

    def _merge(self) -> None:
        """Joins its own parts that are alike, all at once: one by one, many short ones would take long."""
        if len(self._parts) > self._floor + 1:
            self._parts[self._floor :] = merged(self._parts[self._floor :])

    def _commit(self, part_ids: tuple[tuple[int, ...], ...]) -> None:
        """Puts tokens in place of all texts."""
        shared, own = self._parts[: self._floor], self._parts[self._floor :]
        num_shared = sum(map(_num_texts, shared))
        committed = commit(shared, part_ids[:num_shared])
        self._parts = [*committed, *commit(own, part_ids[num_shared:])]
        self._floor = len(committed)
        self._point = None

    def _branch(self, prefix: SharedPrefix | None, size: int, offset: int) -> "TokenSession":
        branch = TokenSession(self._model)
        branch._prefix = prefix
        branch._parts = list(self._parts)  # all that is left of an empty prompt: its offsets
        branch._floor = len(self._parts)
        branch._turn = self._turn
        branch._origin = self._point
        branch._held = [prefix] if prefix is not None and size > 1 else []
        if size == 1:  # it holds nothing of its own, so what this session holds must outlive both
            branch._held += self._held
            for held in self._held:
                held.add_user()
        if offset:
            branch._add(OffsetPart(offset))
        return branch


def open_session(model: TokenModel, num_api_spec_tokens: int | None) -> TokenSession:
    """An empty session.

    Raises:
        RequestError: `num_api_spec_tokens` is given: it saves calls of a remote API, which must be sent all of its
            prompt again; jsg has the prompt cached.
    """
    if num_api_spec_tokens is not None:
        raise RequestError(
            "num_api_spec_tokens must be left out with a model whose cache makes it useless, but got "
            f"{num_api_spec_tokens}; leave it out",
            param="num_api_spec_tokens",
        )
    return TokenSession(model)


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same prompt, each run of texts of one kind, or of tokens, as one part."""
    made: list[Part] = []
    for kind, run in itertools.groupby(parts, _kind):
        some = list(run)
        if len(some) == 1 or kind is None:
            made += some
        elif isinstance(some[0], TextPart):
            texts = cast(list[TextPart], some)
            made.append(dataclasses.replace(texts[0], text="".join(part.text for part in texts)))
        else:
            made.append(TokenPart(tuple(i for part in cast(list[TokenPart], some) for i in part.ids)))
    return made


def _kind(part: Part) -> tuple[bool, ...] | None:
    """The same for parts that may become one; None for those that stay as they are."""
    match part:
        case TextPart(_, is_markup, is_template):
            return (is_markup, is_template)
        case TokenPart():
            return ()
        case _:
            return None


def _is_plain(part: Part) -> bool:
    return isinstance(part, TextPart) and not part.is_markup


def _num_texts(part: Part) -> int:
    match part:
        case TextPart():
            return 1
        case JoinedPart(branches):
            return sum(_num_texts(each) for branch in branches for each in branch)
    return 0


def sampling_of(args: SamplingArgs) -> dict[str, Any]:
    """What `SamplingParams.from_dict` takes; raises RequestError where a type stands beside a grammar."""
    given = args.given()
    sampling = {_SAMPLING_NAMES[name]: value for name, value in given.items() if name in _SAMPLING_NAMES}
    if args.dtype is None:
        return sampling
    check_forms(given)
    sampling["regex"] = DTYPE_PATTERNS[args.dtype]
    if args.dtype in ("int", "float"):
        sampling["stop"] = (*sampling.get("stop", ()), *_NUMBER_STOPS)
    return sampling


def reports_of(args: SamplingArgs) -> dict[str, Any]:
    """What `tokens.model.TokenCall.reports` takes."""
    return {name: value for name, value in args.given().items() if name in _REPORT_NAMES}
