"""A chat template, rendered turn by turn.

A template is written for whole conversations, but a program's prompt grows by turns, and what is in it must stay.
So conversations of the same roles are rendered with a mark in place of each content. The text that the template writes
between two marks goes between two turns. The model's own template writes it in every case: there is no table of
templates, and turns that the template refuses are refused.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import final

from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.prompts.client_text import Marks

Roles = tuple[str, ...]
MAX_TURNS = 4096
_CACHED_SHAPES = 512
_FOLLOWERS: dict[str, tuple[Roles, ...]] = {
    "system": (("user",), ("user", "assistant"), ("assistant",), ()),
    "user": (("assistant",), (), ("user",)),
    "assistant": (("user",), (), ("assistant",)),
}
"""What may follow a turn, the likeliest first. Some templates write a turn only together with the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """The text that a template writes between the contents of two turns, or before the first content.

    Attributes:
        text: The text before a content that is given.
        reply: The text before a content that the model writes from its beginning: the generation prompt.
        trims_start: The template takes white space off the front of the content.
        trims_end: The same for its end.
    """

    text: str
    reply: str
    trims_start: bool
    trims_end: bool

    @property
    def certain(self) -> str:
        """The common beginning of `text` and `reply`."""
        return _common_prefix([self.text, self.reply])


