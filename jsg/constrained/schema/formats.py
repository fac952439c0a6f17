r"""The formats that are enforced, as regular expressions over ASCII text.

Each expression is as strict as its standard. It is narrower where the standard is not a regular language, or allows
what nobody writes:

- Seconds are at most 59, because a leap second is valid only at certain times in certain time zones.
- A host name has at most seven labels. The first has at most 63 characters and the others have at most 30, which keeps
  the name within 253. No label has `--` as its third and fourth character, because the text after `xn--` would have to
  be decoded.
- The local part of a mail address is not quoted, and its domain is a host name.
- Years are 0001 to 9999.
"""

import functools

from jsg.constrained.ir import Expr
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


def _label(longest: int) -> str:
    """A label of a host name: letters, digits and inner hyphens."""
    edge, inner = "[0-9A-Za-z]", "[0-9A-Za-z-]"
    long = f"{inner}({edge}{inner}|-{edge}){inner}{{0,{longest - 5}}}{edge}"
    return f"{edge}({edge}|{inner}{edge}|{inner}{{2}}{edge}|{long})?"


_HOSTNAME = rf"{_label(63)}(\.{_label(30)}){{0,6}}"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(\.{_ATOM})*@{_HOSTNAME}"

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
_ESCAPE = f"%{_HEX}{{2}}"
_PATH_SIGN = f"([{_SIGNS}:@]|{_ESCAPE})"
_HOST = rf"(\[({_IPV6}|[Vv]{_HEX}+\.[{_SIGNS}:]+)\]|([{_SIGNS}]|{_ESCAPE})*)"
_AUTHORITY = f"(([{_SIGNS}:]|{_ESCAPE})*@)?{_HOST}(:[0-9]*)?"
_PATH = f"(//{_AUTHORITY}(/{_PATH_SIGN}*)*|/({_PATH_SIGN}+(/{_PATH_SIGN}*)*)?|{_PATH_SIGN}+(/{_PATH_SIGN}*)*)?"
_QUERY = f"([{_SIGNS}:@/?]|{_ESCAPE})*"
_URI = rf"[A-Za-z][0-9A-Za-z+.-]*:{_PATH}(\?{_QUERY})?(#{_QUERY})?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "uuid": _UUID,
    "email": _EMAIL,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOSTNAME,
    "uri": _URI,
}
"""For each format its regular expression, which must match the whole text."""


@functools.cache
def format_expr(name: str) -> Expr:
    """The texts of a format, over characters."""
    return parse_regex(FORMATS[name], search=False)
