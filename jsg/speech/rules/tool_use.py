"""Tools that an answer may call: the model is shown them, a grammar enforces their form, a parser reads the calls.

This module serves every API. Each API makes a `ToolUse` of its own fields, and shows the text and the calls of an
answer in its own form. A dialect is how a model writes calls in text; `jsg.speech.dialects` has the dialects.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

from jsg.constrained.call_styles import XML_MARKS, ArgumentTypes
from jsg.errors import FieldName, RequestError
from jsg.speech.answers.parts_reader import CallForm
from jsg.speech.dialects import Dialect
from jsg.speech.prompts.chat_template import ChatTemplate
from jsg.speech.rules.call_grammar import Tool, form_to_structural_tag, tools_to_structural_tag
from jsg.speech.rules.thinking import ThoughtForm
from jsg.types import GrammarSpec

MAX_TOOLS = 128

_TOOLS, _CHOICE = FieldName("tools"), FieldName("tool_choice")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which tools an answer calls.

    Attributes:
        mode: "none" allows no calls, "auto" leaves it to the model, "required" demands at least one.
        names: The tools that it may call; None for all.
        is_one_call: Whether it makes at most one call.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_one_call: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Speech:
    """How a model writes.

    Attributes:
        template: Its chat template.
        dialect: How it writes calls; None where that is not known.
        special: The markers of calls and thoughts that are special tokens of the model.
        thinking: How it writes its thoughts; None where it writes none.
    """

    template: ChatTemplate
    dialect: Dialect | None
    special: frozenset[str]
    thinking: ThoughtForm | None = None

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows the model its tools."""
        return "tools" in self.template.variables


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how they are called.

    Where answers are rows of messages with headers, a request without tools has this too, with no tool to call.

    Attributes:
        shown: All tools that the model is shown, as the chat template takes them; None where it is shown none.
        callable: The tools that the answer may call.
        is_required: Whether the answer must have a call; otherwise it may be text only.
        is_parallel: Whether the answer may have several calls.
        dialect: How calls are written.
        special: The markers of calls that are special tokens of the model.
        form: The form of an answer without calls, as a format of a structural tag; None for free text.
    """

    shown: Sequence[Mapping[str, Any]] | None
    callable: Sequence[Tool]
    is_required: bool
    is_parallel: bool
    dialect: Dialect
    special: frozenset[str]
    form: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, tools: Sequence[Tool], choice: Choice, speech: Speech, form: Mapping[str, Any] | None = None
    ) -> "ToolUse | None":
        """How a model uses these tools, in an answer whose text may have to have a form; None for a plain text.

        Raises:
            RequestError: A rule about names and numbers is broken, or the model was not made for tools.
        """
        _check_names([tool.name for tool in tools], choice.names)
        if choice.mode == "none" or not tools:
            if choice.mode == "required" or choice.names is not None:
                rule = (" needs ", _TOOLS, ", but the request has none; send some, or leave it out")
                raise RequestError((_CHOICE, *rule), "tool_choice")
            if speech.dialect is None or speech.dialect.messages is None:
                return None
            return cls(None, (), False, False, speech.dialect, speech.special, form)
        if not speech.shows_tools:
            raise _not_for_this_model("its chat template does not show them")
        if speech.dialect is None:
            raise _not_for_this_model(
                "its chat template does not show the form of its calls; start the server with --tool-call-parser"
            )
        return cls(
            shown=[tool.shown() for tool in tools],
            callable=[tool for tool in tools if choice.names is None or tool.name in choice.names],
            is_required=choice.mode == "required",
            is_parallel=not choice.is_one_call,
            dialect=speech.dialect,
            special=speech.special,
            form=form,
        )

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools that the answer may call."""
        return frozenset(tool.name for tool in self.callable)

    def call_form(self, *, only_complete: bool = False) -> CallForm:
        """How the answer writes calls. With `only_complete` a call that was cut short does not count."""
        types: dict[str, ArgumentTypes] = {}
        if self.dialect.call_style in XML_MARKS:
            types = {tool.name: ArgumentTypes.read(tool.schema) for tool in self.callable}
        return CallForm(self.dialect, self.names, types, only_complete)

    @property
    def has_special_marks(self) -> bool:
        """Whether special tokens mark calls, so that the text of an answer must keep its special tokens."""
        return not self.special.isdisjoint(self.dialect.markers)

    def grammar(self) -> GrammarSpec | None:
        """The grammar of the whole text of an answer: calls, and where none is required free text or the form.

        None for free text without calls.
        """
        if not self.callable:
            form = self.form
            return None if form is None else form_to_structural_tag(form, self.dialect, self.special)
        return tools_to_structural_tag(
            self.callable,
            "required" if self.is_required else "auto",
            self.dialect,
            parallel=self.is_parallel,
            special_tokens=self.special,
            form=self.form,
        )


def _check_names(tools: Sequence[str], chosen: Sequence[str] | None) -> None:
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            (f"a request may have at most {MAX_TOOLS} ", _TOOLS, f", but has {len(tools)}; leave some out"), "tools"
        )
    for name in tools:
        if tools.count(name) > 1:
            rule = ("each of the ", _TOOLS, f" must have its own name, but two are {name!r}; rename one")
            raise RequestError(rule, "tools")
    for name in chosen or ():
        if name not in tools:
            wrong = f" of the request, but {name[:100]!r} is none of them; correct it"
            raise RequestError((_CHOICE, " must name ", _TOOLS, wrong), "tool_choice")


def _not_for_this_model(reason: str) -> RequestError:
    remedy = (f": {reason}; leave ", _TOOLS, " out, or serve a model that was trained to call ", _TOOLS)
    return RequestError(("this model cannot call ", _TOOLS, *remedy), "tools")
