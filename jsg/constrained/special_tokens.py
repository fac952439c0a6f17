"""How a grammar over bytes names tokens that are no text.

Special tokens must never stand where text is expected, however free the text is; but some models begin a call of a
tool with one. So a special token is spelled between two bytes that UTF-8 never has: only a grammar that names the token
allows it, no text token can take its place, and nothing else in a grammar can match a part of it.
"""

from collections.abc import Mapping, Sequence

FIRST_BYTE = 0xFF
LAST_BYTE = 0xFE


def special_bytes(name: str) -> bytes:
    """The spelling of the special token that is written `name`."""
    return bytes((FIRST_BYTE,)) + name.encode() + bytes((LAST_BYTE,))


def may_be_text(token: bytes) -> bool:
    """Whether a token of these bytes can ever be part of a text: neither of the two bytes is in it."""
    return FIRST_BYTE not in token and LAST_BYTE not in token


def spelled_tokens(tokens: Sequence[bytes], names: Mapping[int, str]) -> list[bytes]:
    """The bytes of each token by id, for a vocabulary whose special tokens a grammar may name.

    Args:
        tokens: What each adds to a text; b"" for special tokens.
        names: Written forms of the special tokens that a grammar may name. To the vocabulary they are then no special
            tokens; those that no grammar may ever name, such as the beginning of a turn, are left out here.
    """
    texts = [token if may_be_text(token) else b"" for token in tokens]
    for token_id, name in names.items():
        texts[token_id] = special_bytes(name)
    return texts
