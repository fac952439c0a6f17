r"""The formats that are enforced, as regular expressions.

Each expression is as strict as its standard. It is narrower where the standard is not a regular language, or allows
what nobody writes:

- Seconds are at most 59, because a leap second is valid only at certain times in certain time zones.
- A host name has at most seven labels. The first has at most 63 characters and the others have at most 30, which keeps
  the name within 253. No label has `--` as its third and fourth character, because the text after `xn--` would have to
  be decoded.
- The local part of a mail address is not quoted, and its domain is a host name.
- Years are 0001 to 9999.

A length beside a format needs a state for each of its states and each number of characters. Where a length must be
counted, formats that would need too many are narrower: a host name has at most 63 characters, and a URI has neither an
IPv6 address nor a user. A mail address has at most 63 characters, or else its domain has at most 63, and its local part
what is left.
"""

import functools

from jsg.constrained.chars.chardfa import CharDfa
from jsg.constrained.ir import NEVER, Expr, any_of, seq
from jsg.constrained.regex.parse import parse_regex

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,18}})?([Zz]|[+-]{_HOUR_MINUTE})"

_COUNT = "[0-9]{1,15}"
_DURATION_TIME = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DURATION_DATE = f"({_COUNT}D|{_COUNT}M({_COUNT}D)?|{_COUNT}Y({_COUNT}M({_COUNT}D)?)?)"
_DURATION = f"P({_DURATION_DATE}({_DURATION_TIME})?|{_DURATION_TIME}|{_COUNT}W)"

_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"


_LABEL = 63
"""The most characters of a label; a host name of so many has no label that is too long."""


def _label(longest: int | None) -> str:
    """A label of a host name: letters, digits and inner hyphens."""
    more = "*" if longest is None else f"{{0,{longest - 5}}}"
    edge, inner = "[0-9A-Za-z]", "[0-9A-Za-z-]"
    long = f"{inner}({edge}{inner}|-{edge}){inner}{more}{edge}"
    return f"{edge}({edge}|{inner}{edge}|{inner}{{2}}{edge}|{long})?"


_HOSTNAME = rf"{_label(_LABEL)}(\.{_label(30)}){{0,6}}"
_SHORT_HOSTNAME = rf"{_label(None)}(\.{_label(None)})*"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = rf"{_ATOM}(\.{_ATOM})*"

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"


def _ipv6() -> str:
    """Eight groups, or fewer around one `::`; the last two may be an IPv4 address."""
    group = f"{_HEX}{{1,4}}"
    tail = f"({group}:{group}|{_IPV4})"
    options = [f"({group}:){{6}}{tail}"]
    gap = ":" * 2  # replaces groups of zeros
    for before in range(7):  # groups before the gap
        left = "" if before == 0 else f"{group}(:{group}){{{before - 1}}}"
        room = 7 - before  # groups that may come after it
        after = [group] if room >= 1 else []
        if room >= 2:
            after.append(f"({group}:){{0,{room - 2}}}{tail}")
        options.append(f"{left}{gap}({'|'.join(after)})?" if after else f"{left}{gap}")
    options.append(f"({group}:){{7}}:")
    return f"({'|'.join(options)})"


_IPV6 = _ipv6()

_SIGNS = r"0-9A-Za-z._~!$&'()*+,;=\-"
_BEYOND_ASCII = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14)
)
_BEYOND_ASCII += "\U000e1000-\U000efffd"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_ESCAPE = f"%{_HEX}{{2}}"
_SCHEME = "[A-Za-z][0-9A-Za-z+.-]"


def _identifiers(signs: str, private: str = "") -> tuple[str, str]:
    """URIs whose parts have these signs, and the query the private ones too; and references, which may be relative."""
    sign, first = f"([{signs}:@]|{_ESCAPE})", f"([{signs}@]|{_ESCAPE})"
    host = rf"(\[({_IPV6}|[Vv]{_HEX}+\.[{_SIGNS}:]+)\]|([{signs}]|{_ESCAPE})*)"
    authority = f"(([{signs}:]|{_ESCAPE})*@)?{host}(:[0-9]*)?"
    rooted = f"//{authority}(/{sign}*)*|/({sign}+(/{sign}*)*)?"
    ending = rf"(\?([{signs}{private}:@/?]|{_ESCAPE})*)?(#([{signs}:@/?]|{_ESCAPE})*)?"
    absolute = f"{_SCHEME}*:({rooted}|{sign}+(/{sign}*)*)?{ending}"
    return absolute, f"({absolute}|({rooted}|{first}+(/{sign}*)*)?{ending})"


