"""Times of the module for browsers in Chromium, beside `@mlc-ai/web-xgrammar` if it is there, in one run.

    make grammar-module
    npm install --prefix DIR --no-save @mlc-ai/web-xgrammar@0.1.27
    python -m bench.constrained.browser [--peer DIR] [--maskbench DATA --share N] [--output FILE]

"First use" is a page of its own each time: from the files to the first mask, with the module fetched. The peer compiles
the grammar in it, and ours has tables. "Cold" are the masks of a first walk over a document, "warm" those of the next
two; all documents' masks are taken together. A page that is isolated has a clock of 5 us.
"""

import argparse
import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.constrained.__main__ import tekken
from bench.constrained.cases import CASES, Case
from bench.report import ROOT, Report

FIRST_USES = 5
PAGE = "https://bench.test/"
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
TARGETS = {"first use": {"target": 50.0}, "mask cold": {"target_p50": 40.0, "target_p99": 500.0}}
PEER = "node_modules/@mlc-ai/web-xgrammar/lib"


def work(data: Path | None, share: int) -> dict[str, Any]:
    """The vocabulary in both engines' forms, and tables and tokens of each document."""
    from jsg.constrained.compiler import compile_tables
    from jsg.constrained.run.vocab import Vocabulary
    from jsg.errors import GrammarError
    from jsg.types import GrammarSpec

    tokenizer, tokens = tekken()
    vocabulary = Vocabulary(tokens, range(tokenizer.num_special_tokens), [tokenizer.eos_id])
    cases = [*CASES] if data is None else _schemas(data, share)
    found = []
    for case in cases:
        kind = "json_schema" if case.kind == "json" else case.kind
        try:
            tables = compile_tables(GrammarSpec(kind, "{}" if case.kind == "json" else case.text))  # pyright: ignore[reportArgumentType]
        except GrammarError:
            continue
        token_ids = tokenizer.encode(case.document, bos=False, eos=False)
        found.append({**vars(case), "token_ids": token_ids, "tables": base64.b64encode(tables.to_bytes()).decode()})
    letters = _byte_letters()
    encoded = ["".join(letters[byte] for byte in token) or f"<SPECIAL_{i}>" for i, token in enumerate(tokens)]
    files = {"vocabulary": base64.b64encode(vocabulary.to_bytes()).decode(), "encoded": encoded}
    return {**files, "size": vocabulary.size, "eos_id": tokenizer.eos_id, "cases": found}


def _schemas(data: Path, share: int) -> list[Case]:
    """The first valid instance of every n-th schema, in fixed white space."""
    lines = (data / "maskbench-dev.jsonl").open(encoding="utf-8")
    entries = [json.loads(line) for line in itertools.islice(lines, 0, None, share)]
    valid = [(entry, test["data"]) for entry in entries for test in entry["tests"][:1] if test["valid"]]
    return [
        Case(entry["name"], "json_schema", json.dumps(entry["schema"]), json.dumps(document, ensure_ascii=False))
        for entry, document in valid
    ]


def _byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(256)
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def run(engine: str, browser: Any, folders: dict[str, Path], given: dict[str, Any]) -> dict[str, Any]:
    """What the engine's page measures."""

    def answer(route: Any) -> None:
        folder, _, name = urlsplit(route.request.url).path[1:].partition("/")
        body = {"path": folders[folder] / name} if name else {"body": "", "content_type": "text/html"}
        route.fulfill(**body, headers=ISOLATED | ({"Content-Type": "text/javascript"} if name.endswith("js") else {}))

    page = browser.new_page()
    page.route(f"{PAGE}**", answer)
    page.goto(PAGE)
    assert page.evaluate("crossOriginIsolated")
    ask = "async ([engine, work]) => (await import('/bench/browser.mjs')).measure(engine, work)"
    try:
        return page.evaluate(ask, [engine, given])
    finally:
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="where npm has installed @mlc-ai/web-xgrammar")
    parser.add_argument(
        "--maskbench", type=Path, metavar="DATA", help="read schemas of maskbench-dev.jsonl there instead"
    )
    parser.add_argument("--share", type=int, default=20, help="with --maskbench: every N-th schema only")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    folders = {"module": ROOT / "js" / "grammar", "bench": Path(__file__).parent}
    if options.peer is not None:
        folders["peer"] = options.peer / PEER
    given = work(options.maskbench, options.share)
    report = Report("bench.constrained.browser", [], options.output, vocabulary="tekken, 131072 tokens")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        report.header["chromium"] = browser.version
        for engine in ("jsg", "xgrammar") if options.peer else ("jsg",):
            few = given | {"cases": given["cases"][:1]}
            first = [run(engine, browser, folders, few)["first_ms"] for _ in range(FIRST_USES)]
            report.add(f"first use, {engine}", "ms", first, **(TARGETS["first use"] if engine == "jsg" else {}))
            cases = run(engine, browser, folders, given)["cases"]
            read = {name: times for name, times in cases.items() if "refused" not in times}
            for name in sorted(set(cases) - set(read)):
                print(f"{engine}: {name}: {cases[name]['refused']}"[:160])
            for pace in ("cold", "warm", "accept"):
                samples = np.concatenate([times[pace] for times in read.values()])
                p50, p99 = (float(np.percentile(samples, rank)) for rank in (50, 99))
                facts = {"p50": p50, "p99": p99, "max": float(samples.max()), "mean": float(samples.mean())}
                what = "accept" if pace == "accept" else f"mask {pace}"
                targets = TARGETS.get(what, {}) if engine == "jsg" else {}
                report.add(f"{what}, {engine}", "us", [p50], **facts, masks=len(samples), cases=len(read), **targets)
        browser.close()
    report.close()


if __name__ == "__main__":
    main()
