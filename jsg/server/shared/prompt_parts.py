"""Prompts in parts → tokens, within limits; long work is done in threads."""

from collections.abc import Callable, Sequence

from jsg.errors import RequestError
from jsg.processing.media_prompt import sees_no
from jsg.processing.parts import JoinedPart, MediaPart, Part, TextPart, TokenPart
from jsg.server.front import Front
from jsg.server.generation import MAX_PROMPT_TOKENS
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt, encode_choices, encode_parts, media_parts

MAX_JOINED = 2**23  # characters; a text before several choices counts for each of them


async def encode_prompt(front: Front, parts: Sequence[Part], *, namespace: str) -> EncodedPrompt:
    """The tokens of a prompt. `namespace` is as in `MediaReader.within`.

    Raises:
        RequestError: It has pictures and the model cannot see; it has no token; or as `encode_parts`.
    """
    generator, reader = front.generator, front.media.reader_within(namespace)
    check_parts(front, parts)
    limit = generator.info.max_request_tokens
    encoded = await _beside(
        front, parts, lambda: encode_parts(generator.tokenizer, parts, max_tokens=limit, media=reader), num_chars(parts)
    )
    if not encoded.input_ids:
        raise RequestError("prompt must have at least one token, but has none; send some text", "prompt")
    return encoded


async def encode_choices_of(
    front: Front, parts: Sequence[Part], choices: Sequence[str], *, namespace: str
) -> EncodedChoices:
    """The tokens of choices after a prompt. Each choice is encoded together with the text before it.

    Raises:
        RequestError: As `encode_prompt`; or the texts are longer than `MAX_JOINED` together.
    """
    generator, reader = front.generator, front.media.reader_within(namespace)
    check_parts(front, parts)
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
    return await _beside(
        front,
        parts,
        lambda: encode_choices(generator.tokenizer, parts, choices, max_tokens=limit, media=reader),
        size,
    )


def check_parts(front: Front, parts: Sequence[Part]) -> None:
    """Raises RequestError for pictures where the model cannot see, and for more tokens than a request may have."""
    num_tokens = 0
    for part in _flat(parts):
        if isinstance(part, MediaPart) and front.media.reader is None:
            raise sees_no(part.kind, "prompt")
        num_tokens += len(part.ids) if isinstance(part, TokenPart) else 0
    if num_tokens > MAX_PROMPT_TOKENS:
        raise RequestError(f"prompt must have at most {MAX_PROMPT_TOKENS} tokens, but has {num_tokens}", "prompt")


def num_chars(parts: Sequence[Part]) -> int:
    """The number of characters that must be encoded."""
    return sum(len(part.text) for part in _flat(parts) if isinstance(part, TextPart))


async def _beside[T](front: Front, parts: Sequence[Part], work: Callable[[], T], size: int) -> T:
    """The result of work on these parts, whose texts have about `size` characters. Ids of clients are checked too."""
    if media_parts(parts):
        return await front.threads.decode(work)
    size += sum(len(part.ids) for part in _flat(parts) if isinstance(part, TokenPart) and isinstance(part.ids, tuple))
    return await front.generator.beside(work, size)


def _flat(parts: Sequence[Part]) -> list[Part]:
    """All parts, with those in branches."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, JoinedPart):
            for branch in part.branches:
                found += _flat(branch)
        else:
            found.append(part)
    return found
