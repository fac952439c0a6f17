"""The fields that chat completions and completions share."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from jsg.errors import RequestError
from jsg.processing.answer import Prompt
from jsg.server.caller import ApiCall
from jsg.server.generation import new_rid
from jsg.server.http.body import GRAMMAR, Body, Rid, client_names, is_off
from jsg.server.openai.response_format import OWN_WHITESPACE, Choices, ResponseFormat, StructuredOutputs
from jsg.server.shared.constraint import (
    Constraint,
    PropertyOrderOption,
    Schema,
    WhitespaceOption,
    grammar_fields,
    only_one,
)
from jsg.server.shared.fields import MAX_NAME_CHARS, Only
from jsg.server.shared.sampling import own_names, sampling_fields, with_sampling
from jsg.server.tool_use import ToolUse
from jsg.types import GRAMMAR_FIELDS, GrammarKind, SamplingParams

GRAMMARS: Mapping[str, GrammarKind] = {
    **{name: name for name in GRAMMAR_FIELDS},
    **{"guided_regex": "regex", "guided_json": "json_schema", "guided_grammar": "ebnf", "guided_choice": "choices"},
}
"""Field that has a grammar and nothing else → the kind of grammar."""

_NO_CODE = "code of clients is never run; use logit_bias, or sample by yourself from the logprobs"
_ONE_ENGINE = "one engine does both prefill and decode here"
_TEXT_ONLY = "the prompt is text or token ids only in this version"


class StreamOptions(Body):
    """`stream_options`."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "include_obfuscation": "false only: events are never padded with random characters"
    }

    include_usage: bool | None = Field(None, description="End the stream with an event that has the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="vLLM's: with `include_usage`, every event has the usage of its answer so far."
    )
    include_obfuscation: Annotated[Any, Only((False,), "events are never padded here; leave it out")] = None


