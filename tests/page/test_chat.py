"""The chat in a browser, with a model that repeats its prompt: versions, stop, keys, and text that looks like HTML."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Opener
from tests.page.steps import actions, ask, drop, texts, wait_for_answer
from tests.server.running import RunningServer

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>bold</b>'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}


def limit(page: Any, count: int) -> None:
    page.get_by_label("Max tokens").fill(str(count))


@pytest.fixture
def page(opened: Opener, scripted: RunningServer) -> Iterator[Any]:
    scripted.reset()
    page = opened(scripted).page
    page.get_by_label("Message").wait_for()
    limit(page, 40)
    return page


class TestTurns:
    def test_a_newcomer_asks_and_reads_the_answer(self, page: Any):
        ask(page, "Hello there")
        answer = wait_for_answer(page)
        assert "Hello there" in answer  # the model repeats its prompt
        facts = page.locator(".facts li").all_inner_texts()
        assert any("first token" in fact for fact in facts) and any("prompt tokens cached" in fact for fact in facts)
        assert page.get_by_role("navigation").get_by_text("Hello there").is_visible()
        assert page.title() == "fake · jsg"

    def test_a_conversation_is_there_after_a_reload(self, page: Any):
        ask(page, "Keep this")
        wait_for_answer(page)
        shown = texts(page)
        page.reload()
        page.locator(".turn").first.wait_for()
        assert texts(page) == shown

    def test_an_edit_is_another_branch_and_the_first_one_stays(self, page: Any):
        ask(page, "first")
        wait_for_answer(page)
        ask(page, "follows the first")
        wait_for_answer(page, 2)
        before = texts(page)
        actions(page, 0).get_by_role("button", name="Edit").click()
        page.get_by_label("Another version of this turn").fill("second")
        page.locator(".body").get_by_role("button", name="Send").click()
        page.get_by_text("2 / 2").wait_for()
        wait_for_answer(page)
        assert len(texts(page)) == 2 and texts(page)[0] == "second"
        actions(page, 0).get_by_role("button", name="Previous version").click()
        assert texts(page) == before

    def test_another_answer_is_a_version_of_the_first(self, page: Any):
        ask(page, "again")
        wait_for_answer(page)
        actions(page, 1).get_by_role("button", name="Again").click()
        page.get_by_text("2 / 2").wait_for()
        wait_for_answer(page)
        actions(page, 1).get_by_role("button", name="Previous version").click()
        assert page.get_by_text("1 / 2").is_visible()

    def test_stop_ends_the_request_in_the_server(self, page: Any, scripted: RunningServer):
        limit(page, 900)
        aborted = scripted.stats()["num_aborted"]
        ask(page, "go on and on")
        scripted.wait_for_stats(num_running=1)
        page.get_by_role("button", name="Stop").click()
        scripted.wait_for_stats(num_running=0, num_aborted=aborted + 1)
        page.get_by_text("Stopped.").wait_for()
        assert 0 < len(texts(page)[1]) < 900
        assert page.get_by_role("button", name="Send").is_visible()

    def test_a_conversation_goes_through_a_file(self, page: Any, tmp_path: Path):
        ask(page, "export me")
        wait_for_answer(page)
        shown = texts(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export", exact=True).click()
        path = tmp_path / "conversation.json"
        download.value.save_as(path)
        page.get_by_role("button", name="Delete export me").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_text("Ask fake something.").wait_for()
        page.locator(".sidebar input").set_input_files(path)
        page.locator(".turn").first.wait_for()
        assert texts(page) == shown

    def test_a_failure_is_told_in_the_words_of_the_server(self, page: Any):
        page.get_by_label("Temperature").fill("-1")
        ask(page, "too cold")
        page.locator(".turn").get_by_text("temperature must be").wait_for()


class TestTokens:
    def test_the_keyboard_goes_through_tokens_and_their_alternatives(self, page: Any):
        page.get_by_label("Colour tokens").check()
        ask(page, "score")
        page.locator(".token").first.focus()
        for step in range(3):
            assert page.locator(".token").nth(step).evaluate("node => node === document.activeElement")
            assert page.locator(".alternatives .taken").is_visible()
            page.keyboard.press("ArrowRight")


class TestTools:
    def test_a_call_is_shown_and_its_result_is_sent(self, page: Any):
        sent: list[dict] = []

        def answer(route: Any) -> None:
            """Says what a model with tools says; the models of the tests have none."""
            sent.append(json.loads(route.request.post_data))
            delta = {"content": "It is mild."} if len(sent) > 1 else {"tool_calls": [CALL]}
            event = {
                "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}],
                "usage": None,
            }
            route.fulfill(body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

        page.route("**/v1/chat/completions", answer)
        ask(page, "What is the weather in Oslo?")
        page.get_by_text('weather({"city": "Oslo"})').wait_for()
        page.get_by_label("Result of weather").fill("12 degrees")
        page.get_by_role("button", name="Send the results").click()
        page.get_by_text("It is mild.", exact=True).wait_for()
        call = {"id": "call_1", "type": "function", "function": CALL["function"]}
        assert sent[1]["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ]


class TestKeys:
    def test_the_key_is_asked_for_and_a_wrong_one_refused(self, opened: Opener, keyed: RunningServer):
        tab = opened(keyed, "/models/chat")  # without the slash at its end
        page = tab.page
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("The server refused this key.").wait_for()
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use this key").click()
        page.locator(".state").get_by_text("fake").wait_for()
        limit(page, 20)
        ask(page, "let me in")
        wait_for_answer(page)
        assert tab.refused == [401, 401]
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, location.href, document.cookie])")
        assert "secret" not in kept
        actions(page, 1).get_by_role("button", name="Code").click()
        assert "$JSG_API_KEY" in page.locator("dialog pre").inner_text()

    def test_without_a_key_the_page_says_so_and_can_be_asked_again(self, opened: Opener, keyed: RunningServer):
        page = opened(keyed).page
        page.get_by_label("API key").wait_for()
        page.keyboard.press("Escape")
        page.locator(".state").get_by_role("button", name="Give a key").click()
        page.get_by_label("API key").wait_for()


class TestHostileText:
    def check_inert(self, page: Any) -> None:
        assert page.evaluate("window.broken") is None
        assert page.locator("main b, main script, main img[src='x'], dialog b").count() == 0

    def test_what_people_and_models_write(self, page: Any):
        limit(page, 200)
        page.get_by_label("Colour tokens").check()
        ask(page, HOSTILE)
        page.locator(".token").first.hover()
        assert HOSTILE in texts(page)[0]
        assert "<script>" in page.locator(".tokens").inner_text()
        actions(page, 1).get_by_role("button", name="Code").click()
        self.check_inert(page)

    def test_an_error_about_a_grammar(self, page: Any):
        page.get_by_label("Answers are").select_option("JSON Schema")
        page.get_by_label("Grammar").fill(json.dumps({"type": HOSTILE}))
        page.locator(".result.bad").get_by_text("type").wait_for()
        self.check_inert(page)

    def test_the_name_of_a_file_and_a_conversation_from_a_file(self, page: Any, tmp_path: Path):
        picture = {"url": "https://example.com/x.png", "name": HOSTILE}
        nodes = {
            "root": {"children": ["a"], "chosen": "a"},
            "a": {"role": "user", "text": HOSTILE, "images": [picture], "children": ["b", "a"], "chosen": "b"},
            "b": {"role": "assistant", "text": HOSTILE, "calls": [{"name": HOSTILE}], "children": []},
        }
        path = tmp_path / "hostile.json"
        path.write_text(json.dumps({"title": HOSTILE, "nodes": nodes, "settings": {"system": 5}}))
        page.locator(".sidebar input").set_input_files(path)
        page.locator(".turn").nth(1).wait_for()
        assert HOSTILE in page.locator(".conversations").inner_text()
        drop(page, f"{HOSTILE}.png", PIXEL)
        page.get_by_text("reads text only").wait_for()
        self.check_inert(page)
