"""The fields that chat completions and completions share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from jsg.errors import RequestError
from jsg.prompt_ids import PromptIds
from jsg.server.caller import ApiCall
from jsg.server.generation import new_rid
from jsg.server.http.body import Body, ClientNames, Rid
from jsg.server.openai.response_format import GrammarFields
from jsg.server.shared.constraint import field_of
from jsg.server.shared.fields import CACHE_SALT, END_USER, EXTRA_KEY, MAX_NAME_CHARS, MODEL, PRIORITY, Only
from jsg.server.shared.harmless import harmless
from jsg.server.shared.sampling import own_names, sampling_fields, with_sampling
from jsg.speech.answers.answer import Prompt
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.tool_use import Speech
from jsg.types import SamplingParams

_NO_CODE = "the server never runs code of clients; use logit_bias, or sample from the logprobs in the client"
_ONE_ENGINE = "each engine does both prefill and decode; leave it out"
_NO_EMBEDS = "a prompt is text or token ids; send one of these"
_OWN_CONFIG = "the config of the model says how pictures and videos are read; leave it out"


class StreamOptions(Body):
    """The options of a stream."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "include_obfuscation": "only false is taken, because events are never padded with random characters"
    }

    include_usage: bool | None = Field(None, description="The last event of the stream has the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="From vLLM. With `include_usage`, every event has the usage of its answer so far."
    )
    include_obfuscation: Annotated[Any, Only((False,), "events are never padded; leave it out")] = None


class OpenAIBody(with_sampling(GrammarFields, "openai")):
    """The fields of both endpoints; null means the default. Fields that OpenAI lacks come from SGLang and vLLM."""

    NAMES: ClassVar[Mapping[str, str]] = own_names("openai") | {"return_logprob": "logprobs"}
    """Our name of a field → OpenAI's name."""

    PROMPT: ClassVar[str] = "prompt"
    """The field that holds the prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **GrammarFields.REFUSED,
        **dict.fromkeys(("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"), _NO_CODE),
        **dict.fromkeys(("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), _ONE_ENGINE),
        **dict.fromkeys(("prompt_embeds", "input_embeds"), _NO_EMBEDS),
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), _OWN_CONFIG),
        "early_stopping": "there is no beam search; use n and sampling",
        **dict.fromkeys(("allowed_token_ids", "bad_words"), "use logit_bias to allow or forbid tokens"),
        "prompt_logprobs": "send echo with logprobs to /v1/completions, or logprob_start_len to /generate",
        "truncate_prompt_tokens": "the server never shortens a prompt; shorten it before you send it",
        "lora_path": "adapters are not served; serve a model into which the adapter is merged",
        "session_params": "there are no sessions; send the whole prompt, whose shared prefix the cache keeps",
    }

    HARMLESS: ClassVar[Mapping[str, str]] = harmless("guided_decoding_backend", "verbosity")

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "spaces_between_special_tokens": "a text has only the characters of its tokens, as with every fast tokenizer",
        "best_of": "only 1 and `n` are taken; use n, and choose an answer in the client",
        "use_beam_search": "only false is taken, because there is no beam search",
        "length_penalty": "only 1 is taken, because there is no beam search",
        "return_hidden_states": "only false is taken, because hidden states stay in the engine",
        "return_token_ids": "only false is taken; use /generate for the token ids",
        "metadata": "it labels the entries of an OpenAI account, and this server has no accounts",
    }

    model: str | None = Field(None, description=MODEL)
    stream: bool | None = Field(None, description="Answer with events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or stop token in the text of the answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="The logprobs name a token by its id, such as `token_id:17`, instead of by its text."
    )
    cache_salt: str | None = Field(None, max_length=MAX_NAME_CHARS, description=CACHE_SALT)
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description=EXTRA_KEY)
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description=f"{PRIORITY} SGLang has the same order. vLLM has the opposite order, so change the sign for its "
        "clients.",
    )
    rid: Rid | None = Field(
        None, description="The name of the request, for `/abort_request`. It becomes the `id` of the answer."
    )
    request_id: Rid | None = Field(
        None, description="From vLLM. The name of the request is this text with `cmpl-` or `chatcmpl-` in front."
    )

    spaces_between_special_tokens: bool | None = None
    best_of: Annotated[Any, Only((1,), "use n, and choose an answer in the client")] = None
    use_beam_search: Annotated[Any, Only((False,), "there is no beam search; use n and sampling")] = None
    length_penalty: Annotated[Any, Only((1.0, 1), "there is no beam search; use n and sampling")] = None
    return_hidden_states: Annotated[Any, Only((False,), "hidden states stay in the engine; leave it out")] = None
    return_token_ids: Annotated[Any, Only((False,), "use /generate for the token ids")] = None

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

    def to_prompt(
        self,
        call: ApiCall,
        rid: str,
        input_ids: tuple[int, ...] | PromptIds,
        *,
        plan: ReplyPlan,
        max_new_tokens: int,
        **others: Any,
    ) -> Prompt:
        """A prompt that is sampled as the body says; `others` are fields of `Prompt`. Raises RequestError."""
        return Prompt(
            rid=rid,
            input_ids=input_ids,
            sampling=self._to_sampling(max_new_tokens, plan),
            namespace=call.caller.namespace(self.cache_salt, self.extra_key),
            priority=self.priority or 0,
            **others,
        )

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        return ClientNames(self._names(), self._params(), field_of(self.constraint()))

    def _names(self) -> dict[str, str]:
        return {**self.NAMES, "input_ids": self.PROMPT}

    def _params(self) -> dict[str, str]:
        return {"text": self.PROMPT}

    def plan(self, speech: Speech) -> ReplyPlan:
        """How an answer is asked for and read. Raises RequestError."""
        return ReplyPlan(speech, constraint=self.constraint(), options=self.grammar_options())

    def _to_sampling(self, max_new_tokens: int, plan: ReplyPlan) -> SamplingParams:
        fields = sampling_fields(self, "openai")
        fields["no_stop_trim"] = fields["no_stop_trim"] or self.include_stop_str_in_output
        return SamplingParams.from_dict({**fields, "max_new_tokens": max_new_tokens, **plan.sampling})

    @model_validator(mode="before")
    @classmethod
    def _leave_out_best_of_all(cls, data: Any) -> Any:
        """Drops a `best_of` that is `n`: the best n of n answers are all of them."""
        if isinstance(data, dict) and type(data.get("best_of")) is int and data["best_of"] == data.get("n"):
            return {name: value for name, value in data.items() if name != "best_of"}
        return data

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        options = self.stream_options
        if self.wants_usage_event and not self.stream:
            raise RequestError(
                "stream_options needs stream to be true, but it is not; leave it out, or set stream", "stream_options"
            )
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise RequestError(
                "continuous_usage_stats needs include_usage to be true, but it is not; set it", "stream_options"
            )
        if self.rid is not None and self.request_id is not None:
            raise RequestError(
                "only one of rid and request_id may name the request, but got both; send one", "request_id"
            )
        return self
