"""`/tokenize` and `/detokenize`, as SGLang and as vLLM have them."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import Caller, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.http.body import Body, Checked, TokenIds
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import BodyBytes, new_router
from jsg.server.shared.answers import token_text
from jsg.server.shared.messages import Message
from jsg.server.shared.tools import ChatTool
from jsg.server.tool_use import MAX_TOOLS, Choice, ToolUse

type NotEmpty[T] = Annotated[Checked[T], Field(min_length=1)]

router = new_router()


class TokenizeBody(Body):
    """What `/tokenize` takes: a text, a list of texts, or a conversation."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "chat_template": "a template runs as code, so only the model's own is used; render it and send prompt",
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "this version does not have it"),
    }

    prompt: str | NotEmpty[str] | None = Field(None, description="This or `messages`.")
    messages: NotEmpty[Message] | None = Field(None, description="This or `prompt`.")
    model: str | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="With BOS and EOS as the model has them; default true for `prompt`; a template writes its own "
        "(before it BOS is put where the model sees).",
    )
    add_generation_prompt: bool | None = Field(
        None, description="For `messages`: end with the beginning of the assistant's turn; default true."
    )
    continue_final_message: bool | None = Field(None, description="For `messages`: end with the last content instead.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For `messages`: variables of the template.")
    tools: Annotated[Checked[ChatTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="For `messages`: what the model is shown that it may call."
    )
    return_token_strs: bool | None = Field(None, description="Show the text of each token too.")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages must be given", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "add_special_tokens is for prompt; the template of messages writes its own", "add_special_tokens"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message must be left out where add_generation_prompt begins a new message; give one",
                "continue_final_message",
            )
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} is for messages; leave it out of a prompt", name)
        return self


class DetokenizeBody(Body):
    """What `/detokenize` takes: the tokens of a text, or a list of such."""

    tokens: TokenIds | Checked[TokenIds]
    model: str | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave them out of the text; default true.")


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(body: TokenizeBody, num_bytes: BodyBytes, caller: CurrentCaller, front: ReadyFront) -> Response:
    """The tokens of a text, and how many; of a list of texts a list of them; of a conversation those of its prompt."""
    front.check_model(body.model)
    if body.messages is not None:
        id_lists = [await _encode_messages(body, body.messages, num_bytes, caller, front)]
    else:
        id_lists = await front.threads.run(lambda: _encode(body, front), num_bytes)
    strs: list[list[str]] | None = None
    if body.return_token_strs:
        strs = await front.threads.run(lambda: _token_strs(id_lists, front.generator.tokenizer), num_bytes)
    counts = [len(ids) for ids in id_lists]
    is_list = isinstance(body.prompt, list)
    return json_response(
        {
            "tokens": id_lists if is_list else id_lists[0],
            "count": counts if is_list else counts[0],
            "max_model_len": front.generator.info.max_request_tokens,
            "token_strs": strs if is_list or strs is None else strs[0],
        }
    )


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(body: DetokenizeBody, num_bytes: BodyBytes, front: ReadyFront) -> Response:
    """The text of tokens, under `text` as SGLang names it and under `prompt` as vLLM does."""
    front.check_model(body.model)
    tokens: Any = body.tokens
    is_list = bool(tokens) and isinstance(tokens[0], list)
    generator = front.generator
    decode = functools.partial(
        _decode,
        tokens if is_list else [tokens],
        generator.tokenizer,
        vocab_size=generator.info.vocab_size,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    texts = await front.threads.run(decode, num_bytes)
    shown = texts if is_list else texts[0]
    return json_response({"text": shown, "prompt": shown})


def _encode(body: TokenizeBody, front: Front) -> list[list[int]]:
    tokenizer = front.generator.tokenizer
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    return [tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False) for text in texts]


async def _encode_messages(
    body: TokenizeBody, messages: list[Message], num_bytes: int, caller: Caller, front: Front
) -> list[int]:
    given = [tool.function.tool(f"tools[{i}].function") for i, tool in enumerate(body.tools or ())]
    tools = ToolUse.of(given, Choice(), front.speech)
    encoded = await front.media.chat(
        front.chat,
        lambda: [message.to_template(front.chat.template) for message in messages],
        num_bytes,
        namespace=caller.namespace(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs,
        tools=None if tools is None else tools.shown,
    )
    return list(encoded.input_ids)


def _token_strs(id_lists: list[list[int]], tokenizer: Tokenizer) -> list[list[str]]:
    return [[token_text(tokenizer, token_id) for token_id in ids] for ids in id_lists]


def _decode(
    id_lists: list[list[int]], tokenizer: Tokenizer, *, vocab_size: int, skip_special_tokens: bool
) -> list[str]:
    highest = max((max(ids, default=0) for ids in id_lists), default=0)
    if highest >= vocab_size:
        raise RequestError(f"tokens must be below {vocab_size}, but got {highest}; take it out", param="tokens")
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in id_lists]
