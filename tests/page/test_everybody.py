"""The page for everybody: with a keyboard only, read aloud, dark, and on a phone."""

import pytest

from tests.page.conftest import Opener
from tests.page.steps import ask, problems, wait_for_answer
from tests.server.running import RunningServer

pytestmark = pytest.mark.slow

PHONE = {"width": 320, "height": 700}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Opener, scripted: RunningServer, axe: str, scheme: str):
    page = opened(scripted, color_scheme=scheme).page
    page.get_by_text("Ask fake something.").wait_for()
    assert problems(page, axe) == []
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Colour tokens").check()
    page.get_by_label("Answers are").select_option("Regular expression")
    ask(page, "score this")
    page.locator(".token").first.hover()
    page.get_by_role("button", name="Again").click()
    page.get_by_text("2 / 2").wait_for()
    page.locator(".token").first.hover()
    assert problems(page, axe) == []
    page.get_by_role("button", name="Code").click()
    assert problems(page, axe) == []
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Engine").click()
    page.locator(".legend").get_by_text("free").wait_for()
    assert problems(page, axe) == []
    page.get_by_role("tab", name="Cache").click()
    page.locator(".pool-bar").get_by_text("tokens =").wait_for()
    assert problems(page, axe) == []
    page.get_by_role("tab", name="Programs").click()
    page.get_by_role("button", name="Run").click()
    page.locator(".call-table tbody tr").first.wait_for()
    assert problems(page, axe) == []


def test_the_keyboard_reaches_everything(opened: Opener, scripted: RunningServer):
    page = opened(scripted).page
    page.locator(":focus").and_(page.get_by_label("Message")).wait_for()
    page.locator(".skip").focus()
    page.keyboard.press("Tab")
    for name in ("Cache", "Programs", "Engine"):
        page.keyboard.press("ArrowRight")
        page.get_by_role("tab", name=name, selected=True).wait_for()
    page.locator(".legend").get_by_text("free").wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_label("Message").focus()
    page.get_by_label("Max tokens").fill("300")
    ask(page, "stop me")
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()


def test_a_phone_has_room_for_it(opened: Opener, scripted: RunningServer):
    page = opened(scripted, viewport=PHONE).page
    page.get_by_label("Message").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("60")
    page.get_by_role("button", name="Settings").click()
    ask(page, "averylongwordwithoutaspace" * 20)
    wait_for_answer(page)
    for tab, shown in {"Engine": ".legend", "Cache": ".pool-bar p", "Programs": ".card", "Chat": ".turn"}.items():
        page.get_by_role("tab", name=tab).click()
        page.locator(shown).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.evaluate("document.querySelector('main').scrollWidth") <= PHONE["width"]
        edge = page.evaluate("document.querySelector('.bar').getBoundingClientRect().right")
        assert edge <= PHONE["width"]
