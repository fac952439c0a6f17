"""The chat in a browser with the embedded vision model: a picture, a form, and the memory plan."""

import json
import re

import pytest

from tests.page.conftest import Opener
from tests.page.steps import ask, drop, wait_for_answer
from tests.server.running import ROOT, RunningServer

pytestmark = pytest.mark.slow

README = (ROOT / "examples" / "tiny_vision" / "README.md").read_text()


def test_a_picture_is_dropped_and_asked_about(opened: Opener, seeing: RunningServer):
    page = opened(seeing).page
    page.get_by_text("Add pictures").wait_for()
    page.get_by_label("Temperature").fill("0")
    (picture,) = re.findall(r"base64,(iVBOR[\w+/=]+)", README)
    name = '<img src=x onerror="window.broken=1">.png'
    drop(page, name, picture)
    page.locator(".attached").get_by_text(name).wait_for()
    ask(page, "What is in the picture?")
    assert wait_for_answer(page) == re.findall(r'^The answer is "(.*?)"', README, re.MULTILINE)[0]
    assert page.locator(".turn.user img").evaluate("image => image.alt + image.naturalWidth") == name + "60"
    assert page.evaluate("window.broken") is None


def test_the_compiler_speaks_while_a_schema_is_written(opened: Opener, seeing: RunningServer):
    page = opened(seeing).page
    page.get_by_label("Answers are").select_option("JSON Schema")
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    for grammar, answer in (
        ('{"type": "strin"}', "type at # must be one or several of"),
        ("{", "must be JSON"),
        (json.dumps(schema), "The server takes it"),
    ):
        page.get_by_label("Grammar").fill(grammar)
        page.locator(".result").get_by_text(answer).wait_for()
    ask(page, "What is the capital of France?")
    assert json.loads(wait_for_answer(page))["city"] in ("Paris", "Rome")
    assert "grammar wrote" in page.locator(".facts").inner_text()


def test_the_memory_plan_is_shown(opened: Opener, seeing: RunningServer):
    page = opened(seeing, "/#engine").page
    page.locator(".legend").get_by_text("free").wait_for()
    plan = seeing.http.get("/server_info").json()["model_info"]["memory_plan"]
    assert min(plan["KV pool"], plan["weights"]) > 4 * 2**20
    shown = page.locator(".facts-list").inner_text()
    assert all(name in shown for name in plan)
