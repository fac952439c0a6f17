"""Thoughts in the chat, in a browser, of a checkpoint that thinks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.thinking_model import THOUGHT, write_model
from tests.page.conftest import Opener
from tests.page.steps import ask, problems, wait_for_answer
from tests.server.running import RunningServer, serving

pytestmark = pytest.mark.slow

COMPILE_S = 600  # where no earlier run has left the compiled programs
NUM_TOKENS = len(THOUGHT.encode())
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: <think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
HOLD = """
const ask = window.fetch;
const released = new Promise((resolve) => { window.release = resolve; });
let rest = "";
const hold = async (text, out) => {
    const events = (rest + text).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
        if (/"content": ?"[^"]/.test(event)) await released;
        out.enqueue(`${event}\\n\\n`);
    }
};
window.fetch = async (...asked) => {
    const response = await ask(...asked);
    if (!response.headers.get("content-type").startsWith("text/event-stream")) return response;
    const texts = response.body.pipeThrough(new TextDecoderStream());
    const held = texts.pipeThrough(new TransformStream({ transform: hold }));
    return new Response(held.pipeThrough(new TextEncoderStream()), response);
};
"""
"""Holds the answer back, from its first character on, until `release` is called."""
FORGET = """async () => {
    const done = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
    const database = await done(indexedDB.open("jsg", 1));
    const store = () => database.transaction("conversations", "readwrite").objectStore("conversations");
    for (const conversation of await done(store().getAll())) {
        for (const name of ["thinking", "thinking_budget"]) delete conversation.settings[name];
        await done(store().put(conversation));
    }
    database.close();
}"""
"""Makes the kept conversations those of a page that knew nothing of thoughts."""


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[RunningServer]:
    directory = write_model(tmp_path_factory.mktemp("thinking"), "special", TEMPLATE)
    with serving(directory, compile_cache_dir, "--served-model-name", "thinker") as made:
        warm = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        made.http.post("/v1/chat/completions", json=warm, timeout=COMPILE_S).raise_for_status()
        yield made


@pytest.fixture
def page(opened: Opener, thinking: RunningServer) -> Any:
    """With answers of a word that the grammar leaves no choice, and a digit."""
    page = opened(thinking).page
    page.get_by_text("Ask thinker something.").wait_for()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("100")
    page.get_by_label("Answers are").select_option("Regular expression")
    page.get_by_label("Grammar").fill("so [0-9]")
    page.locator(".result.good").wait_for()
    return page


def sent_with(page: Any, text: str) -> dict[str, Any]:
    """The body of the request in which a message is sent."""
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, text)
    return asked.value.post_data_json


def shown_thoughts(page: Any) -> list[str]:
    return page.locator(".thoughts:not([hidden]) .thought").all_text_contents()


def test_thoughts_stand_above_the_answer_and_are_sent_back(page: Any, axe: str, tmp_path: Path):
    page.evaluate(HOLD)
    ask(page, "hi")
    block = page.locator(".turn.assistant .thoughts")
    block.get_by_text(THOUGHT, exact=True).wait_for()  # it is open
    summary = block.locator("summary")
    assert summary.inner_text() == "Thinking"
    assert page.locator(".turn.assistant .text").count() == 0
    assert problems(page, axe) == []
    summary.focus()  # where it stays
    page.evaluate("release()")
    answer = wait_for_answer(page)
    assert answer[:3] == "so " and answer[3:].isdigit()
    assert block.evaluate("block => [block.open, block.nextElementSibling.innerText]") == [False, answer]
    assert summary.inner_text() == f"Thoughts, {NUM_TOKENS} tokens"
    page.keyboard.press("Enter")
    block.get_by_text(THOUGHT, exact=True).wait_for()
    page.emulate_media(color_scheme="dark")
    assert problems(page, axe) == []

    said = {"role": "assistant", "content": answer, "reasoning_content": THOUGHT}
    assert sent_with(page, "and now")["messages"][1] == said
    wait_for_answer(page, 2)
    assert page.locator(".thoughts").evaluate_all("blocks => blocks.map((block) => block.open)") == [True, False]
    page.reload()
    page.locator(".turn").nth(3).wait_for()
    assert shown_thoughts(page) == [THOUGHT, THOUGHT]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    page.get_by_role("button", name="New conversation").click()
    page.locator(".sidebar input").set_input_files(path)
    page.locator(".turn").nth(3).wait_for()
    assert shown_thoughts(page) == [THOUGHT, THOUGHT]


def test_the_settings_say_whether_and_how_long_it_thinks(page: Any):
    page.get_by_label("Thinking", exact=True).select_option("On")
    page.get_by_label("Thinking budget").fill("7")
    page.get_by_label("Colour tokens").check()
    body = sent_with(page, "hi")
    assert (body["enable_thinking"], body["thinking_budget"]) == (True, 7)
    page.locator("summary").get_by_text("Thoughts, 7 tokens").wait_for()
    assert shown_thoughts(page) == [THOUGHT[:7]]
    tokens = page.locator(".token").all_text_contents()
    assert "".join(tokens[:3]) == "so " and tokens[3].isdigit()  # the tokens are those of the answer
    forced = page.locator(".token").evaluate_all("tokens => tokens.map((token) => token.matches('.forced'))")
    assert forced[:4] == [True, True, True, False]

    page.get_by_label("Thinking", exact=True).select_option("Off")
    page.get_by_label("Thinking budget").fill("")
    assert sent_with(page, "again")["enable_thinking"] is False
    page.locator(".turn.assistant .facts").nth(1).wait_for()
    assert shown_thoughts(page) == [THOUGHT[:7]]

    page.evaluate(FORGET)
    page.reload()
    page.locator(".turn").first.wait_for()
    assert page.get_by_label("Thinking", exact=True).input_value() == ""
    assert not {"enable_thinking", "thinking_budget"} & sent_with(page, "as an old page").keys()
    page.locator(".turn.assistant .facts").nth(2).wait_for()
    assert shown_thoughts(page)[1:] == [THOUGHT]
