"""Grammars of the kinds that schemas and languages become, with texts that match them."""

from jsg.constrained.ir import (
    Alt,
    Bag,
    BagItem,
    ByteSet,
    Call,
    Expr,
    Grammar,
    Literal,
    Repeat,
    Seq,
    Words,
    alt,
    literal,
    optional,
    seq,
)

_TAIL = ByteSet(((0x80, 0xBF),))
_DIGIT = ByteSet(((0x30, 0x39),))
MULTIBYTE = Alt(
    (
        Seq((ByteSet(((0xC2, 0xDF),)), _TAIL)),
        Seq((ByteSet(((0xE0, 0xE0),)), ByteSet(((0xA0, 0xBF),)), _TAIL)),
        Seq((ByteSet(((0xE1, 0xEC), (0xEE, 0xEF))), _TAIL, _TAIL)),
        Seq((ByteSet(((0xED, 0xED),)), ByteSet(((0x80, 0x9F),)), _TAIL)),
        Seq((ByteSet(((0xF0, 0xF0),)), ByteSet(((0x90, 0xBF),)), _TAIL, _TAIL)),
        Seq((ByteSet(((0xF1, 0xF3),)), _TAIL, _TAIL, _TAIL)),
        Seq((ByteSet(((0xF4, 0xF4),)), ByteSet(((0x80, 0x8F),)), _TAIL, _TAIL)),
    )
)
CHAR: Expr = Alt(
    (
        ByteSet(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F))),
        MULTIBYTE,
        Seq((Literal(b"\\"), ByteSet(tuple((b, b) for b in sorted(b'"\\/bfnrt'))))),
        Seq((Literal(b"\\u"), *[ByteSet(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))] * 4)),
    )
)
INTEGER = seq(optional(literal("-")), alt(literal("0"), Seq((ByteSet(((0x31, 0x39),)), Repeat(_DIGIT, 0, None)))))


def string(min_chars: int = 0, max_chars: int | None = None) -> Expr:
    """A JSON string of this number of characters."""
    return seq(literal('"'), Repeat(CHAR, min_chars, max_chars), literal('"'))


def json_grammar() -> Grammar:
    """Any JSON value, with fixed white space."""
    separator = literal(", ")
    member = seq(Call("string"), literal(": "), Call("value"))
    number = seq(INTEGER, optional(seq(literal("."), Repeat(_DIGIT, 1, None))))
    return Grammar(
        "value",
        {
            "value": alt(Call("object"), Call("array"), Call("string"), number, Words((b"false", b"null", b"true"))),
            "object": seq(literal("{"), Repeat(member, 0, None, separator), literal("}")),
            "array": seq(literal("["), Repeat(Call("value"), 0, None, separator), literal("]")),
            "string": string(),
        },
    )


def record_grammar() -> Grammar:
    """An object with members in a fixed order: a long string, a short one, a list of a bounded length, an enum."""
    members = (
        seq(literal('"name": '), string(1, 64)),
        seq(literal('"code": '), string(0, 5)),
        seq(literal('"tags": ['), Repeat(string(0, 24), 0, 12, literal(", ")), literal("]")),
        seq(literal('"kind": '), Words((b'"one"', b'"three"', b'"two"'))),
        seq(literal('"size": '), INTEGER),
    )
    parts = [part for i, member in enumerate(members) for part in ((literal(", "),) if i else ()) + (member,)]
    return Grammar("root", {"root": seq(literal("{"), *parts, literal("}"))})


def bag_grammar() -> Grammar:
    """An object with members in any order: two required, one optional, and others."""
    items = (
        BagItem(seq(literal('"id": '), INTEGER), is_once=True, is_required=True),
        BagItem(seq(literal('"name": '), string()), is_once=True, is_required=True),
        BagItem(seq(literal('"note": '), string(0, 12)), is_once=True),
        BagItem(seq(literal('"x-'), Repeat(ByteSet(((0x61, 0x7A),)), 1, 8), literal('": '), INTEGER)),
    )
    return Grammar("root", {"root": seq(literal("{"), Bag(items, literal(", "), 2, 6), literal("}"))})


def text_grammar() -> Grammar:
    """Any number of characters, except line breaks."""
    ascii_chars = ByteSet(((0x00, 0x09), (0x0B, 0x7F)))
    return Grammar("root", {"root": Repeat(alt(ascii_chars, MULTIBYTE), 0, None)})


def word_grammar() -> Grammar:
    """Letters and spaces only: no slice of a vocabulary fits."""
    return Grammar("root", {"root": Repeat(ByteSet(((0x20, 0x20), (0x61, 0x7A))), 1, None)})


JSON_TEXT = """{"name": "Käthe \\"K\\" O'Neill", "tags": ["a", "bb", "日本語 text", []], "n": [0, -1, 12.5, \
1234567890], "nested": {"deep": {"deeper": [{"x": true}, {"x": false}, null]}}, "emoji": "😀 done", \
"esc": "line\\u000abreak\\n"}"""
RECORD_TEXT = """{"name": "The quick brown fox jumps over the lazy dog, over and over ag", "code": "añ1\\n0", \
"tags": ["first thing", "", "0123456789 0123456789 01", "𝄞 clef"], "kind": "three", "size": -120}"""
BAG_TEXT = """{"x-abc": 12, "name": "Zoë", "x-q": 0, "id": 7, "note": "twelve chars"}"""
FREE_TEXT = 'He said: "no \\ never", \x7f and left — 東京 😀.'
WORD_TEXT = "a few small words and nothing else in here"

SAMPLES = {
    "json": (json_grammar, JSON_TEXT),
    "record": (record_grammar, RECORD_TEXT),
    "bag": (bag_grammar, BAG_TEXT),
    "text": (text_grammar, FREE_TEXT),
    "words": (word_grammar, WORD_TEXT),
}