def _short_identifiers(signs: str, most: int | None) -> tuple[str, str]:
    """The same without IPv6 addresses and users, in few states and with at most `most` characters."""
    room = 0 if most is None else most - _BEFORE_PATH

    def run(size: int) -> str:
        sign = f"[{signs}:@/?]"
        if most is None:
            return f"({sign}|{_ESCAPE})*"
        return f"({sign}{{0,{size}}}|({sign}|{_ESCAPE}){{0,{size // 3}}})"

    numbers = ("*", "*", "*") if most is None else ("{0,29}", "{0,300}", "{0,5}")
    fragment = f"#{run(room // 4)}"
    rest = f"{run(room - room // 4)}({fragment})?"
    rooted = f"//[{signs}]{numbers[1]}(:[0-9]{numbers[2]})?([/?]{rest}|{fragment})?"
    rooted += f"|/(([{signs}:@?]|{_ESCAPE}){rest}|{fragment})?"
    absolute = rf"{_SCHEME}{numbers[0]}:({rooted}|([{signs}:@?]|{_ESCAPE}){rest}|{fragment})?"
    first = f"([{signs}@]|{_ESCAPE})"
    first += "+" if most is None else f"{{1,{_BEFORE_PATH // 4}}}"
    return absolute, rf"({absolute}|({rooted}|{first}([/?]{rest}|{fragment})?|\?{rest}|{fragment})?)"


_BEFORE_PATH = 400
"""More characters than scheme, host and port have where the other parts of a URI are counted one by one."""
MAX_COUNTED = 1000
"""Most characters of a text of a format for which there is a state for each number of characters."""

_VARIABLE = rf"([0-9A-Za-z_]|{_ESCAPE})(\.?([0-9A-Za-z_]|{_ESCAPE}))*(:[1-9][0-9]{{0,3}}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}}"
_TEMPLATE = rf"([!#$&'()*+,./0-9:;=?@A-Z[\]_a-z~{_BEYOND_ASCII}{_PRIVATE}-]|{_ESCAPE}|{_EXPRESSION})*"
_POINTER = "(/([^~/]|~[01])*)*"
_URI, _URI_REFERENCE = _identifiers(_SIGNS)
_IRI, _IRI_REFERENCE = _identifiers(_SIGNS + _BEYOND_ASCII, _PRIVATE)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "uuid": _UUID,
    "email": f"{_LOCAL}@{_HOSTNAME}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOSTNAME,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
"""For each format its regular expression, which must match the whole text. `format_expr` adds the length of a part."""

WIDER = {
    **{name: FORMATS[name] for name in ("uuid", "ipv4", "ipv6", "uri", "uri-reference")},
    **{name: FORMATS[name] for name in ("iri", "iri-reference", "json-pointer", "relative-json-pointer")},
    "date": "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "time": r"[0-9]{2}:[0-9]{2}[\s\S]*",
    "date-time": r"[0-9]{4}-[0-9]{2}-[0-9]{2}[\s\S]+",
    "duration": r"P[\s\S]*",
    "email": r"(\"[\s\S]*|[^@:]*)@[\s\S]*",
    "hostname": "[0-9A-Za-z.-]*",
}
"""Regular expressions of all texts that have a format by its standard, and perhaps of others. A text that must not have
the format does not match them."""

_Row = tuple[tuple[str, int | None], ...]
"""Regular expressions in a row, each with the most characters of its text."""
_SHORT_EMAIL: _Row = ((_LOCAL, None), ("@", None), (_SHORT_HOSTNAME, None))
_SIGNS_OF = {"uri": _SIGNS, "iri": _SIGNS + _BEYOND_ASCII}


@functools.cache
def format_expr(name: str) -> Expr:
    """The texts of a format, over characters."""
    if name == "email":
        return _in_row(((_LOCAL, 64), ("@", None), (_HOSTNAME, None)))
    return parse_regex(FORMATS[name], search=False)


@functools.lru_cache(maxsize=64)
def short_format_expr(name: str, most: int | None) -> Expr:
    """Texts of a format in few states, so that their length can be counted. Those above `most` must be left out."""
    if name == "hostname":
        return _in_row(((_SHORT_HOSTNAME, _LABEL),))
    if name == "email":
        if most is not None and most <= _LABEL:
            return _in_row(_SHORT_EMAIL)
        local = 64 if most is None else min(64, most - _LABEL - 1)
        row = ((_LOCAL, local), ("@", None), (_SHORT_HOSTNAME, _LABEL))
        return any_of([_limited(_in_row(_SHORT_EMAIL), _LABEL), _in_row(row) if local else NEVER])
    return parse_regex(_short_identifier(name, None), search=False) if is_identifier(name) else format_expr(name)


@functools.lru_cache(maxsize=64)
def long_identifier_expr(name: str, most: int) -> Expr:
    """Texts of a format of URIs with at most `most` characters, which are more than `MAX_COUNTED`."""
    return parse_regex(_short_identifier(name, most), search=False)


def is_identifier(name: str) -> bool:
    """Whether the format is one of URIs or IRIs."""
    return name.removesuffix("-reference") in _SIGNS_OF


def _short_identifier(name: str, most: int | None) -> str:
    return _short_identifiers(_SIGNS_OF[name.removesuffix("-reference")], most)[name.endswith("-reference")]


def _in_row(row: _Row) -> Expr:
    return seq(*(_limited(parse_regex(part, search=False), most) for part, most in row))


def _limited(expr: Expr, most: int | None) -> Expr:
    return expr if most is None else CharDfa.of(expr).intersect(CharDfa.length(0, most)).minimised().to_expr()
