"""Prompts in parts → the tokens of an engine request, and an answer → its tokens that a prompt may keep.

Text parts one after another are one text, so a token may span their boundary, as it does when the result of a chat
template is encoded whole. Plain stretches of the text never give special tokens. No text gives the placeholder of a
picture, because pictures are parts of their own.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, assert_never, final

from jsg.errors import RequestError, check_prompt_len
from jsg.media import MediaInput
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.media_prompt import MediaReader, PromptMedia, sees_no
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart
from jsg.processing.snapshot_points import MOST_POINTS, point_before
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import GrowingIds, PromptIds
from jsg.speech.answers.answer import PROMPT_TAIL_LEN, Answer
from jsg.speech.prompts.client_text import Stretch, cut, encode_stretches
from jsg.types import FinishType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as an engine takes it.

    Attributes:
        input_ids, position_jumps, joined, media, snapshot_at, turn_end: As in `types.Request`.
        part_ids: The tokens of each `TextPart` in order, also of those in branches. A run of text parts is one text:
            the first part has all of its tokens, and the others have none.
        ends_in_content: As in `answer.Prompt`.
    """

    input_ids: tuple[int, ...] | PromptIds
    position_jumps: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()
    media: tuple[MediaInput, ...] = ()
    part_ids: tuple[tuple[int, ...] | PromptIds, ...] = ()
    ends_in_content: bool = False
    snapshot_at: tuple[int, ...] = ()
    turn_end: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that an `answer.Prompt` takes."""
        names = ("input_ids", "position_jumps", "joined", "media", "ends_in_content", "snapshot_at", "turn_end")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChoices:
    """A prompt and the choices after it, each encoded together with the text at the end of the prompt.

    Attributes:
        before: The prompt in front of the text at its end; `part_ids` leaves that text out.
        common_ids: The text's tokens up to where the first choice departs from it.
        choice_ids: The tokens after `common_ids` with each choice, in order. An empty choice has the rest of the text.
    """

    before: EncodedPrompt
    common_ids: tuple[int, ...]
    choice_ids: tuple[tuple[int, ...], ...]

    @property
    def prefix_ids(self) -> tuple[int, ...] | PromptIds:
        """The tokens before every choice."""
        return self.before.input_ids + self.common_ids


def encode_parts(
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    *,
    max_tokens: int | None = None,
    media: MediaReader | None = None,
) -> EncodedPrompt:
    """The tokens of a prompt.

    The first text gets the tokens that the checkpoint puts before a text, unless it has them already or a template
    wrote it. A picture in front of all text gets them too. Text after tokens continues them.

    Args:
        max_tokens: As in `Tokenizer.encode`.
        media: Reads pictures and videos; None for a model that sees nothing.

    Raises:
        RequestError: A part is not allowed in its place, or its text is not Unicode; or as `MediaReader.read`.
        ContextLengthError: The prompt has more than twice `max_tokens`.
    """
    prompt = _GrowingPrompt(tokenizer, max_tokens, media, parts)
    prompt.add(parts)
    return prompt.encoded()


def encode_choices(
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    choices: Sequence[str],
    *,
    max_tokens: int | None = None,
    media: MediaReader | None = None,
) -> EncodedChoices:
    """The tokens of a prompt and of the choices that may follow it. Special tokens in a choice are plain characters.

    Raises:
        RequestError: There is no choice, or nothing comes before the choices; or as `encode_parts`.
        ContextLengthError: As `encode_parts`.
    """
    if not choices:
        raise RequestError("choices must have at least one text, but got none; add some", param="choices")
    end = len(parts)
    while end and isinstance(parts[end - 1], TextPart):
        end -= 1
    prompt = _GrowingPrompt(tokenizer, max_tokens, media, parts)
    prompt.add(parts[:end])
    text = [part for part in parts[end:] if isinstance(part, TextPart)]
    alone = prompt.encode_run(text)
    whole = [prompt.encode_run([*text, TextPart(choice)]) for choice in choices]
    departure = next(
        (i for i, token in enumerate(alone) if any(i >= len(ids) or ids[i] != token for ids in whole)), len(alone)
    )
    prompt.check_end(departure)
    prompt.mark_places(text, alone, departure)
    before = prompt.encoded(is_continued=True)
    if not before.input_ids and not departure:
        raise RequestError(
            "the prompt is empty, and this model puts no token before a text, so choices have none before them; append "
            "text before them",
            param="choices",
        )
    return EncodedChoices(
        before=before,
        common_ids=tuple(alone[:departure]),
        choice_ids=tuple(tuple(ids[departure:]) for ids in whole),
    )


def split_kept(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    text: str,
    *,
    skip_special_tokens: bool = True,
    prompt_tail_ids: Sequence[int] = (),
) -> tuple[tuple[int, ...], str]:
    """The output tokens whose text lies wholly in `text`, and the rest of `text`.

    Args:
        ids: Output tokens, without a stop token that the answer leaves out.
        text: The beginning of their text, as `AnswerStream` gives it.
        skip_special_tokens, prompt_tail_ids: Those of the answer.
    """
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail_ids=prompt_tail_ids
    )
    num_kept = tail_start = num_chars = 0
    for count, token_id in enumerate(ids, start=1):
        num_chars += len(detokenizer.push((token_id,)))
        if num_chars > len(text):
            break
        if text.startswith(detokenizer.unfinished, num_chars):  # it shows the beginning of a character
            num_kept, tail_start = count, num_chars + len(detokenizer.unfinished)
    return tuple(ids[:num_kept]), text[tail_start:]


def split_answer(tokenizer: Tokenizer, answer: Answer) -> tuple[tuple[int, ...], str]:
    """`split_kept` of an answer that continues its prompt's text: the tokens that the prompt may keep, and the rest."""
    sampling, finish, ids = answer.request.sampling, answer.finish, answer.token_ids
    ends_in_stop_token = (
        bool(ids) and finish is not None and finish.type is FinishType.STOP and finish.matched == ids[-1]
    )
    return split_kept(
        tokenizer,
        ids[:-1] if ends_in_stop_token and not sampling.no_stop_trim else ids,
        answer.text,
        skip_special_tokens=sampling.skip_special_tokens,
        prompt_tail_ids=answer.request.input_ids[-PROMPT_TAIL_LEN:],
    )


