"""`/v1/models`: the one model that is served, and what it can do.

Clients of many servers read this list. Each field is here because clients read it; docs/reference/model-list.md names
them.
"""

import datetime
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from jsg.parameters import named
from jsg.server.front import Front, ReadyFront
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.shared.judging import judging_ids
from jsg.server.shared.thinking_fields import switches
from jsg.types import GRAMMAR_FIELDS

CHAT_PARAMETERS = (
    *named("openai"),
    *("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
)
THINKING_PARAMETERS = ("reasoning", "reasoning_effort", "include_reasoning")
TOOL_PARAMETERS = ("tools", "tool_choice", "parallel_tool_calls")
DEFAULTS = {name: parameter.default for name, parameter in named("openai").items() if parameter.is_in_steps}

_YES: Mapping[str, Any] = {"supported": True}
_NO: Mapping[str, Any] = {"supported": False}
NEVER = {
    **dict.fromkeys(("batch", "citations", "code_execution", "context_management", "pdf_input"), _NO),
    "server_tools": {**_NO, **dict.fromkeys(("code_execution", "web_search"), _NO)},
}
"""What Anthropic's models can do, and this server cannot."""

router = new_router()


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def models(front: ReadyFront) -> Response:
    """Lists the served model, which is the only one."""
    name = front.model_name
    return json_response(
        {"object": "list", "data": [_card(front)], "has_more": False, "first_id": name, "last_id": name}
    )


@router.get("/v1/models/{model:path}")
async def model(model: str, front: ReadyFront) -> Response:
    """Describes the model of this name, which may have slashes, and says what it can do."""
    front.check_model(model)
    return json_response(_card(front))


def _card(front: Front) -> dict[str, Any]:
    """The model with the fields of OpenAI, Anthropic, vLLM, OpenRouter and llama-server, in this order.

    There is no field for the longest answer (`max_tokens` and its like): clients would ask for as many tokens, which
    fit behind no prompt. There is no `status` as of llama-server: clients would look for its router.
    """
    name, info = front.model_name, front.generator.info
    does_generate, limit = info.embedder is None, info.max_request_tokens
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "jsg",
        "type": "model",
        "created_at": f"{datetime.datetime.fromtimestamp(front.created, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "display_name": name,
        "lifecycle": "active",
        "max_input_tokens": info.max_prompt_tokens,
        "root": name,
        "parent": None,
        "max_model_len": limit,
        "name": name,
        "context_length": limit,
        "architecture": {
            "input_modalities": front.media.modalities,
            "output_modalities": ["text" if does_generate else "embeddings"],
        },
        "supported_parameters": [
            *(CHAT_PARAMETERS if does_generate else ()),
            *(THINKING_PARAMETERS if does_generate and front.speech.thinking is not None else ()),
            *(TOOL_PARAMETERS if _takes_tools(front) else ()),
        ],
        "default_parameters": DEFAULTS if does_generate else {},
        "pricing": {"prompt": "0", "completion": "0"},
        "meta": {"n_ctx": limit},
        "modalities": front.media.modalities,
        "capabilities": _capabilities(front),
    }


def _capabilities(front: Front) -> dict[str, Any]:
    """What the model can do. Each entry has `supported`, as in Anthropic's API, whose entries are all here."""
    tokenizer, embedder, seen = front.generator.tokenizer, front.generator.info.embedder, front.media.modalities
    does_generate, takes_tools, dialect = embedder is None, _takes_tools(front), front.speech.dialect
    return {
        "chat": {"supported": does_generate and tokenizer.chat_template is not None},
        "completions": {"supported": does_generate},
        "embeddings": {"supported": not does_generate, "dimensions": None if embedder is None else embedder.width},
        "rerank": {"supported": does_generate and judging_ids(tokenizer) is not None},
        "image_input": {"supported": "image" in seen},
        "video_input": {"supported": "video" in seen},
        "tools": {"supported": takes_tools, "dialect": dialect.name if takes_tools and dialect else None},
        "structured_outputs": {"supported": does_generate, "kinds": GRAMMAR_FIELDS if does_generate else ()},
        "logprobs": {"supported": does_generate},
        **_thinking(front),
        **NEVER,
    }


def _thinking(front: Front) -> dict[str, Any]:
    template, does_generate = front.chat.template, front.generator.info.embedder is None
    does_think = does_generate and front.speech.thinking is not None
    said, stops = _supported(does_think), _supported(not does_think or bool(switches(template)))
    efforts = _supported(does_generate and "reasoning_effort" in template.variables)
    return {
        "thinking": {**said, "types": {"adaptive": said, "enabled": said, "between_tools": _NO, "disabled": stops}},
        "effort": {**efforts, **dict.fromkeys(("low", "medium", "high", "max"), efforts)},
    }


def _supported(is_so: bool) -> Mapping[str, Any]:
    return _YES if is_so else _NO


def _takes_tools(front: Front) -> bool:
    return front.generator.info.embedder is None and front.speech.shows_tools and front.speech.dialect is not None
