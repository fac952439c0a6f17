"""Chat messages → prompt tokens, with the clients' words never mistaken for turn markers.

A template writes special tokens around contents that clients write. Encoding the rendered text would take a
"<|im_end|>" inside a content for the end of the turn. So a special token's text inside a content is put between two
marks before rendering; afterwards what lies between marks is encoded as plain characters and everything else as a
template. A content without such text has no marks, so its conversation is encoded exactly as rendered.
"""

import re
import secrets
from typing import Any, final

from jsg.errors import RequestError
from jsg.processing.chat_template import ChatTemplate
from jsg.processing.tokenizer import Tokenizer


@final
class ChatPrompt:
    """A model's template and tokenizer together. Immutable: any number of threads may encode at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Compiles the tokenizer's chat template. Raises ModelError when it is no template."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        written = {tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.special_ids} - {""}
        longest_first = sorted(written, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def encode(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The prompt tokens up to the beginning of the assistant's answer. Raises RequestError."""
        mark = f"\ue000{secrets.randbits(64)}\ue001"  # nobody can guess it; no letters, so no filter changes its case
        marked = [self._mark_specials(message, mark) for message in messages]
        pieces = self._template.render(marked).split(mark)
        if len(pieces) % 2 == 0:
            raise RequestError(
                "messages of this model's template must not hold the text of special tokens where it cuts contents "
                "apart; take it out",
                param="messages",
            )
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            is_template = index % 2 == 0
            ids += self._tokenizer.encode(piece, add_special_tokens=False, parse_special=is_template)
        return tuple(ids)

    def _mark_specials(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        if self._special is None:
            return message
        return {
            key: self._special.sub(lambda match: f"{mark}{match[0]}{mark}", value) if isinstance(value, str) else value
            for key, value in message.items()
        }
