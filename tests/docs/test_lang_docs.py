"""The tutorial of docs/lang.md runs, and prints what it says."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import io
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

import jsg
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.program.defaults import as_backend
from jsg.testing import ScriptedBackend
from tests.examples.conftest import SMALL

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "lang.md"
HEAD = re.compile(r"^(?:\| (.*?) \||\*\*((?:`[^`]+`(?:, )?)+)\*\*)", re.MULTILINE)
"""The first cell of a row, or what a paragraph is about: there the reference gives signatures."""
SIGNATURE = re.compile(r"`(?:await |with )?(?:(\w+)\.)?(\w+)\(([^`]*)\)(?: as \w+)?:?`")
OWNERS: dict[str, tuple[Any, ...]] = {
    "": (jsg.SglFunction, jsg),
    "sgl": (jsg,),
    "s": (jsg.ProgramState,),
    "branches": (jsg.ProgramStateGroup,),
    "c": (CompiledFunction,),
}
CALLS = {"print", "from_json"}
"""Shown as they are called."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path = PAGE) -> list[tuple[int, str, str | None]]:
    """Line, code, and what the text block right behind says it prints."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in BLOCK.finditer(text)]


def run_blocks(page: pathlib.Path, names: dict[str, Any]) -> None:
    """Runs the blocks of a page in order; each prints what the page says."""
    for line, code, expected in blocks(page):
        printed = io.StringIO()
        # So many empty lines that an error names the line of the page.
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        if expected is not None:
            assert printed.getvalue() == expected, f"the block at line {line} prints something else"


@pytest.mark.slow
def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch):
    engine_class = jsg.Engine
    monkeypatch.setattr(jsg, "Engine", lambda: engine_class(**SMALL), raising=False)
    names: dict[str, Any] = {"__name__": "tutorial"}
    assert len(blocks()) >= 20
    try:
        run_blocks(PAGE, names)
    finally:
        names["engine"].close()
        jsg.set_default_backend(None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/first-steps.md"])
def test_the_first_program_that_a_page_shows_prints_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch):
    page = PAGE.parents[1] / name
    assert len(blocks(page)) == 1
    with jsg.Engine("tiny", **SMALL) as engine:
        monkeypatch.setattr(jsg, "RuntimeEndpoint", {"http://127.0.0.1:30000": engine}.__getitem__, raising=False)
        monkeypatch.setattr(jsg, "Engine", lambda model_path: engine, raising=False)
        run_blocks(page, {"__name__": "first"})


def test_what_is_compared_with_other_languages_runs():
    page = PAGE.parent / "coming-from.md"
    assert len(blocks(page)) == 5
    try:
        run_blocks(page, {"__name__": "coming_from"})
        as_backend(None).check()
    finally:
        jsg.set_default_backend(None)


def named_block(name: str) -> str:
    """The block of the tutorial that defines something."""
    return next(
        code for _, code, _ in blocks() if re.search(rf"^(?:async )?def {name}\(|^{name} =", code, re.MULTILINE)
    )


def test_the_web_server_of_the_tutorial_answers_streams_and_aborts_for_a_client_that_has_gone():
    names: dict[str, Any] = {"sgl": jsg}
    exec(named_block("app"), names)
    app, called = names["app"], []

    async def never(prompt: str, gen: Any) -> str:
        called[0].set_result(None)
        await asyncio.Future()
        return ""

    async def request(path: str, backend: ScriptedBackend) -> list[dict[str, Any]]:
        jsg.set_default_backend(backend)
        sent, gone = [], concurrent.futures.Future()
        called[:] = [gone]

        async def receive() -> dict[str, Any]:
            await asyncio.wrap_future(gone)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"question=Why", "headers": []}
        await app(scope, receive, send)
        return sent

    try:
        with ScriptedBackend({"Why": "For a reason."}) as backend:
            for path, pieces in (
                ("/answer", [b'{"answer":"For a reason."}']),
                ("/stream", [b"For", b" a", b" reason."]),
            ):
                sent = asyncio.run(request(path, backend))
                assert [message["body"] for message in sent[1:] if message["body"]] == pieces
        backend = ScriptedBackend(never)
        asyncio.run(request("/stream", backend))
        (run,) = backend.calls
        while not backend.aborted:
            time.sleep(0.001)
        assert backend.aborted == [run.what]
    finally:
        jsg.set_default_backend(None)


def test_every_known_fault_has_tests_of_its_number():
    numbers = re.findall(r"^\| F(\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 25)]
    written = "\n".join(path.read_text(encoding="utf-8") for path in PAGE.parents[1].glob("tests/**/test_*.py"))
    assert set(re.findall(r"def test_f(\d+)_", written)) == set(numbers)


def test_every_public_name_is_in_the_reference():
    reference = PAGE.read_text(encoding="utf-8").partition("## Reference")[2]
    known_elsewhere = {"SamplingParams", "__version__"}
    missing = [name for name in jsg.__all__ if name not in known_elsewhere and not re.search(rf"\b{name}\b", reference)]
    assert missing == []


def reference() -> str:
    """What is between the tutorial and the page on porting."""
    return PAGE.read_text(encoding="utf-8").partition("## Reference")[2].partition("\n## ")[0]


def bare(parameters: list[inspect.Parameter]) -> inspect.Signature:
    """Names, kinds and defaults. The order of those that are given by keyword means nothing."""
    named = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return inspect.Signature([parameter for parameter in named if parameter.name != "self"])


def of_code(function: Callable[..., Any]) -> inspect.Signature:
    return bare(list(inspect.signature(function).parameters.values()))


def of_page(written: str) -> inspect.Signature:
    names: dict[str, Any] = {}
    exec(f"def written({written}): ...", names)
    return of_code(names["written"])


def test_signatures_in_the_reference_are_those_of_the_code():
    checked: set[str] = set()
    for head in HEAD.finditer(reference()):
        for owner, name, written in SIGNATURE.findall(head[1] or head[2] or ""):
            if name in CALLS:
                continue
            function = next(getattr(one, name) for one in OWNERS[owner] if hasattr(one, name))
            expected = of_code(function)
            if written.endswith("..."):  # the rest is in the code, or in a table of its own
                written = written.removesuffix("...").rstrip(", ")
                expected = bare(list(expected.parameters.values())[: len(of_page(written).parameters)])
            assert of_page(written) == expected, f"{owner} {name}: the code has {expected}"
            checked.add(name)
    assert {"gen", "select", "image", "run_batch", "text_iter", "fork", "join", "var_scope", "Runtime"} <= checked


def test_the_arguments_of_an_endpoint_are_those_of_the_code():
    rows = reference().partition("| argument | |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    first, *others = [row.split("`")[1] for row in rows]
    assert of_page(f"{first}, *, {', '.join(others)}") == of_code(jsg.RuntimeEndpoint)
