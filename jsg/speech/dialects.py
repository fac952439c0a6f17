"""The written forms of calls of tools. A dialect is data: its grammar and its parser are both made from one record.

`jsg.speech.rules.call_grammar` writes the grammar of a record, and `jsg.speech.answers.tool_calls` reads answers by it.
A new dialect of a style that exists is one more record here.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Literal, final

from jsg.constrained.call_styles import CallStyle


@final
class Slot(enum.Enum):
    """A place in the written form of a call."""

    BODY = enum.auto()
    """The name and the arguments, as the style of the dialect writes them."""
    NAME = enum.auto()
    """The name of the tool."""
    NUMBER = enum.auto()
    """The number of the call, in digits."""
    MARKED_ID = enum.auto()
    """`[CALL_ID]` and an id of nine letters and digits, which some models of a family write and others do not."""
    ARGUMENTS = enum.auto()
    """The arguments as a JSON object."""


Style = Literal["object", "headed"] | CallStyle
"""How a call has its name and arguments: in a JSON object, as a head and then a JSON object, or not as JSON."""


Piece = str | Slot


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Messages:
    """Answers that are rows of messages, each with a header. The headers and ends are never text.

    Attributes:
        start: What a message begins with. The prompt has it already for the first one.
        before: The header and the end of a text that a call or another text follows.
        last: The header of the text that ends an answer.
        head_end: The string that ends every header.
        calls: Other forms of a call, with the recipient in front of the channel.
    """

    start: tuple[str, ...]
    before: tuple[tuple[str, ...], tuple[str, ...]]
    last: tuple[str, ...]
    head_end: str
    calls: tuple[tuple[Piece, ...], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a family of models writes calls.

    Strings that are special tokens in some tokenizers are pieces of their own, so that a grammar can name the tokens.

    Attributes:
        name: Its name in `--tool-call-parser`.
        aliases: The names that it has in other servers. Two dialects may share an alias; the chat template decides.
        shown_by: A chat template that has all the strings of one of these groups is of this dialect, unless it is of
            an earlier one.
        style: How the body of a call is read.
        call: A call as the model writes it; what follows the arguments is its end.
        section: What comes before the first call and after the last one.
        wrap: What may enclose all that, where it is a special token.
        between: What the model writes between two calls.
        skipped: Characters besides white space that are no text if nothing else is between two calls.
        triggers: Strings in a text that begin a call, or may. () for the first piece of the section or of the call.
        markers: Strings that are special tokens in some tokenizers.
        arguments_key: The key of the arguments in a JSON object.
        head: A regular expression of what a reader takes for the head of a call, with the group `name` (or `first`),
            and the group `id` if the model itself gives calls their ids. No run of characters matches in two ways.
        messages: The form of answers that are rows of messages.
        id_form: How ids of calls look that this server gives.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shown_by: tuple[tuple[str, ...], ...]
    style: Style
    call: tuple[Piece, ...]
    section: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    wrap: tuple[str, str] = ("", "")
    between: tuple[str, ...] = ()
    skipped: str = ""
    triggers: tuple[str, ...] = ()
    markers: tuple[str, ...]
    arguments_key: str = "arguments"
    head: str = ""
    messages: Messages | None = None
    id_form: Literal["call", "nine_letters"] = "call"

    def openings(self, names: Sequence[str]) -> tuple[str, ...]:
        """The strings in a text that may begin a call of one of these tools."""
        if self.style == "python" and self.section[0][0] not in self.markers:
            return (*(f"{self.section[0][0]}{name}(" for name in names), self.wrap[0])
        firsts = (*self.section[0][:1], self.call[0])
        found = self.triggers or tuple(each for each in firsts if isinstance(each, str))
        return (*found, self.wrap[0]) if self.wrap[0] else found

    @property
    def call_style(self) -> CallStyle | None:
        """The style of the arguments where they are not JSON."""
        return None if self.style in ("object", "headed") else self.style

    @property
    def end(self) -> tuple[str, ...]:
        """What follows the body of a call, without white space."""
        last_slot = max(i for i, piece in enumerate(self.call) if isinstance(piece, Slot))
        return _without_space(self.call[last_slot + 1 :])

    @property
    def has_marked_section(self) -> bool:
        """Whether what comes before the first call cannot be text."""
        return self.section[0][:1] != () and self.section[0][0] in self.markers

    @property
    def section_marks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The section without white space."""
        return _without_space(self.section[0]), _without_space(self.section[1])


