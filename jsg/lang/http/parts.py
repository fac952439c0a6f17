"""Writes prompts in parts as the JSON of `/generate` and `/select`, and reads their answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from jsg.lang.tokens.model import Outcome, ScoredChoice, ScoredChoices
from jsg.lang.words.backend import with_answers
from jsg.processing.media.base64_files import write_base64
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart

_OUTCOME_FIELDS = ("part_ids", "kept_ids", "tail")
"""The fields that the server adds to `meta_info` for a prompt in parts."""


def whole_media(part: MediaPart) -> dict[str, Any]:
    """Writes a picture or a video with its file."""
    fields = {part.kind: write_base64(part.data), "media_type": part.media_type}
    return fields if part.num_frames is None else fields | {"num_frames": part.num_frames}


def parts_to_json(parts: Sequence[Part], write_media: Callable[[MediaPart], dict[str, Any]] = whole_media) -> list[Any]:
    """Writes the field `prompt`; `write_media` writes a picture or a video."""
    return [_part_to_json(part, write_media) for part in parts]


def _part_to_json(part: Part, write_media: Callable[[MediaPart], dict[str, Any]]) -> Any:
    match part:
        case TextPart(text, is_markup=False):
            return text
        case TextPart(text, is_template=is_template):
            return {"template" if is_template else "markup": text}
        case TokenPart(ids):
            return list(ids)
        case OffsetPart(offset):
            return {"offset": offset}
        case MediaPart():
            return write_media(part)
        case JoinedPart(branches):
            return {"branches": [parts_to_json(branch, write_media) for branch in branches]}
        case _:
            assert_never(part)


def outcome(answers: Sequence[Mapping[str, Any]]) -> Outcome:
    """Reads the end of a continuation from the last object of `/generate` for each of its answers.

    Raises:
        KeyError, TypeError: The answer has another form.
    """
    metas = [dict(answer["meta_info"]) for answer in answers]
    part_ids, kept_ids, tail = (metas[0][name] for name in _OUTCOME_FIELDS)
    for meta in metas:
        for name in _OUTCOME_FIELDS:
            meta.pop(name, None)
    return Outcome(
        part_ids=id_lists(part_ids),
        kept_ids=tuple(kept_ids),
        tail=tail,
        meta=with_answers(metas),
        others=tuple(answer["text"] for answer in answers[1:]),
    )


def scored_choices(answer: Mapping[str, Any]) -> ScoredChoices:
    """Reads the scores of `/select`.

    Raises:
        KeyError, TypeError: The answer has another form.
    """
    return ScoredChoices(
        part_ids=id_lists(answer["part_ids"]),
        common_ids=tuple(answer["common_ids"]),
        choices=tuple(
            ScoredChoice(
                token_ids=tuple(choice["token_ids"]),
                token_texts=tuple(choice["token_texts"]),
                logprobs=tuple(_finite_or_not(logprob) for logprob in choice["logprobs"]),
                unconditional=tuple(choice["unconditional"]),
            )
            for choice in answer["choices"]
        ),
        meta=answer["meta_info"],
    )


def _finite_or_not(logprob: float | None) -> float:
    """Reads a log-probability. JSON has no infinity, so null stands for that of an impossible token."""
    return -math.inf if logprob is None else logprob


def id_lists(lists: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Gives lists of token ids as tuples."""
    return tuple(tuple(ids) for ids in lists)
