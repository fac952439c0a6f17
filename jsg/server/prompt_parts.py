"""Prompts in parts → tokens, within bounds and beside the event loop."""

from collections.abc import Sequence
from typing import Any

from jsg.errors import RequestError
from jsg.processing.encode_parts import EncodedChoices, EncodedPrompt, encode_choices, encode_parts
from jsg.processing.parts import JoinedPart, MediaPart, Part, TextPart, TokenPart
from jsg.server.generation import MAX_PROMPT_TOKENS, Generator

MAX_JOINED = 2**23  # characters, those of a text that stands before many others counted for each of them

Ids = tuple[int, ...]


async def encode_prompt(generator: Generator, parts: Sequence[Part], field: str = "prompt") -> EncodedPrompt:
    """The tokens of a prompt.

    Raises:
        RequestError: It has pictures, which this model cannot see, or no token.
    """
    check_parts(parts, field)
    limit = generator.info.max_request_tokens
    encoded = await generator.beside(
        lambda: encode_parts(generator.tokenizer, parts, max_tokens=limit), num_chars(parts)
    )
    if not encoded.input_ids:
        raise RequestError(f"{field} must have at least one token, but has none; send some text", field)
    return encoded


async def encode_choices_of(generator: Generator, parts: Sequence[Part], choices: Sequence[str]) -> EncodedChoices:
    """The tokens of choices behind a prompt, each encoded together with the text before it.

    Raises:
        RequestError: As `encode_prompt`; or so much text is too much.
    """
    check_parts(parts, "prompt")
    last = parts[-1] if parts else None
    num_last = len(last.text) if isinstance(last, TextPart) else 0
    size = num_chars(parts) + num_last * len(choices) + sum(map(len, choices))
    if size > MAX_JOINED:
        raise RequestError(
            f"prompt and choices must have at most {MAX_JOINED} characters, the last text of the prompt counted for "
            f"each choice, but have {size}; shorten the prompt or send fewer choices",
            param="choices",
        )
    limit = generator.info.max_request_tokens
    return await generator.beside(lambda: encode_choices(generator.tokenizer, parts, choices, max_tokens=limit), size)


def check_parts(parts: Sequence[Part], field: str) -> None:
    """Raises RequestError for pictures, and for more tokens than a request may have."""
    num_tokens = 0
    for part in _flat(parts):
        if isinstance(part, MediaPart):
            raise RequestError(
                f"{field} has a part of kind {part.kind}, which the model that is served here cannot see; describe it "
                "in words, or serve a model that sees",
                field,
            )
        num_tokens += len(part.ids) if isinstance(part, TokenPart) else 0
    if num_tokens > MAX_PROMPT_TOKENS:
        raise RequestError(f"{field} must have at most {MAX_PROMPT_TOKENS} tokens, but has {num_tokens}", field)


def num_chars(parts: Sequence[Part]) -> int:
    """Characters that are to be encoded."""
    return sum(len(part.text) for part in _flat(parts) if isinstance(part, TextPart))


def request_fields(encoded: EncodedPrompt) -> dict[str, Any]:
    """What `Prompt` takes of it."""
    return {
        "input_ids": encoded.input_ids,
        "position_jumps": encoded.position_jumps,
        "joined": encoded.joined,
    }


def _flat(parts: Sequence[Part]) -> list[Part]:
    """All parts, those in branches included."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, JoinedPart):
            for branch in part.branches:
                found += _flat(branch)
        else:
            found.append(part)
    return found
