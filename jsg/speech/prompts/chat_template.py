"""Messages → the prompt text that a model was trained on."""

import functools
import json
import secrets
from collections.abc import Callable
from typing import Any, final

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from jsg.errors import ModelError, RequestError, quote
from jsg.speech.prompts.template_sandbox import TemplateSandbox

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # the names of thoughts in templates, the commonest first
_PROBE = "\ue000content\ue001"  # a content that no template contains


@final
class ChatTemplate:
    """A model's chat template, compiled once. It is immutable, so any number of threads may render at a time.

    Attributes:
        variables: Names of the variables that the template reads, without the sandbox's functions.
        words: Attributes and strings in its source. The template does not know a role, or a field of a message, that is
            not among them.
    """

    def __init__(self, source: str | None, *, bos_token: str | None, eos_token: str | None):
        """Compiles the template.

        Args:
            source: Jinja source as in the model's directory. With None, for a model without one, `render` refuses.
            bos_token: The value of its variable `bos_token`; None leaves it undefined.
            eos_token: The same for `eos_token`.

        Raises:
            ModelError: The source is not a template.
        """
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._sandbox = TemplateSandbox()
        self._template: Template | None = None
        self.variables: frozenset[str] = frozenset()
        self.words: frozenset[str] = frozenset()
        if source is not None:
            self._template = self._compile(source)
            tree = self._sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree)).difference(self._sandbox.globals)
            self.words = _words(tree)

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt text of a conversation.

        The template has written the special tokens into the text, so encode it with `add_special_tokens=False`.

        Args:
            messages: Role and content, and whatever else the template reads. They are copied and never changed.
            add_generation_prompt: End with the beginning of the assistant's turn.
            **extra: More variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: The model has no chat template, or its template does not take these messages.
        """
        if self._template is None:
            raise RequestError(
                "a chat needs a model with a chat template, but this one has none; send the whole prompt as text to "
                "the completions endpoint, or put the model's chat_template.jinja into its directory",
                param="messages",
            )
        given = {"tools": None, "documents": None, **extra, "messages": messages}
        given |= {**self._tokens, "add_generation_prompt": add_generation_prompt}
        try:
            return self._rendered(given)
        except TemplateError as error:
            reason = error.message or "no reason given"
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = str(error)
        except RecursionError:
            reason = "the messages or the template's macros are nested too deeply"
        raise RequestError.of(
            "messages",
            f"must fit the chat template of the model, but it says {quote(reason)}; change roles or contents "
            "so that they do",
        )

    def _rendered(self, given: dict[str, Any]) -> str:
        """What it writes; arguments that are a text are in it as they are.

        Where it writes arguments only as an object, such a text is the one argument `arguments` of the object.
        """
        messages, texts = _with_marked_arguments(given["messages"])
        try:
            written = self._written(given | {"messages": messages})
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            if not texts:
                raise
            written = ""
        if any(mark not in written for mark in texts):
            written = self._written(given | {"messages": _with_arguments(messages, _as_object)})
        for mark, text in texts.items():
            written = written.replace(json.dumps(mark, ensure_ascii=False), mark).replace(mark, text)
        return written

    def _written(self, given: dict[str, Any]) -> str:
        assert self._template is not None, "render checks it"
        try:
            return self._sandbox.render(self._template, _copy_json(given))
        except TypeError:  # DeepSeek's templates take the arguments of calls as texts only
            texts = _with_arguments(given["messages"], _as_text)
            return self._sandbox.render(self._template, _copy_json(given | {"messages": texts}))

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether it writes a content that is a string. A template that loops over parts silently omits it."""
        return self._before_probe(_PROBE) is not None or self._before_probe([_text_part(_PROBE)]) is None

    def around_media(self, kind: str, placeholder: str) -> tuple[str, str] | None:
        """The text that it writes before and after the placeholder of a picture or video; None if it writes none.

        Args:
            kind: The `type` of the part.
            placeholder: The written form of the model's placeholder token.
        """
        before = self._before_probe([_text_part(_PROBE)])
        written = self._before_probe([{"type": kind}, _text_part(_PROBE)])
        if before is None or written is None or written.count(placeholder) != 1:
            return None
        front, after = written.split(placeholder)
        return (front[len(before) :], after) if front.startswith(before) else ("", "")

    @functools.cached_property
    def thoughts_field(self) -> str | None:
        """The field of a message that it reads as the thoughts of an earlier turn; None for none.

        It may then drop them as it likes.
        """
        return next((name for name in _THOUGHTS if name in self.words), None)

    @functools.cached_property
    def takes_thoughts_beside_calls(self) -> bool:
        """Whether a message may have thoughts, a content and a call of a tool. gpt-oss's template refuses all three."""
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": {}}}
        message = {"role": "assistant", "content": "a", "tool_calls": [call]}
        return self._takes({**message, self.thoughts_field or "": "a"}) or not self._takes(message)

    def _takes(self, message: dict[str, Any]) -> bool:
        try:
            self.render([{"role": "user", "content": "a"}, message])
        except RequestError:
            return False
        return True

    def _before_probe(self, content: Any) -> str | None:
        """The text in front of the probe in a user's content; None if the template does not write the probe as is."""
        try:
            rendered = self.render([{"role": "user", "content": content}])
        except RequestError:
            return None
        front, found, _ = rendered.partition(_PROBE)
        is_python = not isinstance(content, str) and "'type'" in rendered  # Jinja wrote the list itself
        return front if found and not is_python else None

    def _compile(self, source: str) -> Template:
        try:
            return self._sandbox.compile_metered(source)
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
        except (TemplateError, RecursionError) as error:
            reason = str(error)
        raise ModelError(f"the chat template must be a Jinja template, but {reason}; correct the model's chat_template")


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _words(tree: nodes.Template) -> frozenset[str]:
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | strings)


def _with_arguments(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The messages, with the arguments of their calls changed."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": function | {"arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [changed(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def _with_marked_arguments(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages, with a mark in place of arguments that are a text; and the text of each mark."""
    texts: dict[str, str] = {}
    nonce = secrets.randbits(64)

    def marked(arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        mark = f"\ue000{nonce}.{len(texts)}\ue001"
        texts[mark] = arguments
        return mark

    return _with_arguments(messages, marked), texts


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _copy_json(value: Any) -> Any:
    """A copy in plain JSON types, so that a template gets no object with methods of its own."""
    match value:
        case str() | None | bool() | int() | float():
            return value
        case dict():
            return {_copy_json(key): _copy_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_copy_json(item) for item in value]
    raise TypeError(f"values must be of the types that JSON has, but one is of type {type(value).__name__}")
