"""Thoughts of the model before an answer: whether it thinks, for how long, and how they are separated from the answer.

This module serves every API. Each API makes a `ThoughtWish` of its own fields, and shows the thoughts and the text of
an answer in its own form. `jsg.speech.answers.thoughts` has the markers of each kind of model and splits an answer by
them.
"""

import base64
import binascii
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, final

from jsg.constrained.special_tokens import check_names
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Prompt
from jsg.speech.answers.thoughts import Markers, Phase, Thoughts, detect_markers, find_markers, phase_after
from jsg.speech.prompts.chat_template import ChatTemplate
from jsg.speech.rules.thought_grammar import after_thoughts, is_free_text, marker_bytes
from jsg.types import GrammarSpec, ThoughtLimit

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NO_THOUGHTS = "this model does not think before it answers; leave it out"
_NO_BUDGET = "the prompt has ended the thoughts already; leave it out"
_CONTINUED = "an answer that continues a message has no thoughts; leave it out"
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that turn thoughts on or off
_SEAL = "jsg1."
_TAIL_LEN = 64  # tokens in which a template may have opened or ended the thoughts, each of one byte at least


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How a model writes its thoughts.

    Attributes:
        markers: What encloses them.
        tokenizer: The model's.
        special: The written forms of the special tokens that a grammar for this model may name.
    """

    markers: Markers
    tokenizer: Tokenizer
    special: Collection[str]

    @classmethod
    def of(cls, parser: str, tokenizer: Tokenizer, special: Collection[str]) -> "ThoughtForm | None":
        """The form that `--reasoning-parser` names; with "auto" the one that the chat template shows, if any."""
        markers = detect_markers(tokenizer.chat_template) if parser == "auto" else find_markers(parser)
        return None if markers is None else cls(markers, tokenizer, special)

    def without_gap(self) -> "ThoughtForm":
        """The form for answers whose grammar begins right after the thoughts."""
        return dataclasses.replace(self, markers=self.markers.without_gap())

    @property
    def token_ids(self) -> tuple[int | None, int | None]:
        """The special tokens that are the two markers; None where a marker is text or has several parts."""
        markers = (self.markers.begin, self.markers.end)
        begin, end = (self.tokenizer.token_id(text) if text in self.special else None for text in markers)
        return begin, end

    @property
    def keeps_special(self) -> bool:
        """Whether an answer must keep its special tokens as text, because a marker has some among its parts."""
        pairs = zip((self.markers.begin, self.markers.end, self.markers.gap), (*self.token_ids, None), strict=True)
        return any(token_id is None and any(name in text for name in self.special) for text, token_id in pairs)

    def phase_after(self, prompt: Prompt) -> Phase:
        """Where an answer to a prompt begins. A marker that is a special token is found by its id, as in answers."""
        if prompt.ends_in_content:
            return phase_after("", self.markers)
        input_ids = prompt.input_ids
        begin_id, end_id = self.token_ids
        tail_ids = input_ids[-_TAIL_LEN:]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=False)
        last_id = next((token for token in reversed(tail_ids) if not decode((token,)).isspace()), -1)
        if last_id in (begin_id, end_id):
            return Phase.INSIDE if last_id == begin_id else Phase.ANSWER
        tail = decode(tail_ids)
        return phase_after(tail, self.markers, by_begin=begin_id is None, by_end=end_id is None)

    def thoughts(self, phase: Phase, *, has_gap: bool, is_split: bool) -> Thoughts:
        """How an answer is split that begins in a phase."""
        return Thoughts(self.markers, *self.token_ids, phase, has_gap, is_split)

    def limit(self, phase: Phase, max_tokens: int) -> ThoughtLimit:
        """The limit of an answer that begins in a phase."""
        begin, end = (marker_bytes(text, self.special) for text in (self.markers.begin, self.markers.end))
        return ThoughtLimit(begin=begin, end=end, is_inside=phase is Phase.INSIDE, max_tokens=max_tokens)

    def grammar(self, grammar: GrammarSpec | None, phase: Phase) -> GrammarSpec:
        """The grammar of a whole output, thoughts included, made of the grammar of its answer."""
        is_inside = phase is Phase.INSIDE
        return after_thoughts(grammar, self.markers, is_inside=is_inside, special_tokens=self.special)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ThoughtWish:
    """What a client wants of thoughts.

    Attributes:
        is_on: Whether the model thinks; None leaves it to the chat template.
        effort: How much it thinks, for a chat template that reads this.
        budget: The most tokens of thoughts; None for no limit of their own.
        budget_field: The field that brought the budget.
        is_split: Whether thoughts are separated from the answer. Otherwise they are in its text, with their markers.
        is_shown: Whether thoughts that are separated are shown.
        is_streamed: Whether a stream has them as they come. Otherwise they come as a whole when they end.
    """

    is_on: bool | None = None
    effort: Effort | None = None
    budget: int | None = None
    budget_field: str = "thinking_budget"
    is_split: bool = True
    is_shown: bool = True
    is_streamed: bool = True

    def template_kwargs(self, template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a chat template that ask for it, besides those that a client gave by name."""
        variables = template.variables - given.keys()
        kwargs: dict[str, Any] = {}
        is_on = self.is_on if self.is_on is not None or self.effort is None else self.effort != "none"
        if is_on is not None and not any(name in given for name in _SWITCHES):
            kwargs |= {name: is_on for name in _SWITCHES if name in variables}
        if self.effort is not None and "reasoning_effort" in variables:
            kwargs["reasoning_effort"] = self.effort
        return kwargs


