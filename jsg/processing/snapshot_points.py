"""Where a prompt parts from others: there a snapshot of the state is worth keeping (see `types.Request`).

Prompts with the same text up to some place need not have the same tokens up to there, because tokens may span the
place. None spans the end of a special token, and few span the beginning of a word. So a point is after a special token
if one is near, and else in front of the last whole word.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, final

from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]
_BLOCKS = (4096, 512, 64, 8, 1)  # tokens whose bytes are counted at once, which is quicker than one by one
_USUAL_BYTES = 4  # of a token
_NEAR = 16  # tokens that are computed again at most
MOST_POINTS = 4  # of a prompt beside the end of its turn; each may cost a step and a state
LEAST_BETWEEN = 32  # tokens between a point that a client names and the end of the turn
CONTENT = "\ue000content\ue001"  # a content that no template and no client writes
LEADING = "\ue001leading\ue000"  # the content of the system's message, which no other content begins like
ANSWER = {"role": "assistant", "content": CONTENT}


@final
class PlacedText(str):
    """A text of a message from whose places, in characters, other prompts are likely to go on.

    It is a text like others for everybody who does not look for them. What changes it gives one without places.
    """

    places: tuple[int, ...]

    def __new__(cls, text: str = "", places: tuple[int, ...] | None = None) -> Self:
        """By default the place is its end."""
        made = super().__new__(cls, text)
        made.places = (len(text),) if places is None else places
        return made


def joined_text(texts: Sequence[str]) -> str:
    """The texts with nothing between them, and their places."""
    starts = itertools.accumulate(map(len, texts), initial=0)
    placed = [(start, text) for start, text in zip(starts, texts, strict=False) if isinstance(text, PlacedText)]
    places = tuple(start + place for start, text in placed for place in text.places)
    return PlacedText("".join(texts), places) if places else "".join(texts)


def has_places(content: Any) -> bool:
    """Whether a text of a content has places."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return any(isinstance(part.get("text"), PlacedText) for part in parts)


def with_marks(content: Any, marks: Iterator[str]) -> Any:
    """A content with a mark at each place of its texts. None is at the beginning or end of what a template may trim."""
    if isinstance(content, list):
        return [{**part, "text": with_marks(part["text"], marks)} if "text" in part else part for part in content]
    if not isinstance(content, PlacedText) or not content.strip():
        return content
    first = len(content) - len(content.lstrip())
    cuts = [max(first, len(content[:place].rstrip())) for place in content.places[-MOST_POINTS:]]
    texts = [content[start:end] for start, end in itertools.pairwise([0, *cuts, len(content)])]
    return texts[0] + "".join(next(marks) + text for text in texts[1:])


def point_before(tokenizer: Tokenizer, ids: Sequence[int], behind: str) -> int:
    """How many of these tokens other prompts share that have another text in place of the last text `behind`."""
    num_bytes, place = len(behind.encode()), len(ids)
    for step in _BLOCKS:
        while num_bytes > (0 if step == 1 else _USUAL_BYTES * step) and place:
            size = tokenizer.num_bytes(ids[max(place - step, 0) : place])
            if size > num_bytes and step > 1:
                break
            place, num_bytes = max(place - step, 0), num_bytes - size
    near = range(place, max(place - _NEAR, 0), -1)
    words = [point for point in near[1:] if tokenizer.token_bytes(ids[point])[:1].isspace()]
    default = words[0] if words else max(place - 1, 0)
    return next((point for point in near if ids[point - 1] in tokenizer.special_ids), default)


def next_turn_place(rendered: str, answered: Messages, render: Callable[[Messages], str]) -> int | None:
    """How many characters of a conversation's prompt its next turn's prompt has too; None if there can be none.

    A template may write an answer otherwise than it lets one begin, or drop the thoughts of earlier ones. `answered` is
    the conversation with an answer that has the text `CONTENT`.
    """
    try:
        later = render([*answered, {"role": "user", "content": CONTENT}])
    except RequestError:
        return None
    most = range(1, min(len(rendered), len(later)) + 1)
    return bisect.bisect_left(most, True, key=lambda end: rendered[:end] != later[:end])


def usual_ending(leading_role: str | None, render: Callable[[Messages], str]) -> tuple[str, str] | None:
    """How a template ends a prompt: what the next turn's prompt has after the last question too, and what it has not.

    Where the next prompt parts in front of the question, as it does if the template moves the system's text after it,
    the latter has the marks `LEADING` and `CONTENT` (see `with_contents`). None as in `next_turn_place`. Most prompts
    end so, and need not be rendered twice.
    """
    leading = [] if leading_role is None else [{"role": leading_role, "content": LEADING}]
    messages = [*leading, {"role": "user", "content": CONTENT}]
    try:
        rendered = render(messages)
    except RequestError:
        return None
    place = next_turn_place(rendered, [*messages, ANSWER], render)
    question_end = len(rendered) - len(rendered.rpartition(CONTENT)[2])
    return None if place is None else (rendered[question_end:place], rendered[place:])


def with_contents(ending: str, messages: Messages) -> str:
    """An ending of `usual_ending`, with the contents of the first message and the last in place of the marks."""
    if CONTENT not in ending:
        return ending
    first, last = (str(messages[index].get("content")) for index in (0, -1))
    return ending.replace(LEADING, first).replace(CONTENT, last)
