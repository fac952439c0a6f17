"""Takes the pictures of the page: `make screenshots`. It needs Debian's chromium."""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SIZE = {"width": 1200, "height": 760}
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
MAX_BYTES = 200_000
LOAD_MS = 20_000
TREE_MS = 4000
TREE = """async () => {
    const words = "my name is nina and I live in oslo my favourite colour is red I bought a lamp".split(" ");
    let state = 1;
    const next = (count) => (state = (state * 48271) % 2147483647) % count;  // the same picture each time
    const text = (count) => Array.from({ length: count }, () => words[next(words.length)]).join(" ");
    const documents = Array.from({ length: 4 }, () => text(60));
    for (let number = 0; number < 40; number += 1) {
        const prompt = `${documents[next(4)]} Question ${next(5)}: ${text(3 + next(24))}`;
        const body = { prompt, max_tokens: 8 + next(16), ignore_eos: true };
        const headers = { "Content-Type": "application/json" };
        await fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(body) });
    }
}"""
LOAD = """() => {
    const begin = async (number) => {
        const content = `Tell me about city number ${number % 7}, and all that is near it.`;
        const messages = [{ role: "user", content }];
        const body = { messages, max_tokens: 100 + 20 * (number % 9), ignore_eos: true };
        const headers = { "Content-Type": "application/json" };
        await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body) });
        setTimeout(() => begin(number + 3), 200 * (number % 8));
    };
    for (const number of [1, 2, 3, 4, 5, 6]) begin(number);
}"""


@contextmanager
def server() -> Iterator[str]:
    """The address of `jsg serve` with the embedded model."""
    command = [sys.executable, "-m", "jsg.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.split(" ready at ")[1].split()[0] for line in process.stdout if " ready at " in line)
        finally:
            process.terminate()


def chat(page: Any) -> None:
    page.get_by_label("System prompt").fill("You are a helpful assistant.")
    for question in ("What is the capital of France?", "What is the capital of Peru?"):
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        page.locator(".state, .facts").last.wait_for()
        page.get_by_role("button", name="Send").wait_for()
        page.get_by_label("Colour tokens").check()
    page.get_by_label("Answers are").select_option("JSON Schema")
    page.get_by_label("Grammar").fill(SCHEMA)
    page.locator(".result.good").wait_for()
    page.get_by_role("button", name="Again").last.click()
    page.get_by_text("2 / 2").wait_for()
    page.locator(".token").nth(4).hover()


def cache(page: Any) -> None:
    page.get_by_role("tab", name="Cache").click()
    page.evaluate(TREE)
    page.wait_for_timeout(TREE_MS)
    page.get_by_role("group", name="Radix tree").press("ArrowRight")
    page.get_by_role("group", name="Radix tree").press("ArrowRight")


def programs(page: Any) -> None:
    page.get_by_role("tab", name="Programs").click()
    page.get_by_role("button", name="Run").click()
    page.locator(".view-programs").get_by_text("done: 5 calls").wait_for()


def engine(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    page.get_by_role("tab", name="Engine").click()
    page.evaluate(LOAD)
    page.wait_for_timeout(LOAD_MS)


def main() -> None:
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.get_by_text("Ask tiny something.").wait_for()
        chat(page)
        shoot(page, "page-chat.png")
        cache(page)
        shoot(page, "page-cache.png")
        programs(page)
        shoot(page, "page-programs.png")
        engine(page)
        shoot(page, "page-engine.png")
        browser.close()


def shoot(page: Any, name: str) -> None:
    path = DOCS / name
    page.screenshot(path=path)
    assert path.stat().st_size <= MAX_BYTES, f"{name} is too large"


if __name__ == "__main__":
    main()