@final
class _GrowingPrompt:
    """A prompt that is encoded part by part.

    Invariant: `_run` holds the text parts at the end, which are not encoded yet; `_ids` holds all before them.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int | None, reader: MediaReader | None, parts: Sequence[Part]
    ) -> None:
        """Begins an empty prompt, and reads the pictures of the parts that will be added."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._sees = reader is not None
        self._plain = frozenset(() if reader is None else reader.placeholders.values())
        found = media_parts(parts)
        if found and reader is None:
            raise sees_no(found[0].kind, "prompt")
        self._unplaced = iter(reader.read(found, max_tokens) if found and reader is not None else ())
        self._media: list[MediaInput] = []
        self._is_template = False
        self._ids = GrowingIds()
        self._run: list[TextPart] = []
        self._part_ids: list[tuple[int, ...] | PromptIds] = []
        self._jumps: list[tuple[int, int]] = []
        self._joined: tuple[int, ...] = ()
        self._points: set[int] = set()
        self._extra = 0  # the sum of the offsets since the last token
        self._last: int | None = None  # the token in front of the next one; None at the beginning

    def add(self, parts: Sequence[Part]) -> None:
        """Takes the next parts of the prompt, up to its end or the end of a branch."""
        for part in parts:
            match part:
                case TextPart():
                    self._run.append(part)
                    continue
                case TokenPart(ids):
                    self._end_run()
                    self._append(ids)
                    self._points |= set() if ids else {len(self._ids)}
                case OffsetPart(offset):
                    self._end_run()
                    if offset < 0:
                        raise RequestError(f"an offset of positions must be at least 0, but got {offset}", "prompt")
                    self._extra += offset
                case MediaPart():
                    self._end_run()
                    self._add_media(next(self._unplaced))
                case JoinedPart(branches):
                    self._end_run()
                    self._join(branches)
                case _:
                    assert_never(part)
        self._end_run()

    def encoded(self, *, is_continued: bool = False) -> EncodedPrompt:
        """The whole prompt. With `is_continued` more tokens will follow it."""
        if not is_continued:
            self.check_end()
        jumps = tuple(self._jumps)
        if self._extra:
            jumps += ((len(self._ids), self._extra),)
        if self._media and (jumps or self._joined):
            what = "branches side by side" if self._joined else "offsets of positions"
            raise RequestError(
                f"a prompt with pictures or videos must not have {what}, but this one has; take either out",
                param="prompt",
            )
        return EncodedPrompt(
            input_ids=self._ids.whole(),
            position_jumps=jumps,
            joined=self._joined,
            media=tuple(self._media),
            part_ids=tuple(self._part_ids),
            snapshot_at=() if self._joined else tuple(sorted(self._points - {0}))[-MOST_POINTS:],
        )

    def check_end(self, num_behind: int = 0) -> None:
        """Raises RequestError if the model cannot continue the prompt with so many more tokens."""
        if self._joined and self._joined[-1] == len(self._ids) + num_behind:
            raise RequestError(
                "branches side by side must have a text behind them before the model goes on, because no token has "
                "seen all of them yet, but the prompt ends there; append one",
                param="prompt",
            )

    def encode_run(self, run: Sequence[TextPart]) -> list[int]:
        """The tokens of a run of texts at the end of the prompt. Changes nothing."""
        stretches = cut(self._tokenizer, [Stretch(part.text, part.is_markup) for part in run], self._plain)
        ids = encode_stretches(
            self._tokenizer, stretches, param="prompt", last_id=self._last, max_tokens=self._max_tokens
        )
        self._check_len(len(ids))
        bos_ids = self._tokenizer.bos_ids
        # Hugging Face's processors put BOS before the text of a template; its tokenizers do not.
        is_whole = not self._sees and (self._is_template or (bool(run) and run[0].is_template))
        needs_bos = self._last is None and not is_whole and tuple(ids[: len(bos_ids)]) != bos_ids
        return [*bos_ids, *ids] if needs_bos else ids

    def mark_places(self, run: Sequence[TextPart], ids: Sequence[int], most: int = sys.maxsize) -> None:
        """Remembers the places in a run of texts at the end of the prompt, but none after `most` of its tokens."""
        for index in [index for index, part in enumerate(run) if not part.text][-MOST_POINTS:]:
            after = "".join(part.text for part in run[index:])
            self._points.add(len(self._ids) + min(most, point_before(self._tokenizer, ids, after)))

    def _end_run(self) -> None:
        if not self._run:
            return
        ids = self.encode_run(self._run)
        self._is_template = self._is_template or self._run[0].is_template
        self.mark_places(self._run, ids)
        checked = PromptIds.of_any(ids)
        self._part_ids += [checked, *[()] * (len(self._run) - 1)]
        self._run = []
        self._append(checked)

    def _add_media(self, item: PromptMedia) -> None:
        if self._last is None and (self._sees or not self._is_template):
            self._append(self._tokenizer.bos_ids)
        self._check_len(item.num_tokens)
        self._media.append(item.at(len(self._ids)))
        self._append((item.placeholder_id,) * item.num_tokens)

    def _append(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        self._check_len(len(ids))
        if self._extra:
            self._jumps.append((len(self._ids), self._extra))
            self._extra = 0
        self._ids.add(ids)
        self._last = ids[-1]

    def _join(self, branches: Sequence[Sequence[Part]]) -> None:
        if self._joined or any(isinstance(part, JoinedPart) for branch in branches for part in branch):
            raise RequestError(
                "a prompt must have branches side by side once at most, but has them more often; join the branches in "
                "one step, or as text",
                param="prompt",
            )
        if not branches:
            raise RequestError("a join must have at least one branch, but got none; add some", param="prompt")
        last, extra = self._last, self._extra
        begins: list[int] = []
        self._joined = (0,)  # so that a branch cannot join
        for branch in branches:
            begins.append(len(self._ids))
            self._last, self._extra = last, extra
            self.add(branch)
        # An offset at the end of a branch changes nothing.
        self._joined, self._extra = (*begins, len(self._ids)), 0

    def _check_len(self, added: int) -> None:
        check_prompt_len(len(self._ids) + added, self._max_tokens, "prompt")


def media_parts(parts: Sequence[Part]) -> list[MediaPart]:
    """The pictures and videos of a prompt in order, also those in branches."""
    found: list[MediaPart] = []
    for part in parts:
        match part:
            case MediaPart():
                found.append(part)
            case JoinedPart(branches):
                found += [each for branch in branches for each in media_parts(branch)]
            case _:
                pass
    return found
