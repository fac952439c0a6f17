"""What routers need to know of a request's body: its prompt, in units that stand for tokens.

The front has no tokenizer, because it would do the replica's work a second time. Text becomes units of as many bytes as
a token has on average, and a prompt of token ids stays what it is. Two prompts that begin with the same text begin with
the same units, so `Router` finds shared prefixes in them as it finds them in tokens.
"""

import dataclasses
import hashlib
import json
import re
from typing import Any

import numpy as np

MAX_UNIT_BYTES = 4
FIRST_BYTES = 1024
"""How much of a prompt without messages names its conversation."""
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "text", "input_ids")
"""In the order in which chat templates show them."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
DATA_URL = re.compile(rb'"data:[^"]{64,}"')


@dataclasses.dataclass(frozen=True, slots=True)
class PromptUnits:
    """The prompt of a request.

    Attributes:
        units: Its units; empty if the request has no prompt.
        namespace: Only prompts of one namespace share what is cached.
        conversation: A digest that all requests of a conversation have in common.
        max_new_tokens: The most tokens of the answer; None where the request says nothing.
    """

    units: tuple[int, ...] = ()
    namespace: str = ""
    conversation: bytes = b""
    max_new_tokens: int | None = None


def read_prompt(content: bytes, unit_bytes: int = MAX_UNIT_BYTES) -> PromptUnits:
    """The prompt of a body, in units of up to four bytes. A body that a replica will refuse has none."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return PromptUnits()
    if not isinstance(body, dict):
        return PromptUnits()
    parts = [body[name] for name in PROMPT_FIELDS if body.get(name)]
    ids = parts[0] if len(parts) == 1 and _are_ids(parts[0]) else None
    texts = [text for part in parts for text in _texts(part)]
    namespace = str(body.get("cache_salt") or body.get("extra_key") or "")
    return PromptUnits(
        tuple(ids) if ids else _units(b"".join(texts), unit_bytes),
        namespace,
        hashlib.blake2b(namespace.encode(errors="replace") + _beginning(body, texts), digest_size=16).digest(),
        _limit(body),
    )


def _texts(part: Any) -> list[bytes]:
    """A part as texts, one for each member of a list: a longer conversation begins with those of a shorter one."""
    members = part if isinstance(part, list) and not _are_ids(part) else [part]
    texts = [member if isinstance(member, str) else json.dumps(member) for member in members]
    return [DATA_URL.sub(_digest, text.encode(errors="replace")) for text in texts]


def _digest(found: re.Match[bytes]) -> bytes:
    """A picture is many bytes and few tokens."""
    return hashlib.blake2b(found[0], digest_size=32).hexdigest().encode()


def _beginning(body: dict[str, Any], texts: list[bytes]) -> bytes:
    """What stays the same while a conversation grows: all up to its first question, or the first bytes of a prompt."""
    if not isinstance(messages := body.get("messages"), list):
        return b"".join(texts)[:FIRST_BYTES]
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    num_later = len(messages) - 1 - roles.index("user") if "user" in roles else 0
    return b"".join(texts[: len(texts) - num_later])


def _units(text: bytes, size: int) -> tuple[int, ...]:
    rows = np.frombuffer(text + bytes(-len(text) % size), np.uint8).reshape(-1, size)
    words = np.pad(rows, ((0, 0), (0, MAX_UNIT_BYTES - size))).view("<u4")[:, 0]
    return tuple((words & 0x7FFFFFFF).tolist())


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def _limit(body: dict[str, Any]) -> int | None:
    sampling = body.get("sampling_params")
    given = [body.get(name) for name in LIMIT_FIELDS]
    given.append(sampling.get("max_new_tokens") if isinstance(sampling, dict) else None)
    return next((value for value in given if type(value) is int and 0 <= value < 2**31), None)
