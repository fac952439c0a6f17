"""What calls share that read several prompts and write nothing: the check of their tokens, and the usage."""

from collections.abc import Sequence
from typing import Any

from jsg.engine.child.protocol import ModelInfo
from jsg.errors import ContextLengthError, RequestError
from jsg.prompt_ids import PromptIds
from jsg.speech.answers.answer import Answer


def check_inputs(id_lists: Sequence[tuple[int, ...] | PromptIds], info: ModelInfo, field: str) -> None:
    """Raises RequestError, with its index, for the first prompt that cannot run; the engine does not know the index."""
    limit = info.max_prompt_tokens
    for index, ids in enumerate(id_lists):
        name = f"{field}[{index}]"
        if not ids:
            raise RequestError(f"{name} must have at least one token, but has none; leave it out", field)
        if len(ids) > limit:
            raise ContextLengthError(
                f"{name} must have at most {limit} tokens, with what is put around it, but has {len(ids)}; shorten it",
                param=field,
            )
        highest = ids.highest if isinstance(ids, PromptIds) else max(ids)
        if highest >= info.vocab_size:
            raise RequestError(
                f"{name} must have token ids below {info.vocab_size}, but has {highest}; correct it", field
            )


def prompt_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """The `usage` of the call."""
    prompt_tokens = sum(len(answer.request.input_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0,  # the one token that each prompt costs is not shown
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }
