"""The chat in a browser with the embedded vision model: a picture, a form, and the memory plan."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

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
    page.get_by_label("Colour tokens").check()
    page.get_by_role("button", name="Again").click()
    page.locator(".token").first.wait_for()
    page.locator(".turn.assistant .facts").wait_for()
    assert 0 < page.locator(".token.forced").count() < page.locator(".token").count()


def test_the_shown_code_gives_the_shown_answer(
    opened: Opener, seeing: RunningServer, capsys: pytest.CaptureFixture[str]
):
    page = opened(seeing).page
    page.get_by_label("System prompt").fill('Say "so" if it\'s so.')
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Min p").fill("0.01")
    page.get_by_label("Answers are").select_option("Regular expression")
    page.get_by_label("Grammar").fill(r"[A-Z]\w{2,4} and 'R\w{2}e'")
    ask(page, "Which\ncities?")
    answer = wait_for_answer(page)
    page.get_by_role("button", name="Code").click()
    code = {}
    for name in ("curl", "Python", "jsg.lang"):
        page.get_by_label(name, exact=True).check()
        code[name] = page.locator("dialog pre").inner_text()
    done = subprocess.run(["bash", "-c", code["curl"]], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == answer
    for name in ("Python", "jsg.lang"):
        with ThreadPoolExecutor(1) as other:  # in this thread the event loop of playwright runs
            other.submit(exec, compile(code[name], name, "exec"), {}).result()
        assert capsys.readouterr().out == f"{answer}\n", name


def test_the_memory_plan_is_shown(opened: Opener, seeing: RunningServer):
    page = opened(seeing, "/#engine").page
    page.locator(".legend").get_by_text("free").wait_for()
    plan = seeing.http.get("/server_info").json()["model_info"]["memory_plan"]
    assert min(plan["KV pool"], plan["weights"]) > 4 * 2**20
    shown = page.locator(".facts-list").inner_text()
    assert all(name in shown for name in plan)
