"""What chat completions and completions share: the sampling fields, usage, finish reasons, token texts."""

import time
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from jsg.errors import RequestError
from jsg.processing.answer import Answer
from jsg.processing.tokenizer import Tokenizer
from jsg.server.body import Body, Checked
from jsg.types import MAX_N, SamplingParams

NOT_YET_ANYWHERE = frozenset({"regex", "json_schema", "ebnf", "structural_tag", "response_format", "user", "metadata"})


class _ExtraSampling(Body):
    """Sampling fields beyond OpenAI's, at the top level as SGLang and vLLM take them."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Checked[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False


class OpenAIBody(_ExtraSampling):
    """The fields that both endpoints have; null means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop: str | Checked[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def to_sampling(self, max_new_tokens: int) -> SamplingParams:
        """The sampling fields under our names. Raises RequestError for a value out of range."""
        if self.min_tokens is not None and self.min_tokens > max_new_tokens:
            raise RequestError(
                f"min_tokens must be at most {max_new_tokens}, the tokens to generate, but got {self.min_tokens}",
                param="min_tokens",
            )
        same = self.model_dump(
            include=set(_ExtraSampling.model_fields) - {"min_tokens"}
            | {"temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias"}
        )
        renamed = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": self.min_tokens,
            "sampling_seed": self.seed,
        }
        return SamplingParams.from_dict(same | renamed)

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage_event(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true; leave it out or stream", "stream_options")
        return self


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Tokens of all answers, `n` for each prompt in turn; a prompt counts once."""
    prompt_tokens = sum(len(answer.request.input_ids) for answer in answers[::n])
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers[::n])},
    }


def finish_reason(answer: Answer) -> str | None:
    """`stop`, `length` or `abort`; None while it runs."""
    return None if answer.finish is None else answer.finish.type.value


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; one that is only part of a character is shown by its bytes in hex, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def now() -> int:
    """The `created` of a response."""
    return int(time.time())
