"""One stream of a program on a model whose tokens jsg knows.

The prompt is a list of parts. A part that was sent to the model is tokens from then on. Text that a program has
appended since is encoded as one text at the next call of the model, or when the session is forked. So the prefix cache
has all tokens that were computed, and no token ends where a program happened to cut its text.
"""

import dataclasses
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, assert_never, cast, final

from jsg.errors import RequestError
from jsg.lang.tokens.choices import decide, method_named
from jsg.lang.tokens.model import Hold, TokenCall, TokenModel
from jsg.lang.tokens.shared_prefix import SharedPrefix, commit, cut_off, try_hold
from jsg.lang.tokens.turn_writer import TurnWriter
from jsg.lang.words.backend import Piece, PromptItem, Selection, Session
from jsg.lang.words.ir import GEN, Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Select, Text, Video, check_forms
from jsg.lang.words.patterns import DTYPE_PATTERNS
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart
from jsg.prompt_ids import PromptIds, join_ids
from jsg.speech.rules.thought_grammar import behind_thoughts

_SAMPLING_NAMES = {name: p.name for name, p in GEN.items() if p.role in ("sampling", "grammar")}
"""The names of `SamplingParams`, by those of `SamplingArgs`."""
_REPORT_NAMES = frozenset(name for name, p in GEN.items() if p.role == "report")
_NUMBER_STOPS = (" ", "\n")
"""These end a number, which could go on for ever. Its pattern allows them at its end."""


@final
class TokenSession:
    """A `backend.Session` on a `TokenModel`.

    Attributes:
        own_texts: As in `backend.BatchSession`; empty once it has no use any more.

    Invariants: `_parts[:_floor]` are the parts that it shares with the session from which it was forked, and none of
    their text is encoded together with later text. While `_prefix` is set, it comes before `_parts`, and `_floor` is 0.
    In a branch `_own`, and `_parts[_floor:]` after it, is what it has after the prompt from which it was forked.
    """

    def __init__(self, model: TokenModel) -> None:
        """An empty prompt."""
        self._model = model
        self.own_texts: frozenset[str] = frozenset()
        self._prefix: SharedPrefix | None = None
        self._parts: list[Part] = []
        self._floor = 0
        self._own: tuple[Part, ...] = ()  # what it shares with its own forks
        self._turn = TurnWriter()
        self._held: list[SharedPrefix] = []
        self._hint: Hold | None = None
        self._point: object | None = None  # identifies the prompt at the last fork; None once it has changed
        self._origin: object | None = None  # the `_point` of the session from which this one was forked

    async def extend(self, item: PromptItem) -> str:
        """Appends an item; gives the text that this added to the prompt.

        White space at the end of a turn counts as added, though the template may remove it.

        Raises:
            RequestError: The model has no chat template, or the template does not take this turn.
        """
        match item:
            case Text(text):
                return await self._extend_text(text)
            case RoleBegin(role):
                self._turn, markup = self._turn.open(await self._model.turns(), role, is_first=self._is_empty)
                if role == "user" and self._parts and isinstance(self._parts[0], TextPart):
                    self._parts.append(_PLACE)
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
        """Continues the prompt, which then ends with the first continuation. After an early close it is as before.

        Raises:
            JsgError: An argument is wrong or not supported, or the model failed.
        """
        sampling, reports = sampling_of(gen.args, has_thoughts=gen.markers is not None), reports_of(gen.args)
        if gen.markers is not None:
            sampling = behind_thoughts(sampling, gen.markers)
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
        """Chooses; the prompt then ends with the tokens of the choice. Raises the same as `generate`."""
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
        """Makes `size` sessions that begin as this one is now. Does not wait for the hold of the common prompt.

        Raises:
            RequestError: There is not one offset for each session.
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
            if self._origin is not None:
                self._own += cut_off(tuple(self._parts[self._floor :]))
            prefix = SharedPrefix(self._model, self._prefix, self._parts, size, is_held=size > 1)
            self._prefix, self._parts, self._floor = prefix, [], 0
        if self._point is None:
            self._point = object()
        return [self._branch(prefix, size, offset) for offset in offsets]

    def copy(self) -> "TokenSession":
        """Gives a session of another run that begins as this one is now, which has no branches."""
        if self._point is None:  # else it is as at the last copy
            self._merge()
            self._point = object()
        copied = TokenSession(self._model)
        copied._parts, copied._turn = list(self._parts), self._turn
        if not self._is_empty:
            copied._parts.append(_PLACE)
        return copied

    async def join(self, branches: Sequence[Session]) -> None:
        """Puts the branches after this prompt, side by side. The conversation goes on as in the last of them.

        Raises:
            RequestError: A branch was not forked from the prompt as it is now, or ends in another turn than it began
                in, or the prompt has branches already.
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
        own = [tuple(merged((*branch._own, *(await branch._resolve())[branch._floor :]))) for branch in ours]
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
        """Computes the prompt and keeps it cached until `close` or the next hint.

        Returns when the prompt is computed, or when the model has refused.
        """
        prompt = await self._resolve()
        if not prompt or any(isinstance(part, JoinedPart) for part in prompt):
            return
        hold = await try_hold(self._model, (*prompt, _PLACE))  # other text may follow than that which ends the prompt
        if hold is None:
            return
        before, self._hint = self._hint, hold
        if before is not None:
            await before.release()
        await hold.cached()

    async def close(self) -> None:
        """Releases the prefixes that the session holds. A second call does nothing."""
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
            self._add_text(text, is_markup=True)
            return added + text
        if self._turn.opening is not None and self._turn.opening.trims_start:
            text = text.lstrip()
        if not text:
            return ""
        added = await self._begin_content(is_reply=False)
        self._add_text(text, is_markup=False)
        return added + text

    async def _extend_media(self, media: MediaPart) -> str:
        """Appends a picture or a video. In a turn the template writes its own text around it, as in a chat."""
        added = await self._begin_content(is_reply=False)
        before, behind = (await self._model.turns()).around_media(media.kind) if self._turn.is_open else ("", "")
        added += self._add_markup(before)
        self._add(media)
        return added + self._add_markup(behind)

    async def _begin_content(self, *, is_reply: bool) -> str:
        """Appends the text of the template that is still due before a content, or before a text outside of turns."""
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
        """Whether the prompt has neither text nor tokens nor media."""
        return self._prefix is None and all(isinstance(part, OffsetPart) for part in self._parts)

    def _add_markup(self, text: str) -> str:
        self._add(TextPart(text, is_markup=True, is_template=True))
        return text

    def _add_text(self, text: str, *, is_markup: bool) -> None:
        """Appends a text; where the first of the `own_texts` begins in it, the prompt gets a place."""
        begins = [text.find(own) for own in self.own_texts if own in text]
        if begins:
            self.own_texts, behind = frozenset(), text[min(begins) :]
            self._add(TextPart(text[: min(begins)], is_markup))
            texts = [part for part in self._parts if isinstance(part, TextPart)]
            if sum(len(part.text) for part in texts) >= _LEAST_COMMON and not texts[-1].is_template:
                self._parts.append(_PLACE)
            text = behind
        self._add(TextPart(text, is_markup))

    def _add(self, part: Part) -> None:
        """Appends a part, unless it is an empty text or has no tokens."""
        match part:
            case TextPart("", is_template=True) if self._is_empty:
                pass  # marks that the prompt begins with the template, even if that writes nothing here
            case TextPart("") | TokenPart(()):
                return
        self._point = None
        self._parts.append(part)

    async def _resolve(self) -> tuple[Part, ...]:
        """Gives the whole prompt, as soon as the shared prefix is known."""
        if self._prefix is not None:
            shared = await self._prefix.parts()
            self._prefix, self._parts, self._floor = None, [*shared, *self._parts], len(shared)
        self._merge()
        return tuple(self._parts)

    def _merge(self) -> None:
        """Merges its own neighbouring parts of one kind. It does so once for many, as one by one would take long."""
        if len(self._parts) > self._floor + 1:
            self._parts[self._floor :] = merged(self._parts[self._floor :])

    def _commit(self, part_ids: tuple[tuple[int, ...] | PromptIds, ...]) -> None:
        """Replaces all texts by their tokens."""
        self.own_texts = frozenset()
        shared, own = self._parts[: self._floor], self._parts[self._floor :]
        num_shared = sum(map(_num_texts, shared))
        committed = commit(shared, part_ids[:num_shared])
        self._parts = [*committed, *commit(own, part_ids[num_shared:])]
        self._floor = len(committed)
        self._point = None

    def _branch(self, prefix: SharedPrefix | None, size: int, offset: int) -> "TokenSession":
        branch = TokenSession(self._model)
        branch._prefix = prefix
        branch._parts = list(self._parts)  # of an empty prompt only the offsets
        branch._floor = len(self._parts)
        branch._turn = self._turn
        branch._origin = self._point
        branch._held = [prefix] if prefix is not None and size > 1 else []
        if size == 1:  # it holds no prefix of its own, so both sessions must keep those of this one
            branch._held += self._held
            for held in self._held:
                held.add_user()
        if offset:
            branch._add(OffsetPart(offset))
        return branch


