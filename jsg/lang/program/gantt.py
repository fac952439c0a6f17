"""A run as a chart that anybody can open: its calls on a time axis, and how much of each prompt was shared."""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsg.lang.program.reading import RunState

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_NUM_TICKS = 5
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --run: #5b8def; --failed: #d9534f; --cached: #3aa76d;
        --computed: #e0a23b; --made: #5b8def; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { max-width: 14rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
td.time { width: 45%; } td.tokens { width: 20%; }
.lane { position: relative; height: 1rem;
        background: linear-gradient(90deg, var(--line) 1px, #0000 1px) 0 0 / 20% 100%; }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 2px; }
.axis { display: flex; justify-content: space-between; font-weight: normal; }
i.run { background: var(--run); } i.failed { background: var(--failed); } i.cached { background: var(--cached); }
i.computed { background: var(--computed); } i.made { background: var(--made); }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
pre { white-space: pre-wrap; border: 1px solid var(--line); padding: .6rem; max-height: 20rem; overflow: auto; }
"""


def trace_to_html(state: RunState, path: str | Path = "trace.html") -> Path:
    """Writes a run as a page with a Gantt chart of its calls: one file that needs no network and runs no script.

    Each call of the model has a bar from its start to its end, and its tokens: those of the prompt that were in the
    cache, because another call or run had computed them, those that were computed, and those that were generated.

    Args:
        state: The state of a run; waits for its end, as `timeline` does.
        path: The file, which is replaced if it exists.

    Returns:
        The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    calls = state.timeline()
    path.write_text("".join(_page(repr(state), calls, state.usage())), encoding="utf-8")
    return path


def _page(title: str, calls: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>A run of jsg</title><style>{_STYLE}</style></head><body><h1>A run of jsg</h1>"
    yield f"<pre>{html.escape(title)}</pre>"
    yield f"<p>{', '.join(f'{name.replace("_", " ")}: {count}' for name, count in usage.items())}</p>"
    yield '<p class="key">tokens:<i class="cached"></i>prompt, cached<i class="computed"></i>prompt, computed'
    yield '<i class="made"></i>generated</p>'
    yield from _chart(calls)
    yield "</body></html>\n"


def _chart(calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    end_s = max((call["end_s"] or call["start_s"] for call in calls), default=0.0) or 1e-6
    most = max((sum(_parts(call).values()) for call in calls), default=0) or 1
    ticks = "".join(f"<span>{end_s * tick / _NUM_TICKS:.3g} s</span>" for tick in range(_NUM_TICKS + 1))
    yield f'<table><thead><tr><th>call</th><th><div class="axis">{ticks}</div></th><th>tokens</th>'
    yield '<th class="n">cached / prompt</th><th class="n">generated</th><th class="n">s</th></tr></thead><tbody>'
    for call in calls:
        yield from _row(call, end_s, most)
    yield "</tbody></table>"


def _row(call: Mapping[str, Any], end_s: float, most: int) -> Iterator[str]:
    """One call. Reports that a model did not give are shown as a dash."""
    name, start = html.escape(str(call["name"] or "")), call["start_s"]
    end = end_s if call["end_s"] is None else call["end_s"]
    error = f"{html.escape(call['error'])}, " if call["error"] else ""
    label = f"{name}: {error}{start:.3f} s to {end:.3f} s"
    yield f'<tr><td class="name" title="{name}">{name} <small>{html.escape(call["kind"])}</small></td>'
    yield f'<td class="time"><div class="lane" role="img" aria-label="{label}" title="{label}">'
    yield f"{_bar('failed' if call['error'] else 'run', start / end_s, (end - start) / end_s)}</div></td>"
    yield f'<td class="tokens"><div class="lane">{"".join(_token_bars(call, most))}</div></td>'
    prompt, cached, made = ("-" if call[key] is None else str(call[key]) for key in _TOKENS)
    seconds = html.escape(call["error"]) if call["error"] else f"{end - start:.3f}"
    yield f'<td class="n">{cached} / {prompt}</td><td class="n">{made}</td><td class="n">{seconds}</td></tr>'


def _parts(call: Mapping[str, Any]) -> dict[str, int]:
    prompt, cached, made = (call[key] or 0 for key in _TOKENS)
    return {"cached": cached, "computed": prompt - cached, "made": made}


def _token_bars(call: Mapping[str, Any], most: int) -> Iterator[str]:
    begin = 0
    for kind, count in _parts(call).items():
        if count:
            yield _bar(kind, begin / most, count / most)
        begin += count


def _bar(kind: str, begin: float, length: float) -> str:
    return f'<i class="{kind}" style="left:{100 * begin:.2f}%;width:{100 * length:.2f}%"></i>'
