"""The programs of the page: one is sent, and its graph and its calls are shown as they run."""

import re

import pytest

from tests.page.conftest import Opener
from tests.server.running import RunningServer

pytestmark = pytest.mark.slow


def test_a_program_runs_and_each_node_says_what_became_of_it(opened: Opener, scripted: RunningServer):
    page = opened(scripted, "/#programs").page
    page.get_by_label("Program", exact=True).select_option(label="Draw five answers")
    page.get_by_label("question").fill("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Run").click()
    page.get_by_text(re.compile(r"^done: 5 calls, \d+ of \d+ prompt tokens cached, 80 generated$")).wait_for()
    cards = page.locator(".card.generate")
    assert cards.count() == 5
    assert [card.get_attribute("data-state") for card in cards.all()] == ["done"] * 5
    assert all(re.search(r"\d+ / \d+ cached, 16 new", text) for text in cards.all_inner_texts())
    assert page.locator(".call-table tbody tr").count() == 5
    assert page.locator(".view-programs img").count() == 0
    assert '"answer": [' in page.get_by_label("Variables of the program").inner_text()


def test_a_program_is_stopped(opened: Opener, scripted: RunningServer):
    page = opened(scripted, "/#programs").page
    page.get_by_label("Program", exact=True).select_option(label="Write a guide")
    page.get_by_label("first").fill("a long way " * 200)
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    assert page.get_by_role("button", name="Run").is_enabled()


def test_an_argument_that_is_refused_is_said(opened: Opener, scripted: RunningServer):
    one = opened(scripted, "/#programs")
    one.page.get_by_label("question").first.wait_for(state="detached")
    one.page.route("**/v1/programs", lambda route: route.fulfill(status=400, json={"error": {"message": "no <b>"}}))
    one.page.get_by_role("button", name="Run").click()
    one.page.get_by_role("dialog").get_by_text("no <b>").wait_for()
    one.page.get_by_text("failed", exact=True).wait_for()