@final
class ChatTurns:
    """The texts before, between and after the turns of a conversation. Only its cache changes.

    A conversation is given by its roles in order. A default system prompt, and all else that the template writes before
    the first content, is part of the first turn's opening.

    Attributes:
        bos_token: The value of the template's variable `bos_token`, or None.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None,
        eos_token: str | None,
        placeholders: Mapping[str, str] | None = None,
    ):
        """Compiles a template. The arguments are those of `ChatTemplate`, and the placeholders of a `MediaReader`.

        Raises:
            RequestError: There is no template.
            ModelError: The source is not a template.
        """
        if source is None:
            raise RequestError(
                "turns of system, user and assistant need a model with a chat template, but this one has none; "
                "write the prompt without turns, or use a model whose tokenizer has a chat_template",
                param="messages",
            )
        from jsg.speech.prompts.chat_template import (
            ChatTemplate,
        )  # it brings Jinja, which a program without turns never needs

        self.bos_token = bos_token
        self._placeholders = placeholders or {}
        self._template = ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
        self._opening = functools.lru_cache(_CACHED_SHAPES)(self._find_opening)
        self._closing = functools.lru_cache(_CACHED_SHAPES)(self._find_closing)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, placeholders: Mapping[str, str] | None = None) -> "ChatTurns":
        """The turns of a tokenizer's template. Raises as `ChatTurns` does."""
        source, bos_token, eos_token = tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
        return cls(source, bos_token=bos_token, eos_token=eos_token, placeholders=placeholders)

    def opening(self, roles: Sequence[str]) -> Opening:
        """The text between the content of the last of these turns and the content before it.

        Raises:
            RequestError: The template does not take turns of these roles, or does not write them one after another.
        """
        return self._opening(_checked(roles))

    def closing(self, roles: Sequence[str]) -> str:
        """The text after the last content whatever comes next. The rest is in the next opening.

        Raises:
            RequestError: As `opening`.
        """
        return self._closing(_checked(roles))[0]

    def ending(self, roles: Sequence[str]) -> str:
        """The text after the last content if no turn comes next. Raises as `opening`.

        If the template cannot end there, it is the result of `closing`.
        """
        return self._closing(_checked(roles))[1]

    def around_media(self, kind: str) -> tuple[str, str]:
        """The texts that the template writes before and after a picture or video in a turn.

        For a template that has no place for one it is a line break after it, as in LLaVA (arXiv:2304.08485).
        """
        placeholder = self._placeholders.get(kind)
        found = None if placeholder is None else self._template.around_media(kind, placeholder)
        return ("", "\n") if found is None else found

    # Results that are cached.

    def _find_opening(self, roles: Roles) -> Opening:
        refusal: RequestError | None = None
        for followers in _FOLLOWERS[roles[-1]]:
            try:
                before, trims = self._before_last(roles, followers)
            except RequestError as error:
                refusal = refusal or error
                continue
            reply = self._reply(roles, before) if roles[-1] == "assistant" else before
            return Opening(before, reply, *trims)
        assert refusal is not None
        raise refusal

    def _find_closing(self, roles: Roles) -> tuple[str, str]:
        """The text that follows in any case, and the text that follows if nothing comes next."""
        ending = self._behind(roles, prompts=False)
        nexts = [] if ending is None else [ending]
        for role in _FOLLOWERS:
            try:
                opening = self.opening((*roles, role))
            except RequestError:
                continue
            nexts.append(opening.certain)
        if not nexts:
            self.opening(roles)  # raises the reason
        certain = _common_prefix(nexts)
        return certain, certain if ending is None else ending

    def _reply(self, roles: Roles, before: str) -> str:
        """The generation prompt in front of the last turn, which is the assistant's."""
        prompted = self._behind(roles[:-1], prompts=True)
        plain = self._behind(roles[:-1], prompts=False)
        if prompted is None:
            return before
        if prompted == plain:
            # The template has no generation prompt. The model must write a blank before its content, because that is
            # the beginning of its first word. It does not write the line break that ends a header.
            return before.rstrip(" ")
        return prompted

    # Renderings.

    def _before_last(self, roles: Roles, followers: Roles) -> tuple[str, tuple[bool, bool]]:
        """The text between the last content and the one before, and whether the last is trimmed at either end."""
        last = len(roles) - 1
        pieces, found = self._render_marked((*roles, *followers), blank_at=last)
        if found.count(last) != 1 or (last and last - 1 not in found):
            raise _not_in_turns(roles)
        place = found.index(last)
        if (found[place - 1] if place else -1) != last - 1:
            # Some templates write the system's content before the newest turn of the user. In the prompt it already
            # comes before the user's first turn, and there it stays.
            if roles[0] == "system" and last > 1:
                return self._before_last(roles[1:], followers)
            raise _not_in_turns(roles)
        before, after = pieces[place], pieces[place + 1]
        return before.removesuffix(_BLANK), (not before.endswith(_BLANK), not after.startswith(_BLANK))

    def _behind(self, roles: Roles, *, prompts: bool) -> str | None:
        """The text after the last content if nothing comes next, with or without the generation prompt."""
        try:
            pieces, found = self._render_marked(roles, prompts=prompts)
        except RequestError:
            return None
        return pieces[-1] if (found[-1] if found else -1) == len(roles) - 1 else None

    def _render_marked(
        self, roles: Roles, *, blank_at: int | None = None, prompts: bool = False
    ) -> tuple[list[str], list[int]]:
        """The texts that the template writes around the contents, and which contents it writes, which are one fewer.

        The content at `blank_at` has white space around it.
        """
        marks = Marks()
        contents = [marks.mark(i) for i in range(len(roles))]
        if blank_at is not None:
            contents[blank_at] = _BLANK + contents[blank_at] + _BLANK
        refusal: RequestError | None = None
        as_parts = [[{"type": "text", "text": text}] for text in contents]  # as templates of models that see take it
        for form in (contents, as_parts):
            messages = [{"role": role, "content": content} for role, content in zip(roles, form, strict=True)]
            try:
                rendered = self._template.render(messages, add_generation_prompt=prompts)
            except RequestError as error:
                refusal = refusal or error
                continue
            pieces, found = marks.split(rendered)
            if found or not roles:
                return pieces, found
        raise refusal or _not_in_turns(roles)


_BLANK = "\t\n\t"  # white space that no template contains


def _common_prefix(texts: Sequence[str]) -> str:
    shortest, *_ = sorted(texts, key=len)
    length = next((i for i in range(len(shortest)) if len({text[i] for text in texts}) > 1), len(shortest))
    return shortest[:length]


def _checked(roles: Sequence[str]) -> Roles:
    for role in roles:
        if role not in _FOLLOWERS:
            raise RequestError(f"a turn is of {', '.join(_FOLLOWERS)}, but got {role!r}; use one of them", "messages")
    if len(roles) > MAX_TURNS:
        message = f"a prompt must have at most {MAX_TURNS} turns, but has {len(roles)}; shorten it"
        raise RequestError(message, "messages")
    return tuple(roles)


def _not_in_turns(roles: Roles) -> RequestError:
    return RequestError(
        "the model's chat template must write the turns of a program one after another, but it does not for "
        f"{', '.join(roles)}; use other roles, or write the prompt without turns",
        param="messages",
    )
