"""The programs that the page of the server offers are those of `examples/page`, and the embedded model can run them."""

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

import jsg
from jsg.lang.executor.compiled import CompiledFunction
from tests.examples.conftest import EXAMPLES


@pytest.fixture(scope="module")
def programs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_programs", EXAMPLES / "page" / "programs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_the_example_compiles(programs: ModuleType):
    assert json.loads(programs.FILE.read_text(encoding="utf-8")) == programs.compiled(), (
        "run python examples/page/programs.py"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "answers"),
    [
        ("Judge an essay", {"city": "Oslo", "summary": '{"name": "Nina", "city": "Oslo", "color": "red"}'}),
        ("Draw five answers", {}),
        ("Write a guide", {"plan": "France Japan Egypt"}),
        ("Read documents side by side", {"answer": "Oscar lives in Rome."}),
    ],
)
def test_the_embedded_model_answers(programs: ModuleType, engine: jsg.Engine, title: str, answers: dict[str, Any]):
    [offered] = [each for each in programs.compiled() if each["title"] == title]
    program = CompiledFunction.from_json(json.dumps(offered["graph"]))
    state = program.run(**offered["arguments"], backend=engine, where="here")
    state.sync()
    assert {name: state[name] for name in answers} == answers
    assert state.usage()["cached_tokens"] > 0