def _without_space(pieces: Sequence[Piece]) -> tuple[str, ...]:
    stripped = [piece.strip() for piece in pieces if isinstance(piece, str)]
    return tuple(piece for piece in stripped if piece)


_NAME = r"(?P<name>[\w.-]+)"

_HARMONY = Messages(
    start=("<|start|>", "assistant"),
    before=(("<|channel|>", "commentary", "<|message|>"), ("<|end|>",)),
    last=("<|channel|>", "final", "<|message|>"),
    head_end="<|message|>",
    calls=(
        (" to=functions.", Slot.NAME, "<|channel|>", "commentary json", "<|message|>", Slot.ARGUMENTS, "<|call|>"),
        (
            *(" to=functions.", Slot.NAME, "<|channel|>", "commentary ", "<|constrain|>", "json", "<|message|>"),
            *(Slot.ARGUMENTS, "<|call|>"),
        ),
    ),
)

_RECORDS = (
    Dialect(
        name="kimi_k2",
        shown_by=(("<|tool_calls_section_begin|>",),),
        style="headed",
        section=(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
        call=(
            *("<|tool_call_begin|>", "functions.", Slot.NAME, ":", Slot.NUMBER, "<|tool_call_argument_begin|>"),
            *(Slot.ARGUMENTS, "<|tool_call_end|>"),
        ),
        markers=(
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        head=rf"\s*+(?P<id>functions\.{_NAME}:\d+)\s*+<\|tool_call_argument_begin\|>\s*+",
    ),
    Dialect(
        name="deepseek_v3",
        aliases=("deepseekv3",),
        shown_by=(("<｜tool▁calls▁begin｜>", "```json"),),
        style="headed",
        section=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
        call=(
            *("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", Slot.NAME, "\n```json\n"),
            *(Slot.ARGUMENTS, "\n```", "<｜tool▁call▁end｜>"),
        ),
        between=("\n",),
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
        head=rf"\s*+function\s*+<｜tool▁sep｜>\s*+{_NAME}\s*+```json\s*+",
    ),
    Dialect(
        name="deepseek_v31",
        aliases=("deepseekv31",),
        shown_by=(("<｜tool▁calls▁begin｜>",),),
        style="headed",
        section=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
        call=("<｜tool▁call▁begin｜>", Slot.NAME, "<｜tool▁sep｜>", Slot.ARGUMENTS, "<｜tool▁call▁end｜>"),
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
        head=rf"\s*+{_NAME}\s*+<｜tool▁sep｜>\s*+",
    ),
    Dialect(
        name="harmony",
        aliases=("gpt-oss", "openai"),
        shown_by=(("<|channel|>", "<|message|>"),),
        style="headed",
        call=(
            *("<|channel|>", "commentary to=functions.", Slot.NAME, " ", "<|constrain|>", "json", "<|message|>"),
            *(Slot.ARGUMENTS, "<|call|>"),
        ),
        between=("<|start|>", "assistant"),
        triggers=("<|start|>", "<|channel|>", " to=functions."),
        markers=(
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
        # The recipient comes before the channel or after it.
        head=(
            r"(<\|start\|>assistant)?\s*+(to=functions\.(?P<first>[\w.-]+))?\s*+"
            r"(<\|channel\|>\s*+(commentary|analysis)?\s*+(to=functions\.(?P<name>[\w.-]+))?)?"
            r"\s*+(<\|constrain\|>)?(json)?\s*+<\|message\|>\s*+"
        ),
        messages=_HARMONY,
    ),
    Dialect(
        name="mistral_args",
        aliases=("mistral",),
        shown_by=(("[TOOL_CALLS]", "[ARGS]"),),
        style="headed",
        call=("[TOOL_CALLS]", Slot.NAME, Slot.MARKED_ID, "[ARGS]", Slot.ARGUMENTS),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        head=rf"\s*+{_NAME}(\[CALL_ID\]((?P<id>[a-zA-Z0-9]{{9}})|\w*))?(\[ARGS\])?\s*+",
        id_form="nine_letters",
    ),
    Dialect(
        name="mistral",
        shown_by=(("[TOOL_CALLS]",),),
        style="object",
        section=(("[TOOL_CALLS]", "["), ("]",)),
        call=(Slot.BODY,),
        between=(", ",),
        skipped=",",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_form="nine_letters",
    ),
    Dialect(
        name="nemotron_json",
        aliases=("nemotron",),
        shown_by=(("<TOOLCALL>",),),
        style="object",
        section=(("<TOOLCALL>", "["), ("]", "</TOOLCALL>")),
        call=(Slot.BODY,),
        between=(", ",),
        skipped=",",
        markers=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    Dialect(
        name="qwen3_coder",
        aliases=("qwen3_xml",),
        shown_by=(("<tool_call>", "<function="),),
        style="qwen_xml",
        call=("<tool_call>", "\n", Slot.BODY, "\n", "</tool_call>"),
        between=("\n",),
        markers=("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    ),
    Dialect(
        name="glm45",
        aliases=("glm", "glm47"),
        shown_by=(("<tool_call>", "<arg_key>"),),
        style="glm_xml",
        call=("<tool_call>", Slot.BODY),
        between=("\n",),
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Dialect(
        name="minimax_m2",
        aliases=("minimax-m2", "minimax"),
        shown_by=(("<minimax:tool_call>",),),
        style="minimax_xml",
        section=(("<minimax:tool_call>", "\n"), ("\n", "</minimax:tool_call>")),
        call=(Slot.BODY,),
        between=("\n",),
        markers=(
            *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>"),
            *('<parameter name="', "</parameter>"),
        ),
    ),
    Dialect(
        name="gemma4",
        shown_by=(("<|tool_call>",),),
        style="gemma",
        call=("<|tool_call>", Slot.BODY, "<tool_call|>"),
        markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Dialect(
        name="functiongemma",
        shown_by=(("<start_function_call>",),),
        style="function_gemma",
        call=("<start_function_call>", Slot.BODY, "<end_function_call>"),
        markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Dialect(
        name="lfm2",
        shown_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        style="python",
        section=(("<|tool_call_start|>", "["), ("]", "<|tool_call_end|>")),
        call=(Slot.BODY,),
        between=(", ",),
        skipped=",",
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Dialect(
        name="pythonic",
        aliases=("llama4_pythonic", "llama4"),
        shown_by=(("[func_name1(",), ("<|python_start|>[",)),
        style="python",
        section=(("[",), ("]",)),
        wrap=("<|python_start|>", "<|python_end|>"),
        call=(Slot.BODY,),
        between=(", ",),
        skipped=",",
        markers=("<|python_start|>", "<|python_end|>"),
    ),
    Dialect(
        name="hermes",
        aliases=("qwen25", "qwen"),
        shown_by=(("<tool_call>",),),
        style="object",
        call=("<tool_call>", "\n", Slot.BODY, "\n", "</tool_call>"),
        between=("\n",),
        markers=("<tool_call>", "</tool_call>"),
    ),
    Dialect(
        name="llama3_json",
        aliases=("llama3", "llama4_json"),
        shown_by=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
        style="object",
        call=(Slot.BODY,),
        between=("; ",),
        skipped=";,",
        wrap=("<|python_tag|>", ""),
        triggers=('{"name"', '{"type": "function"', '{"type":"function"', '{ "name"', '{\n  "name"', '{\n    "name"'),
        markers=("<|python_tag|>",),
        arguments_key="parameters",
    ),
)

DIALECTS = {dialect.name: dialect for dialect in _RECORDS}
"""All dialects by name, in the order in which templates are compared with them."""


def detect_dialect(chat_template: str | None) -> Dialect | None:
    """The dialect of a chat template; None if it is unknown."""
    return _shown_first(chat_template or "", _RECORDS)


def choose_dialect(parser_name: str, chat_template: str | None) -> Dialect | None:
    """The dialect of that name. If several have it, and for "auto", the one that the template shows."""
    if parser_name == "auto":
        return detect_dialect(chat_template)
    named = [each for each in _RECORDS if parser_name in (each.name, *each.aliases)]
    return _shown_first(chat_template or "", named) or DIALECTS.get(parser_name, named[0])


def _shown_first(text: str, dialects: Sequence[Dialect]) -> Dialect | None:
    return next(
        (each for each in dialects if any(all(sign in text for sign in group) for group in each.shown_by)), None
    )
