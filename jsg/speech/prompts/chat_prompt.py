"""Chat messages → prompt tokens. Text of clients never becomes a special token, see `jsg.speech.prompts.client_text`.

Marks in the rendered text show two more things. A mark after the last content shows where a prompt ends that continues
this content. Marks around an earlier answer of this server show where the tokens that the model chose go back in: its
text can be encoded in several ways, and only the model's own tokens are in the prefix cache.

For a picture in a content the template writes the model's placeholder. The same characters in a client's text are no
placeholder, just characters.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

from jsg.errors import RequestError, check_prompt_len
from jsg.processing.media_prompt import MediaReader, PromptMedia, fill_placeholders
from jsg.processing.snapshot_points import (
    ANSWER,
    CONTENT,
    LEAST_BETWEEN,
    MOST_POINTS,
    Messages,
    has_places,
    next_turn_place,
    point_before,
    usual_ending,
    with_contents,
    with_marks,
)
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import GrowingIds, PromptIds
from jsg.speech.prompts.chat_template import ChatTemplate
from jsg.speech.prompts.client_text import Guard, Marks, Stretch, encode_stretches
from jsg.speech.prompts.encode_parts import EncodedPrompt
from jsg.speech.prompts.kept_tokens import KeptTokens

MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARG_CHARS = 4096
RESERVED_KWARGS = frozenset(
    [
        *("self", "messages", "add_generation_prompt", "continue_final_message"),
        *("tools", "documents", "bos_token", "eos_token"),
    ]
)

_CONTENT_END_CHARS = 32
_MOST_ENDINGS = 64
_LEADING_ROLES = ("system", "developer")
_END = 1  # this mark is at the end of the content that is continued
_FIRST_ANSWER = 2  # marks with this number and larger ones enclose contents that tokens replace

Message = Mapping[str, Any]


@final
class ChatPrompt:
    """A model's chat template with its tokenizer. It is immutable, so any number of threads may encode at a time.

    Attributes:
        template: The model's chat template.
        max_tokens: What a conversation and its answer may have together; None for no limit.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int | None = None, media: MediaReader | None = None, *,
        caches_states: bool = False,
    ) -> None:  # fmt: skip
        """Compiles the tokenizer's chat template. Raises ModelError where the template cannot be compiled.

        `media` reads pictures and videos, for a model that sees. Conversations far over `max_tokens` are refused early.
        With `caches_states` prompts say where a snapshot of the state is worth keeping.
        """
        self._tokenizer = tokenizer
        self._placeholders = {} if media is None else dict(media.placeholders)
        self._placeholder_ids = frozenset(() if media is None else media.placeholder_ids.values())
        self.max_tokens = max_tokens
        self.template = ChatTemplate(
            tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        self._kept = KeptTokens(tokenizer)
        self._endings: dict[Hashable, tuple[str, str] | None] | None = {} if caches_states else None

    def encode(self, messages: Sequence[Message], **options: Any) -> tuple[int, ...] | PromptIds:
        """The prompt tokens of a conversation without pictures; takes and raises what `prompt` does."""
        return self.prompt(messages, **options).input_ids

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        media: Sequence[PromptMedia] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        answers: Mapping[int, Sequence[int]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        names_points: bool = True,
        namespace: str = "",
    ) -> EncodedPrompt:
        """The prompt of a conversation.

        Args:
            messages: Each has a role, a content, and whatever else the template reads. Every text in them is the
                client's, and none is changed. A content with pictures is a list of parts; a part is a text, or only a
                type, `image` or `video`. Where the template has no place for such a part, the text gets the placeholder
                and a line break.
            media: The pictures and videos of these parts, in order.
            add_generation_prompt: The prompt ends with the beginning of the assistant's turn.
            continue_final_message: The prompt ends with the last content instead, which must be the assistant's, and
                the answer continues it.
            template_kwargs: More variables of the template, such as `enable_thinking`, as a client gave them.
            answers: Index of a message → the tokens that the model wrote, whose text is the message's content. The
                prompt gets these tokens as they are where the template does not change the content.
            tools: The tools that the model may call, for the template; the texts in them are the client's too.
            names_points: It says where a snapshot is worth keeping, if any are kept. Who only counts needs no points.
            namespace: That of the prefix cache in which the prompt is; its long texts are kept for this one only.

        Raises:
            RequestError: The template does not take the messages, or leaves out or repeats a picture; or a variable of
                the template breaks a rule.
            ContextLengthError: The conversation has more than twice `max_tokens`, or with pictures more than
                `max_tokens`.
        """
        guard = Guard(self._tokenizer.special_pattern)
        marks = guard.marks
        marked = [guard.message(message) for message in messages]
        exact = self._mark_answers(marked, messages, answers or {}, guard)
        if continue_final_message:
            _mark_end(marked, marks)
        is_prompt = add_generation_prompt and not continue_final_message
        render = functools.partial(
            self._render, guard=guard, template_kwargs=template_kwargs or {}, tools=tools, is_prompt=is_prompt
        )
        rendered = render(marked)
        if continue_final_message:
            rendered = _until_end(rendered, marks)
        encoded = self._encoded(rendered, exact, marks, media, namespace)
        if self._endings is not None and names_points:
            kind = is_prompt, tools is None, repr(template_kwargs)
            end = marks.mark(_END) if continue_final_message else None
            places = self._next_turn_places(rendered, marked, render, kind, end)
            after = ["".join(marks.split(rendered[place:])[0]) for place in places if place is not None]
            named = _behind_named_places(rendered, messages, guard, render)
            encoded = self._with_points(encoded, after, named)
        is_open = not continue_final_message and _ends_in_content(rendered, marked, marks, render)
        return dataclasses.replace(encoded, ends_in_content=True) if is_open else encoded

    def until_end(
        self,
        messages: Sequence[Message],
        *,
        media: Sequence[PromptMedia] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
    ) -> tuple[EncodedPrompt, str]:
        """The prompt of a conversation up to the end of its last content, and what the template writes after that.

        So prompts that differ only in the end of the last content are encoded once up to there. The text after ends
        with the beginning of the assistant's turn. The arguments, and what is raised, are those of `prompt`.
        """
        guard = Guard(self._tokenizer.special_pattern)
        marked = [guard.message(message) for message in messages]
        content, mark = marked[-1]["content"], guard.marks.mark(_END)
        marked[-1]["content"] = (
            content + mark if isinstance(content, str) else [*content, {"type": "text", "text": mark}]
        )
        rendered = self._render(marked, guard, template_kwargs or {}, None, is_prompt=True)
        before, _, after = rendered.partition(mark)
        if mark not in rendered or guard.marks.split(after)[1]:
            raise RequestError.of(
                "messages",
                "must stand in the prompt in their order, the last one once and unchanged, but the model's "
                "chat template writes them otherwise; send them as one message of the user",
            )
        return self._encoded(before, {}, guard.marks, media, namespace), after

    def _render(
        self,
        marked: Sequence[dict[str, Any]],
        guard: Guard,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        is_prompt: bool,
    ) -> str:
        return self.template.render(
            [self._as_template_takes_it(message) for message in marked],
            add_generation_prompt=is_prompt,
            tools=None if tools is None else guard.json(list(tools)),
            **guard.json(_checked_kwargs(template_kwargs, self.template.variables)),
        )

    def _encoded(
        self,
        rendered: str,
        exact: Mapping[int, tuple[str, Sequence[int]]],
        marks: Marks,
        media: Sequence[PromptMedia],
        namespace: str,
    ) -> EncodedPrompt:
        ids, places = self._with_bos(*self._encode_pieces(rendered, exact, marks, namespace))
        input_ids, inputs = fill_placeholders(ids, places, media, "messages", self.max_tokens)
        return EncodedPrompt(input_ids=input_ids, media=inputs)

    def _with_points(self, encoded: EncodedPrompt, after: Sequence[str], named: Sequence[str]) -> EncodedPrompt:
        """The prompt with points, each in front of a text: the end of the turn and others, and places of the client."""
        ids, seen = encoded.input_ids, encoded.media[-1].end if encoded.media else 1
        own, asked = (
            [point_before(self._tokenizer, ids, text) if text else len(ids) for text in texts]
            for texts in (after, named)
        )
        if min(own, default=0) < seen:  # the text of a picture is not that of its tokens
            own = []
        turn_end = own[0] if own else 0
        others = {point for point in own[1:] if point < turn_end}
        others |= {point for point in asked if seen <= point <= (turn_end or len(ids)) - LEAST_BETWEEN}
        return dataclasses.replace(encoded, turn_end=turn_end, snapshot_at=tuple(sorted(others)[-MOST_POINTS:]))

    def _next_turn_places(
        self, rendered: str, messages: Messages, render: Callable[[Messages], str], kind: Hashable, end: str | None
    ) -> list[int | None]:
        """Where a prompt parts from that of the conversation's next turn, in characters; `end` marks a continued text.

        After a call of a tool the next turn may be another call; a question, which drops thoughts, parts earlier then.
        """
        assert self._endings is not None, "only then it is asked for"
        if end is not None:
            last = {**messages[-1], "content": messages[-1]["content"].replace(end, CONTENT)}
            return [next_turn_place(rendered, [*messages[:-1], last], render)]
        leading = messages[0]["role"] if messages and messages[0]["role"] in _LEADING_ROLES else None
        try:
            ending = self._endings[leading, kind]
        except KeyError:
            ending = usual_ending(leading, render)
            if len(self._endings) >= _MOST_ENDINGS:
                self._endings.clear()
            self._endings[leading, kind] = ending
        if ending is None:
            return []
        kept, lost = ending
        own_end = with_contents(lost, messages)
        if not rendered.endswith(kept + own_end):
            return [next_turn_place(rendered, [*messages, ANSWER], render)]
        places: list[int | None] = [len(rendered) - len(own_end)]
        num_asked = max((i for i, message in enumerate(messages, 1) if message["role"] == "user"), default=0)
        if self.template.thoughts_field is not None and 0 < num_asked < len(messages):
            with contextlib.suppress(RequestError):
                places.append(
                    _question_end(rendered, messages, num_asked, kept)
                    or len(render(messages[:num_asked])) - len(with_contents(lost, messages[:num_asked]))
                )
        return places

    def _with_bos(self, ids: Sequence[int], places: list[int]) -> tuple[Sequence[int], list[int]]:
        """A prompt and the indices of its placeholders; for a model that sees, BOS is put in front if it is missing.

        Hugging Face's processors encode a rendered template like any text, with BOS, and their templates rely on that.
        Hugging Face's tokenizers add nothing to a rendered template.
        """
        bos_ids = self._tokenizer.bos_ids
        if not self._placeholder_ids or tuple(ids[: len(bos_ids)]) == bos_ids:
            return ids, places
        return [*bos_ids, *ids], [place + len(bos_ids) for place in places]

    def _as_template_takes_it(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose content has the form that the template takes: a text, or a list of parts."""
        content = message.get("content")
        if isinstance(content, list) and not self._has_place_for({part["type"] for part in content}):
            content = "".join(
                part["text"] if part["type"] == "text" else f"{self._placeholders[part['type']]}\n" for part in content
            )
        if isinstance(content, str) and not self.template.takes_text:
            content = [{"type": "text", "text": content}]
        return message if content is None else {**message, "content": content}

    def _has_place_for(self, kinds: set[str]) -> bool:
        return kinds <= self._kinds_with_place | {"text"}

    @functools.cached_property
    def _kinds_with_place(self) -> set[str]:
        written = self._placeholders.items()
        return {kind for kind, placeholder in written if self.template.around_media(kind, placeholder) is not None}

    def _mark_answers(
        self,
        marked: list[dict[str, Any]],
        messages: Sequence[Message],
        answers: Mapping[int, Sequence[int]],
        guard: Guard,
    ) -> dict[int, tuple[str, Sequence[int]]]:
        """Puts marks around the contents that tokens may replace. Returns mark → the content and its tokens."""
        exact: dict[int, tuple[str, Sequence[int]]] = {}
        if self._tokenizer.strips_leading_space:
            return exact  # each piece that is encoded alone would get a space at its front
        for index, token_ids in answers.items():
            content = messages[index]["content"]
            if content and not guard.has_special(content) and self._tokenizer.decode(token_ids) == content:
                number = _FIRST_ANSWER + index
                exact[number] = content, token_ids
                marked[index]["content"] = guard.marks.around(number, content)
        return exact

    def _encode_pieces(
        self, rendered: str, exact: Mapping[int, tuple[str, Sequence[int]]], marks: Marks, namespace: str
    ) -> tuple[Sequence[int], list[int]]:
        """The tokens, and the indices of the placeholders that the template wrote."""
        for number, (content, _) in exact.items():
            if rendered.count(marks.mark(number)) != 2 or marks.around(number, content) not in rendered:
                rendered = rendered.replace(marks.mark(number), "")  # the template cuts or repeats it: encode its text
        pieces, numbers = marks.split(rendered)
        if numbers[::2] != numbers[1::2]:
            raise RequestError.of(
                "messages",
                "must not contain the text of special tokens if the model's chat template splits contents, "
                "but they do; leave this text out",
            )
        ids, last_id, limit = GrowingIds(), None, self.max_tokens
        places: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                continues = last_id is not None and last_id not in self._tokenizer.special_ids
                found = self._kept.encode(piece, namespace, continues=continues, max_tokens=limit)
                if self._placeholder_ids:
                    places += [len(ids) + i for i, token in enumerate(found) if token in self._placeholder_ids]
            elif numbers[index] in exact:
                found = exact[numbers[index]][1]
            else:
                words = [Stretch(piece, is_markup=False)]
                found = encode_stretches(self._tokenizer, words, param="messages", last_id=last_id, max_tokens=limit)
            ids.add(found)
            last_id = found[-1] if found else last_id
            check_prompt_len(len(ids), limit, "messages")
        return ids.whole(), places


def _ends_in_content(
    rendered: str, marked: Sequence[dict[str, Any]], marks: Marks, render: Callable[[list[dict[str, Any]]], str]
) -> bool:
    """Whether the template writes nothing but white space after the last words of a client.

    Only if the text ends as a content does, it is rendered once more, with a mark after this content.
    """
    end = rendered.rstrip()
    for index in {0, len(marked) - 1} if marked else ():
        content, mark = marked[index].get("content"), marks.mark(_END)
        text = content[-1].get("text", "") if isinstance(content, list) and content else content
        if not isinstance(text, str) or not text.strip() or not end.endswith(text.rstrip()[-_CONTENT_END_CHARS:]):
            continue
        said = content + mark if isinstance(content, str) else [*(content or ()), {"type": "text", "text": mark}]
        _, found, after = render(
            [*marked[:index], {**marked[index], "content": said}, *marked[index + 1 :]]
        ).rpartition(mark)
        if found and not after.strip():
            return True
    return False


def _behind_named_places(
    rendered: str, messages: Sequence[Message], guard: Guard, render: Callable[[Messages], str]
) -> list[str]:
    """What follows each place that the contents of a client have, as far as the template writes these as is.

    Only if there are such places, the conversation is rendered once more, with marks at them.
    """
    if not any(has_places(message.get("content")) for message in messages):
        return []
    marks, numbers = guard.marks, map(guard.marks.mark, itertools.count(_FIRST_ANSWER + len(messages)))
    try:
        noted = render([guard.message({**m, "content": with_marks(m.get("content"), numbers)}) for m in messages])
    except RequestError:
        return []
    plain, ends, place = "".join(marks.split(rendered)[0]), list[int](), 0
    pieces, found = marks.split(noted)
    for piece, number in zip(pieces, found, strict=False):
        place += len(piece)
        ends += [place] if number >= _FIRST_ANSWER + len(messages) else []
    return (
        [plain[end:] for end in ends[-MOST_POINTS:] if end <= len(plain)] if "".join(pieces).startswith(plain) else []
    )


def _question_end(rendered: str, messages: Messages, num_asked: int, after: str) -> int:
    """Where a prompt has the last question and what the template writes after each; 0 where it is not found for sure.

    To find it is quicker than to render the conversation up to it.
    """
    question, *later = [str(message.get("content")).strip() for message in messages[num_asked - 1 :]]
    if not (question and after) or any(text.endswith(question) for text in later):
        return 0
    before, found, _ = rendered.rpartition(question + after)
    return len(before) + len(found) if found else 0


def _mark_end(marked: list[dict[str, Any]], marks: Marks) -> None:
    final_message = marked[-1] if marked else {}
    is_text = isinstance(final_message.get("content"), str) and not final_message.get("tool_calls")
    if final_message.get("role") != "assistant" or not is_text:
        raise RequestError.of(
            "messages",
            "must end with a text of the assistant if the answer continues it, but do not; add such a "
            "message, or ask for a new one",
        )
    final_message["content"] += marks.mark(_END)


def _until_end(rendered: str, marks: Marks) -> str:
    kept, found, _ = rendered.rpartition(marks.mark(_END))
    if not found or marks.mark(_END) in kept:
        raise RequestError.of(
            "messages",
            "must not end with a text to continue, because the model's chat template does not write it once "
            "and unchanged; end with a message of the user",
        )
    return kept


def _checked_kwargs(kwargs: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """The variables that a client chose. Raises RequestError for one that the template does not read."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise _kwargs_error(f"have at most {MAX_TEMPLATE_KWARGS} variables, but got {len(kwargs)}; leave some out")
    for name, value in kwargs.items():
        if not (name.isidentifier() and name.isascii() and len(name) <= 64) or name.startswith("_"):
            raise _kwargs_error(f"have names of at most 64 letters, digits and _, but got {name[:100]!r}; rename it")
        if name in RESERVED_KWARGS:
            raise _kwargs_error(f"not set {name}, which comes from the request itself; leave it out")
        match value:
            case None | bool():
                pass
            case str():
                if len(value) > MAX_TEMPLATE_KWARG_CHARS:
                    rule = f"have texts of at most {MAX_TEMPLATE_KWARG_CHARS} characters"
                    raise _kwargs_error(f"{rule}, but {name} has {len(value)}; shorten it")
            case int() | float():
                if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63):
                    raise _kwargs_error(f"have finite numbers below 2^63, but {name} is not one; change it")
            case _:
                raise _kwargs_error(f"have texts, numbers, booleans or null, but {name} is something else; change it")
        if name not in read:
            rule = "be variables that the model's chat template reads"
            raise _kwargs_error(f"{rule}, but it does not read {name!r}; leave it out")
    return dict(kwargs)


def _kwargs_error(rule: str) -> RequestError:
    return RequestError(f"chat_template_kwargs must {rule}", param="chat_template_kwargs")
