"""How a grammar over bytes names tokens that are no text.

Special tokens must never stand where text is expected, however free the text is; but some models begin a call of a
tool with one. So a special token is spelled between two bytes that UTF-8 never has: only a grammar that names the token
allows it, no text token can take its place, and nothing else in a grammar can match a part of it.
"""

FIRST_BYTE = 0xFF
LAST_BYTE = 0xFE


def special_bytes(name: str) -> bytes:
    """The spelling of the special token that is written `name`."""
    return bytes((FIRST_BYTE,)) + name.encode() + bytes((LAST_BYTE,))


def may_be_text(token: bytes) -> bool:
    """Whether a token of these bytes can ever be part of a text: neither of the two bytes is in it."""
    return FIRST_BYTE not in token and LAST_BYTE not in token
