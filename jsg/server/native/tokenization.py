"""`/tokenize` and `/detokenize`, as SGLang and as vLLM have them."""

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import Field, model_validator
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import Caller, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.http.body import Body, Checked, TokenIds
from jsg.server.http.failures import json_response
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import BodyBytes, CurrentRules, new_router
from jsg.server.http.json_pieces import list_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.shared.answers import token_text
from jsg.server.shared.fields import MODEL
from jsg.server.shared.harmless import template_variables
from jsg.server.shared.messages import Message
from jsg.server.shared.tools import ChatTool
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.tool_use import MAX_TOOLS, Choice

type NotEmpty[T] = Annotated[Checked[T], Field(min_length=1)]

router = new_router()


class TokenizeBody(Body):
    """What `/tokenize` takes: a text, a list of texts, or a conversation."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "chat_template": "a template is code, and only the model's own is run; send the rendered text as prompt",
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "the config of the model decides; leave it out"),
    }

    prompt: str | NotEmpty[str] | None = Field(None, description="A text or a list of texts. Send it or `messages`.")
    messages: NotEmpty[Message] | None = Field(None, description="A conversation. Send it or `prompt`.")
    model: str | None = Field(None, description=MODEL)
    add_special_tokens: bool | None = Field(
        None,
        description="Add BOS and EOS as the tokenizer of the model does. The default for `prompt` is true. It must "
        "not be true with `messages`, because the chat template writes the special tokens. If the model sees "
        "pictures, BOS is put in front of the rendered template.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="For `messages`: the prompt ends with the beginning of an assistant's turn. The default is true.",
    )
    continue_final_message: bool | None = Field(
        None, description="For `messages`: the prompt ends with the last content instead."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="For `messages`: variables of the chat template."
    )
    tools: Annotated[Checked[ChatTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="For `messages`: the tools that the model may call."
    )
    return_token_strs: bool | None = Field(None, description="The answer also has the text of each token.")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            raise RequestError(f"exactly one of prompt and messages must be given, but got {got}; send one", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "add_special_tokens must not be true with messages, because the chat template writes the special "
                "tokens; leave it out",
                "add_special_tokens",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message must not be true if add_generation_prompt is true, because it begins a new "
                "message; leave one out",
                "continue_final_message",
            )
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} needs messages, but the request has a prompt; leave it out", name)
        return self


class DetokenizeBody(Body):
    """What `/detokenize` takes: the tokens of one text, or a list with the tokens of several texts."""

    tokens: TokenIds | Checked[TokenIds] = Field(description="Token ids, or a list of lists of token ids.")
    model: str | None = Field(None, description=MODEL)
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text. The default is true."
    )


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(
    body: TokenizeBody, num_bytes: BodyBytes, rules: CurrentRules, caller: CurrentCaller, front: ReadyFront
) -> Response:
    """Gives the tokens of a text, of each text of a list, or of the prompt of a conversation, and their number."""
    front.check_model(body.model)
    if body.messages is not None:
        id_lists = [await _encode_messages(body, body.messages, num_bytes, rules, caller, front)]
    else:
        id_lists = await front.threads.run(lambda: _encode(body, front), num_bytes)
    strs: list[list[str]] | None = None
    if body.return_token_strs:
        strs = await front.threads.run(lambda: _token_strs(id_lists, front.generator.tokenizer), num_bytes)
    counts = [len(ids) for ids in id_lists]
    is_list = isinstance(body.prompt, list)
    most = front.generator.info.max_request_tokens
    plain = msgspec.json.encode({"count": counts if is_list else counts[0], "max_model_len": most})

    def pieces() -> Iterator[bytes]:  # a body of four megabytes may have as many tokens
        yield plain[:-1] + b',"tokens":'
        yield from list_pieces(id_lists if is_list else id_lists[0])
        yield b',"token_strs":'
        if strs is None:
            yield b"null"
        else:
            yield from list_pieces(strs if is_list else strs[0])
        yield b"}"

    return await respond_in_pieces(pieces(), functools.partial(front.generator.share.turn, caller.tenant))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(body: DetokenizeBody, num_bytes: BodyBytes, front: ReadyFront) -> Response:
    """Gives the text of tokens, as `text`, the name that SGLang uses, and as `prompt`, the name that vLLM uses."""
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
    body: TokenizeBody, messages: list[Message], num_bytes: int, rules: FieldRules, caller: Caller, front: Front
) -> list[int]:
    given = [tool.function.tool(f"tools[{i}].function") for i, tool in enumerate(body.tools or ())]
    plan = ReplyPlan(front.speech, is_continued=bool(body.continue_final_message)).with_tools(given, Choice())
    encoded = await front.media.chat(
        front.chat,
        plan,
        lambda: [message.to_template(front.chat.template, rules) for message in messages],
        num_bytes,
        namespace=caller.namespace(),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=template_variables(body.chat_template_kwargs, front.chat.template.variables, rules),
        names_points=False,
    )
    return list(encoded.input_ids)


def _token_strs(id_lists: list[list[int]], tokenizer: Tokenizer) -> list[list[str]]:
    return [[token_text(tokenizer, token_id) for token_id in ids] for ids in id_lists]


def _decode(
    id_lists: list[list[int]], tokenizer: Tokenizer, *, vocab_size: int, skip_special_tokens: bool
) -> list[str]:
    highest = max((max(ids, default=0) for ids in id_lists), default=0)
    if highest >= vocab_size:
        raise RequestError(f"tokens must be below {vocab_size}, but got {highest}; leave it out", param="tokens")
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in id_lists]
