"""How one reply is asked for and read: what of a request depends on the form in which its model writes.

Every interface makes one plan of its own fields. The plan gives what the chat template and the sampling need, and makes
the prompt whose answer is split into thoughts, texts and calls.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jsg.speech.answers.answer import Prompt
from jsg.speech.rules.thinking import ThoughtWish, think
from jsg.speech.rules.tool_use import Choice, Speech, Tool, ToolUse
from jsg.types import GrammarKind, grammar_text


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field in which the client wrote it.

    Attributes:
        field: The client's name of the field.
        kind: The kind of grammar.
        value: The grammar's text, or its value if the client wrote it as JSON.
    """

    field: str
    kind: GrammarKind
    value: Any


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ReplyPlan:
    """The plan of one reply.

    Attributes:
        speech: How the model writes.
        wish: What the client wants of its thoughts.
        constraint: The grammar of the answer. Beside tools it is that of an answer without calls.
        options: The options of the grammar, or of that of the tools.
        tools: The tools that the answer may call, and the header of its text; None for an answer without both.
        is_continued: Whether the answer continues a message, so that it has no thoughts.
    """

    speech: Speech
    wish: ThoughtWish = dataclasses.field(default_factory=ThoughtWish)
    constraint: Constraint | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: ToolUse | None = None
    is_continued: bool = False

    def with_tools(self, tools: Sequence[Tool], choice: Choice) -> "ReplyPlan":
        """The same plan for a turn of a chat, in which the answer may call these tools.

        Raises:
            RequestError: A rule about names and numbers is broken, the model was not made for tools, or the grammar is
                none that an answer with calls can have.
        """
        form = self._text_form(has_calls=bool(tools) and choice.mode != "none", must_call=choice.mode == "required")
        return dataclasses.replace(self, tools=ToolUse.of(tools, choice, self.speech, form))

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the chat template shows."""
        return None if self.tools is None else self.tools.shown

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that follow from the form of the answer. Raises GrammarError."""
        if self.tools is None:
            grammar = {} if self.constraint is None else {self.constraint.kind: self.constraint.value}
            return {**grammar, **self.options}
        grammar = self.tools.grammar()
        fields = dict(self.options) if grammar is None else {"grammar": dataclasses.replace(grammar, **self.options)}
        return fields | ({"skip_special_tokens": False} if self.tools.has_special_marks else {})

    def ready(self, prompt: Prompt, pass_over: Callable[[str, str], None], *, only_complete: bool = False) -> Prompt:
        """The prompt whose answer is read by the plan.

        Args:
            prompt: Its sampling has the fields of `sampling`.
            pass_over: As in `think`, which says what is raised.
            only_complete: A call that the answer does not end is no call.
        """
        form = self.speech.thinking
        if self.tools is not None:
            prompt = dataclasses.replace(prompt, calls=self.tools.call_form(only_complete=only_complete))
            if form is not None and self.tools.dialect.messages is not None:
                form = form.without_gap()  # the header of the answer is in the grammar of the tools
        return think(prompt, form, self.wish, pass_over, may_begin=not self.is_continued)

    def _text_form(self, *, has_calls: bool, must_call: bool) -> Mapping[str, Any] | None:
        """The form of a text that may have calls beside it, or has a header before it."""
        given, dialect = self.constraint, self.speech.dialect
        has_header = dialect is not None and dialect.messages is not None
        if given is None or must_call or not (has_calls or has_header):
            return None
        text = grammar_text(given.kind, given.value)
        return {"type": "whole", "kind": given.kind, "text": text, "field": given.field}
