"""A browser, the servers whose page it opens, and a watch on what the page must not do."""

import dataclasses
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import pytest

from tests.server.conftest import make_server, tokenizer_dir
from tests.server.running import RunningServer, running
from tests.server.threads import ServerMaker

__all__ = ["make_server", "tokenizer_dir"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE_MS = 60_000  # a busy machine is no failure
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
REFUSED = re.compile(r"Failed to load resource: .* status of (\d+)")


@final
@dataclasses.dataclass
class Opened:
    """A page in a browser context of its own, and what it did.

    Attributes:
        page: Playwright's page.
        refused: The statuses of failures that the browser noted in its console.
        faults: Errors of the page, and requests to other servers.
    """

    page: Any
    refused: list[int] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    def watch(self, origin: str) -> None:
        """Notes every fault from now on."""
        self.page.add_init_script(WATCH)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self._on_request(request.url, origin))

    def check(self) -> None:
        """Shows that the page did nothing that it must not do."""
        assert self.faults == [] and self.page.evaluate("violations") == []
        assert self.page.context.cookies() == []

    def _on_console(self, message: Any) -> None:
        if status := REFUSED.match(message.text):
            self.refused.append(int(status[1]))
        elif message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _on_request(self, url: str, origin: str) -> None:
        if not url.startswith((origin, "data:", "blob:")):
            self.faults.append(f"asked {url}")


Opener = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or Chrome, without a window.

    It ends with each file of tests, because Playwright's event loop counts as running in this thread until then, and
    programs of the language refuse to wait where one runs.
    """
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opener]:
    """Opens the page of a server. At the end no page has had an error, broken the policy, or asked another server."""
    made: list[Opened] = []

    def open_page(server: RunningServer, path: str = "/", **context: Any) -> Opened:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(DEADLINE_MS)
        one = Opened(page)
        made.append(one)
        one.watch(str(server.http.base_url))
        page.goto(f"{server.http.base_url}{path}")
        return one

    yield open_page
    for one in made:
        one.check()
        one.page.context.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what keeps people out."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package axe-playwright-python")
    return (Path(spec.origin).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def scripted(make_server: ServerMaker) -> Iterator[RunningServer]:
    """A server whose model repeats its prompt, token by token."""
    with make_server() as server:
        yield server


@pytest.fixture(scope="module")
def keyed(make_server: ServerMaker) -> Iterator[RunningServer]:
    """One that asks for a key, and that is shown below a path."""
    with make_server(server={"api_key": ("secret",), "root_path": "/models/chat"}) as server:
        yield server


@pytest.fixture(scope="module")
def seeing(compile_cache_dir: str) -> Iterator[RunningServer]:
    """`jsg serve tiny-vision`, which compiles each program when it is first needed."""
    options = ("--max-running-requests", "4", "--chunked-prefill-size", "64", "--max-total-tokens", "4096")
    command = [
        "-m",
        "tests.lang.late_server",
        "serve",
        "tiny-vision",
        "--port",
        "0",
        "--compilation-cache-dir",
        compile_cache_dir,
    ]
    with running([*command, *options]) as made:
        yield made
