"""The view of the engine in a browser."""

from contextlib import closing
from typing import Any

import pytest

from tests.engine.fake_core import ENDLESS_TOKEN
from tests.page.conftest import Opener
from tests.server.running import RunningServer
from tests.server.threads import ServerMaker

pytestmark = pytest.mark.slow

ENDLESS = {"input_ids": [ENDLESS_TOKEN], "stream": True, "sampling_params": {"max_new_tokens": 1000}}


def tile(page: Any, name: str) -> Any:
    return page.locator(".tile").filter(has=page.get_by_text(name, exact=True))


def test_the_engine_is_shown_at_work(opened: Opener, scripted: RunningServer):
    scripted.reset()
    page = opened(scripted, "/#engine").page
    tile(page, "Running").get_by_text("0", exact=True).wait_for()
    with closing(scripted.send("/generate", ENDLESS)), closing(scripted.send("/generate", ENDLESS)):
        tile(page, "Running").get_by_text("2", exact=True).wait_for()
        tile(page, "Batch").get_by_text("2.0", exact=True).wait_for()
        assert page.locator(".legend").inner_text()
    tile(page, "Running").get_by_text("0", exact=True).wait_for()
    curve = tile(page, "Running").locator("polyline").get_attribute("points")
    assert len({point.split(",")[1] for point in curve.split()}) > 1, "it has gone up and down"


def test_what_requests_wait_for_is_shown(opened: Opener, make_server: ServerMaker):
    with make_server(engine={"max_running_requests": 1}) as server:
        page = opened(server, "/#engine").page
        with closing(server.send("/generate", ENDLESS | {"input_ids": [[ENDLESS_TOKEN]] * 3})):
            page.get_by_text("Waiting for: rows 2", exact=True).wait_for()
        page.get_by_text("Waiting for", exact=False).wait_for(state="detached")


def test_a_view_that_is_left_asks_for_nothing(opened: Opener, scripted: RunningServer):
    page = opened(scripted, "/#engine").page
    with page.expect_request("**/metrics"):
        pass
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []
