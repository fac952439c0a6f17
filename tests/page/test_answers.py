"""What the chat makes of an answer: Markdown, what a reload or a failure leaves, what the server says of it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.conftest import Opener
from tests.page.steps import TURNS, actions, ask, texts, wait_for_answer
from tests.server.running import RunningServer

pytestmark = pytest.mark.slow

ANSWER = """# A *title*

Some **bold** and `code <b>`, snake_case_name, 2 * 3 * 4, <b>text</b>,
[a page](https://example.com/a_(b)), [no page](javascript:alert(1)) and ![a picture](https://example.com/x.png).

- one
  1. within
- two

> said

| a | b |
|---|--:|
| `x` | 1 |

```python
print("<i>")
```
"""
SHOWN = """
(element) => [...element.children].map(function tree(node) {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    return [node.tagName.toLowerCase(), ...[...node.childNodes].map(tree)];
})
"""


@pytest.fixture
def page(opened: Opener, scripted: RunningServer) -> Iterator[Any]:
    scripted.reset()
    page = opened(scripted).page
    page.locator(".dot.ok").wait_for()
    return page


def answer_with(page: Any, *texts: str, sent: list[dict] | None = None, status: int = 200) -> None:
    """Answers the next requests with these texts, as a server does, and gathers their bodies."""
    left = list(texts)

    def answer(route: Any) -> None:
        if sent is not None:
            sent.append(json.loads(route.request.post_data))
        choice = {"index": 0, "delta": {"content": left.pop(0)}, "logprobs": None, "finish_reason": "stop"}
        if status != 200:
            route.fulfill(status=status, json={"error": {"message": choice["delta"]["content"]}})
            return
        events = f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\ndata: [DONE]\n\n"
        route.fulfill(body=events, content_type="text/event-stream")

    page.unroute_all()
    page.route("**/v1/chat/completions", answer)


def kept_in_browser(page: Any) -> list[dict]:
    """The answers of the newest conversation that would be there after a reload."""
    return page.evaluate(
        """async () => {
            const { allConversations } = await import("/page/store.js");
            const nodes = Object.values((await allConversations())[0]?.nodes ?? {});
            return nodes.filter((node) => node.role === "assistant");
        }"""
    )


class TestMarkdown:
    def test_elements_of_markdown_and_text_that_stays_text(self, page: Any):
        answer_with(page, ANSWER)
        ask(page, "# no title")
        page.locator(".prose pre").wait_for()
        shown = page.locator(".prose").evaluate(SHOWN)
        copy = ["div", ["span", "python"], ["button", "Copy"]]
        assert shown == [
            ["h3", "A ", ["em", "title"]],
            [
                *("p", "Some ", ["strong", "bold"], " and ", ["code", "code <b>"]),
                ", snake_case_name, 2 * 3 * 4, <b>text</b>,\n",
                *(["a", "a page"], ", [no page](javascript:alert(1)) and ", ["a", "a picture"], "."),
            ],
            ["ul", ["li", "one", ["ol", ["li", "within"]]], ["li", "two"]],
            ["blockquote", ["p", "said"]],
            [
                "div",
                [
                    "table",
                    ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                    ["tbody", ["tr", ["td", ["code", "x"]], ["td", "1"]]],
                ],
            ],
            ["div", copy, ["pre", 'print("<i>")']],
        ]
        assert texts(page)[0] == "# no title"
        link = page.locator(".prose a").first
        assert link.get_attribute("href") == "https://example.com/a_(b)" and "noopener" in link.get_attribute("rel")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy the code").click()
        page.get_by_role("button", name="Copy the code").get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == 'print("<i>")'

    def test_blocks_that_have_not_changed_stay_while_an_answer_grows(self, page: Any):
        kept = page.evaluate(
            """async (text) => {
                const { showMarkdown } = await import("/page/markdown.js");
                const element = document.createElement("div");
                let before = [], kept = 0;
                for (let length = 0; length <= text.length; length += 1) {
                    showMarkdown(element, text.slice(0, length));
                    const now = [...element.children];
                    if (now.slice(0, before.length - 1).every((node, index) => node === before[index])) kept += 1;
                    before = now;
                }
                const whole = document.createElement("div");
                showMarkdown(whole, text);
                return [kept, text.length + 1, whole.isEqualNode(element)];
            }""",
            ANSWER,
        )
        assert kept[0] >= 0.97 * kept[1] and kept[2]

    def test_any_text_is_read_to_its_end(self, page: Any):
        """Every cut of hostile marks leaves all letters in the order in which they came."""
        marks = [
            "*",
            "**",
            "_",
            "`",
            "``",
            "[",
            "](http://a)",
            "|",
            "\n",
            "\n- ",
            "\n> ",
            "~~",
            "<",
            "# ",
            "```\n",
            "  ",
        ]
        lost = page.evaluate(
            """async (marks) => {
                const { showMarkdown } = await import("/page/markdown.js");
                let seed = 1;
                const next = (below) => (seed = (seed * 48271) % 2147483647) % below;
                const lost = [];
                for (let round = 0; round < 3000; round += 1) {
                    let text = "";
                    for (let part = 0; part < 12; part += 1) text += marks[next(marks.length)] + "xyz"[part % 3] + part;
                    const element = document.createElement("div");
                    showMarkdown(element, text);
                    const letters = (from) => from.replaceAll(/[^xyz0-9]/g, "");
                    const shown = letters(element.textContent);
                    const wanted = letters(text.replaceAll("](http://a)", "]"));
                    if (shown !== wanted) lost.push([text, shown]);
                }
                return lost;
            }""",
            marks,
        )
        assert [case for case in lost if "```" not in case[0]] == []


class TestReload:
    def test_an_answer_under_way_survives_and_is_marked(self, page: Any, scripted: RunningServer):
        page.get_by_label("Max tokens").fill("900")
        ask(page, "go on and on")
        scripted.wait_for_stats(num_running=1)
        while not (kept_in_browser(page)[0]["text"]):
            page.wait_for_timeout(50)
        before = texts(page)[1]
        page.reload()
        page.get_by_text("Interrupted").wait_for()
        kept = texts(page)[1]
        assert kept and (kept.startswith(before) or before.startswith(kept))
        actions(page, 1).get_by_role("button", name="Again").click()
        page.get_by_text("2 / 2").wait_for()

    def test_an_answer_of_which_nothing_came_is_no_turn(self, page: Any):
        page.route("**/v1/chat/completions", lambda _route: None)  # no answer comes
        ask(page, "hello?")
        while not kept_in_browser(page):
            page.wait_for_timeout(50)
        page.reload()
        page.get_by_role("button", name="Ask again").wait_for()
        assert texts(page) == ["hello?"]


class TestFailures:
    def test_a_failed_send_is_no_turn_of_the_model(self, page: Any):
        answer_with(page, "the queue is full", status=503)
        ask(page, "first try")
        page.locator(".turn.user").get_by_text("the queue is full").wait_for()
        assert page.locator(TURNS).count() == 1
        sent: list[dict] = []
        answer_with(page, "Yes.", "Indeed.", sent=sent)
        page.get_by_role("button", name="Ask again").click()
        page.get_by_text("Yes.", exact=True).wait_for()
        assert page.get_by_text("the queue is full").count() == 0
        ask(page, "really?")
        page.get_by_text("Indeed.", exact=True).wait_for()
        assert [message["content"] for message in sent[1]["messages"]] == ["first try", "Yes.", "really?"]

    def test_the_next_message_takes_the_place_of_one_without_an_answer(self, page: Any):
        answer_with(page, "no", status=400)
        ask(page, "wrong")
        page.locator(".turn.user").get_by_text("no", exact=True).wait_for()
        sent: list[dict] = []
        answer_with(page, "Yes.", sent=sent)
        ask(page, "right")
        page.get_by_text("Yes.", exact=True).wait_for()
        assert [message["content"] for message in sent[0]["messages"]] == ["right"]
        assert page.get_by_text("2 / 2").is_visible()


class TestWhatTheServerSays:
    def test_warnings_are_shown_and_placeholders_have_the_numbers(self, page: Any):
        assert page.get_by_label("Temperature").get_attribute("placeholder") == "1"
        assert page.get_by_label("Top k").get_attribute("placeholder") == "-1"
        assert page.get_by_label("Max tokens").get_attribute("placeholder").startswith("up to ")
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Thinking", exact=True).select_option("On")
        ask(page, "think")
        page.locator(".warned").get_by_text("enable_thinking has no effect").wait_for()

    def test_the_token_that_ends_an_answer_is_not_shown(self, page: Any):
        def answer(route: Any) -> None:
            scores = [
                {"token": token, "logprob": -0.1, "top_logprobs": [{"token": token, "logprob": -0.1}]}
                for token in ("Yes", ".", "<|end|>")
            ]
            choice = {
                "index": 0,
                "delta": {"content": "Yes."},
                "logprobs": {"content": scores},
                "finish_reason": "stop",
            }
            event = {"choices": [{**choice, "matched_stop": 2}], "usage": None}
            route.fulfill(body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

        page.route("**/v1/chat/completions", answer)
        ask(page, "ok?")
        page.locator(".token").first.wait_for()
        assert page.locator(".token").all_inner_texts() == ["Yes", "."]


class TestNavigation:
    def test_back_and_the_address_choose_the_view(self, page: Any, scripted: RunningServer):
        def chosen(name: str) -> None:
            page.get_by_role("tab", name=name, selected=True).wait_for()

        page.get_by_role("tab", name="Cache").click()
        page.get_by_role("tab", name="Programs").click()
        page.go_back()
        chosen("Cache")
        page.go_back()
        chosen("Chat")
        page.go_forward()
        chosen("Cache")
        page.evaluate("location.hash = '#programs'")
        chosen("Programs")
        page.goto(f"{scripted.http.base_url}/#engine")
        page.reload()
        chosen("Engine")

    def test_a_new_conversation_is_in_the_list_at_once_and_the_box_has_the_focus(self, page: Any):
        names = page.locator(".conversations li")
        assert names.all_inner_texts()[0].startswith("New conversation")
        page.get_by_label("Max tokens").fill("3")
        ask(page, "one")
        wait_for_answer(page)
        for _ in range(2):
            page.get_by_role("button", name="New conversation", exact=True).first.click()
        listed = [text.splitlines()[0] for text in names.all_inner_texts()]
        assert listed == ["New conversation", "one"]
        assert page.evaluate("document.activeElement.placeholder") == "Write a message"