def think(
    prompt: Prompt,
    form: ThoughtForm | None,
    wish: ThoughtWish,
    pass_over: Callable[[str, str], None],
    *,
    may_begin: bool = True,
) -> Prompt:
    """The prompt whose answer may begin with thoughts: they are split off, limited, and no grammar governs them.

    Args:
        prompt: As it is for a model that does not think.
        form: How the model thinks; None where it does not.
        wish: What the client wants.
        pass_over: Is called with the name of a field that has no effect, a budget without thoughts, and the reason.
        may_begin: False where the answer continues a message, which has no thoughts then.

    Raises:
        RequestError: `pass_over` raised it.
        GrammarError: The grammar of the prompt names a special token that the model does not have.
    """
    phase = Phase.ANSWER if form is None or not may_begin else form.phase_after(prompt)
    if form is None or phase is Phase.ANSWER:
        if wish.budget is not None:
            why = NO_THOUGHTS if form is None else _NO_BUDGET if may_begin else _CONTINUED
            pass_over(wish.budget_field, why)
        return prompt
    sampling, has_gap = prompt.sampling, False
    if isinstance(sampling.grammar, GrammarSpec) or wish.budget is not None:
        assert not isinstance(sampling.grammar, str), "only the engine knows a grammar by its key"
        given = sampling.grammar
        if given is not None:
            check_names(given, form.special)
            has_gap = not is_free_text(given)
        sampling = dataclasses.replace(sampling, grammar=form.grammar(given, phase))
    if form.keeps_special or not wish.is_split:
        sampling = dataclasses.replace(sampling, skip_special_tokens=False)
    return dataclasses.replace(
        prompt,
        sampling=sampling,
        thoughts=form.thoughts(phase, has_gap=has_gap, is_split=wish.is_split),
        thought_limit=None if wish.budget is None else form.limit(phase, wish.budget),
    )


def sealed(thoughts: str) -> str:
    """Thoughts as one word that `unsealed` takes back, for clients that keep what they need not read."""
    return _SEAL + base64.urlsafe_b64encode(thoughts.encode()).decode()


def unsealed(word: str) -> str | None:
    """The thoughts in a word of `sealed`; None for the word of another server."""
    if not word.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(word.removeprefix(_SEAL), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def signature_of(thoughts: str) -> str:
    """A digest of thoughts, for APIs whose thoughts are signed. Nothing checks it."""
    return hashlib.sha256(thoughts.encode()).hexdigest()
