"""What people do on the page, as steps of tests."""

from typing import Any

TURNS = ".turns > .turn"


def ask(page: Any, text: str) -> None:
    """Writes a message and sends it with Enter."""
    box = page.get_by_label("Message")
    box.fill(text)
    box.press("Enter")


def wait_for_answer(page: Any, number: int = 1) -> str:
    """Waits until so many answers are shown with their facts; the text of the last one."""
    page.locator(".turn.assistant .facts").nth(number - 1).wait_for()
    return page.locator(".turn.assistant .text").last.inner_text()


def texts(page: Any) -> list[str]:
    """The texts of the shown turns."""
    return page.locator(f"{TURNS} .text").all_inner_texts()


def actions(page: Any, number: int) -> Any:
    """The buttons of a turn, counted from 0."""
    return page.locator(TURNS).nth(number).locator(".actions")


def problems(page: Any, axe: str) -> list[str]:
    """What axe-core finds."""
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


def drop(page: Any, name: str, base64: str) -> None:
    """Drops a picture on the page, as from a file manager."""
    page.evaluate(
        """([name, base64]) => {
            const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], name, { type: "image/png" }));
            document.querySelector("main").dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
        }""",
        [name, base64],
    )