def merged(parts: Sequence[Part]) -> list[Part]:
    """Gives the same prompt, with one part for neighbouring texts of one kind, or neighbouring tokens."""
    made: list[Part] = []
    for kind, run in itertools.groupby(parts, _kind):
        some = list(run)
        if len(some) == 1 or kind is None:
            made += some
        elif isinstance(some[0], TextPart):
            texts = cast(list[TextPart], some)
            made.append(dataclasses.replace(texts[0], text="".join(part.text for part in texts)))
        else:
            made.append(TokenPart(join_ids([part.ids for part in cast(list[TokenPart], some)])))
    return made


_PLACE = TextPart("")
"""Other sessions are likely to go on from here: as copies, or with another question after the same messages."""
_LEAST_COMMON = 32
"""Characters that the runs of a batch have in common at least where a place is marked."""


def _kind(part: Part) -> tuple[bool, ...] | None:
    """Gives a key that is equal for parts that may be merged; None for parts that may not."""
    match part:
        case TextPart("", is_template=False):
            return None
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


def sampling_of(args: SamplingArgs, *, has_thoughts: bool = False) -> dict[str, Any]:
    """Gives the argument of `SamplingParams.from_dict`. Raises RequestError for a type beside a grammar.

    A number after thoughts gets no stop strings, which would end the thoughts; its grammar ends it.
    """
    given = args.given()
    sampling = {_SAMPLING_NAMES[name]: value for name, value in given.items() if name in _SAMPLING_NAMES}
    if args.dtype is None:
        return sampling
    check_forms(given)
    sampling["regex"] = DTYPE_PATTERNS[args.dtype]
    if args.dtype in ("int", "float") and not has_thoughts:
        sampling["stop"] = (*sampling.get("stop", ()), *_NUMBER_STOPS)
    return sampling


def reports_of(args: SamplingArgs) -> dict[str, Any]:
    """Gives the `reports` of a `tokens.model.TokenCall`."""
    return {name: value for name, value in args.given().items() if name in _REPORT_NAMES}