class OpenAIBody(with_sampling(Body, "openai")):
    """The fields of both endpoints; null means the default. Those beyond OpenAI's are SGLang's and vLLM's."""

    NAMES: ClassVar[Mapping[str, str]] = own_names("openai") | {"return_logprob": "logprobs"}
    """Our name of a field → OpenAI's name."""

    PROMPT: ClassVar[str] = "prompt"
    """The field that holds the prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "guided_decoding_backend": "there is one engine for grammars; leave it out",
        "guided_whitespace_pattern": OWN_WHITESPACE,
        **dict.fromkeys(("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"), _NO_CODE),
        **dict.fromkeys(("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), _ONE_ENGINE),
        **dict.fromkeys(("prompt_embeds", "input_embeds", "mm_processor_kwargs", "media_io_kwargs"), _TEXT_ONLY),
        **dict.fromkeys(("length_penalty", "early_stopping"), "there is no beam search; use n and sampling"),
        **dict.fromkeys(("allowed_token_ids", "bad_words"), "use logit_bias"),
        "prompt_logprobs": "send echo with logprobs to /v1/completions, or logprob_start_len to /generate",
        "truncate_prompt_tokens": "a prompt is never shortened here; shorten it before you send it",
        "lora_path": "adapters are not in this version",
        "session_params": "a prefix that was computed once is found without a session; send the whole prompt",
    }

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "spaces_between_special_tokens": "a text is what its tokens say, as with every fast tokenizer",
        "use_beam_search": "false only; there is no beam search",
        "return_hidden_states": "false only; they stay in the engine",
        "return_token_ids": "false only; /generate gives them",
        "metadata": "labels for the lists of an OpenAI account; there are no such lists here",
    }

    model: str | None = Field(None, description="The name in `/v1/models`; absent is as good.")
    stream: bool | None = Field(None, description="Answer with events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The end user, for the request log.")
    metadata: dict[str, str] | None = Field(None, max_length=16)
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended the answer in its text.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Logprobs name tokens `token_id:17` instead of by their text."
    )
    cache_salt: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="Share cached prefixes only with requests of the same salt."
    )
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description="As `cache_salt`; both must be equal.")
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="Larger goes first, as in SGLang. vLLM means the opposite: turn the sign for its clients.",
    )
    rid: Rid | None = Field(None, description="Name of the request and `id` of the answer; `/abort_request` takes it.")
    request_id: Rid | None = Field(None, description="vLLM's: the same with `cmpl-` or `chatcmpl-` in front.")

    response_format: ResponseFormat | None = Field(None, description="The form of the answer; one grammar at most.")
    regex: str | None = Field(None, description="SGLang's: the whole answer matches it.")
    json_schema: Schema | str | None = Field(None, description="SGLang's: the schema, or its text.")
    ebnf: str | None = Field(None, description="SGLang's: a grammar, whose rule `root` is the whole answer.")
    choices: Choices | None = Field(None, description="Texts, of which the answer is one.")
    structural_tag: str | dict[str, Any] | None = Field(None, description="SGLang's: JSON, or the value itself.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's.")
    guided_json: Schema | str | None = Field(None, description="vLLM's older name of `json_schema`.")
    guided_regex: str | None = Field(None, description="vLLM's older name of `regex`.")
    guided_choice: Choices | None = Field(None, description="vLLM's: texts, of which the answer is one.")
    guided_grammar: str | None = Field(None, description="vLLM's older name of `ebnf`.")
    whitespace: WhitespaceOption = None
    property_order: PropertyOrderOption = None

    spaces_between_special_tokens: bool | None = None
    use_beam_search: Annotated[Any, Only((False,), "there is no beam search; use n and sampling")] = None
    return_hidden_states: Annotated[Any, Only((False,), "hidden states stay in the engine")] = None
    return_token_ids: Annotated[Any, Only((False,), "/generate gives the token ids")] = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_off(cls, data: Any) -> Any:
        """Some clients send every field they know: off, what is refused here asks for nothing."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in cls.REFUSED or not is_off(value)}

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return sampling_fields(self, "openai")["n"] or 1

    @property
    def wants_usage_event(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event has the usage."""
        return self.wants_usage_event and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def response_id(self, prefix: str) -> str:
        """The name of the request, which is the id of the response."""
        return self.rid or f"{prefix}-{self.request_id or new_rid()}"

    def constraint(self) -> Constraint | None:
        """The grammar that the answer must match. Raises RequestError where several are given."""
        return only_one(self._constraints())

    def _constraints(self) -> Iterator[Constraint]:
        for given in (self.response_format, self.structured_outputs):
            if given is not None:
                yield from given.constraints()
        for name, kind in GRAMMARS.items():
            if (value := getattr(self, name)) is not None:
                yield Constraint(name, kind, value)

    def to_prompt(
        self,
        call: ApiCall,
        rid: str,
        input_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        tools: ToolUse | None = None,
        **others: Any,
    ) -> Prompt:
        """A prompt that is sampled as the body says; `others` are fields of `Prompt`. Raises RequestError."""
        return Prompt(
            rid=rid,
            input_ids=input_ids,
            sampling=self._to_sampling(max_new_tokens, tools),
            namespace=call.caller.namespace(self.cache_salt, self.extra_key),
            priority=self.priority or 0,
            **others,
        )

    def own_names(self) -> AbstractContextManager[None]:
        """A RequestError that is raised inside names fields as the client knows them."""
        return client_names(self._names(), self._params())

    def _names(self) -> dict[str, str]:
        constraint = self.constraint()
        grammar = {} if constraint is None else {GRAMMAR: constraint.field}
        return {**self.NAMES, "input_ids": self.PROMPT, **grammar}

    def _params(self) -> dict[str, str]:
        return {"text": self.PROMPT}

    def _to_sampling(self, max_new_tokens: int, tools: ToolUse | None) -> SamplingParams:
        fields = sampling_fields(self, "openai")
        fields["no_stop_trim"] = fields["no_stop_trim"] or self.include_stop_str_in_output
        options = {"whitespace": self.whitespace, "property_order": self.property_order}
        grammar = grammar_fields(self.constraint(), tools, options)
        return SamplingParams.from_dict({**fields, "max_new_tokens": max_new_tokens, **grammar})

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        options = self.stream_options
        if options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true; leave it out or stream", "stream_options")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise RequestError("continuous_usage_stats needs include_usage to be true; set it", "stream_options")
        if self.rid is not None and self.request_id is not None:
            raise RequestError("rid and request_id both name the request; give only one", "request_id")
        return self
