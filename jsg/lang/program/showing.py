"""States as people see them: one line, and HTML for notebooks. What is shown is what there is; nothing waits."""

import dataclasses
import html
import reprlib
from collections.abc import Iterator, Mapping

from jsg.lang.streams.variables import Variable

_MAX_LINE = 60  # characters of a text or value in one line
_MAX_NAMED = 8  # variables in one line
_MAX_HTML = 20_000  # characters of a text or value in HTML


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """What a state has now.

    Attributes:
        kind: The name of its class.
        status: "running", "done" or "failed".
        failure: What ended it early.
        text: Its text so far.
        variables: Its variables so far.
        usage: The counts of `usage` so far.
    """

    kind: str
    status: str
    failure: BaseException | None
    text: str
    variables: Mapping[str, Variable]
    usage: Mapping[str, int]


def one_line(shown: Shown) -> str:
    """Gives a state in one line."""
    names = list(shown.variables)
    values = [f"{name}={_value(shown.variables[name], _MAX_LINE)}" for name in names[:_MAX_NAMED]]
    if names[_MAX_NAMED:]:
        values.append(f"and {len(names) - _MAX_NAMED} more")
    return f"<{shown.kind} {_status(shown, _MAX_LINE)}, {' '.join([_cut(repr(shown.text), _MAX_LINE), *values])}>"


def html_of(shown: Shown) -> str:
    """Gives a state as HTML, in which everything that a program or a model wrote is escaped."""
    return "".join(_html(shown))


def _html(shown: Shown) -> Iterator[str]:
    counts = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in shown.usage.items())
    yield f"<div><b>{shown.kind}</b> {html.escape(_status(shown, _MAX_HTML))}<br><small>{html.escape(counts)}</small>"
    yield f'<pre style="white-space: pre-wrap">{html.escape(_cut(shown.text, _MAX_HTML))}</pre>'
    if shown.variables:
        yield "<table><tr><th>variable</th><th>value</th><th>prompt</th><th>cached</th><th>generated</th></tr>"
        for name, variable in shown.variables.items():
            meta = variable.meta or {}
            tokens = [meta.get(key, "") for key in ("prompt_tokens", "cached_tokens", "completion_tokens")]
            cells = [name, _value(variable, _MAX_HTML), *("" if count is None else str(count) for count in tokens)]
            yield f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        yield "</table>"
    yield "</div>"


def _status(shown: Shown, most: int) -> str:
    if shown.failure is None:
        return shown.status
    return f"{shown.status}: {type(shown.failure).__name__}: {_cut(str(shown.failure), most)}"


def _value(variable: Variable, most: int) -> str:
    """Gives a value, the text of it that has come, or the name of the error."""
    if not variable.is_done:
        return f"{_cut(repr(''.join(variable.pieces())), most)}…"
    if variable.error is not None:
        return f"<{type(variable.error).__name__}>"
    value = variable.now()
    return _cut(repr(value) if isinstance(value, str) else reprlib.repr(value), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"
