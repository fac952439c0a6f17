"""The web page as a set of files: who gets it, with which headers, and what its code must not contain.

`tests/page` tries it in a browser.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterator

import httpx
import pytest

from jsg.config import ServerConfig
from jsg.errors import ConfigError
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.page.routes import STATIC, page_files
from tests.server.running import ROOT
from tests.server.threads import ServerMaker

MAX_PAGE_BYTES = 165_000
MAX_MODULE_LINES = 300
SOURCES = {path.name: path.read_text() for path in sorted(STATIC.iterdir())}
LINK = re.compile(r"""(?:href|src)="([^"]*)"|(?:from|import) "([^"]*)\"""")
READS_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc|\beval\b"
    r"|new Function|javascript:"
)


@pytest.fixture(scope="module")
def guarded(make_server: ServerMaker) -> Iterator[httpx.Client]:
    with make_server(server={"api_key": ("secret",), "root_path": "/models/chat"}) as server:
        yield server.http


class TestServing:
    def test_every_file_comes_with_its_type_and_a_strict_policy(self, http: httpx.Client):
        for path, file in page_files().items():
            response = http.get(path)
            assert response.status_code == 200 and response.content == file.content
            assert response.headers["content-type"] == file.media_type
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert "set-cookie" not in response.headers
            policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["object-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in response.headers["content-security-policy"]

    def test_a_browser_that_has_a_file_does_not_get_it_again(self, http: httpx.Client):
        first = http.get("/page/main.js")
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = http.get("/page/main.js", headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert http.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200

    def test_only_files_of_the_page_are_served(self, http: httpx.Client):
        for path in "/page /page/ /page/none.js /page/routes.py /page/%2e%2e/routes.py /page/index.html".split():
            assert http.get(path).status_code == 404, path
        assert http.post("/", json={}).status_code == 405
        head = http.head("/")
        assert (head.status_code, head.content) == (200, b"")

    def test_it_needs_no_key_but_what_it_calls_does(self, guarded: httpx.Client):
        assert all(guarded.get(path).status_code == 200 for path in page_files())
        assert guarded.get("/v1/models").status_code == 401 and guarded.post("/").status_code == 405

    def test_it_can_be_left_out(self):
        def paths(**options: bool) -> set[str]:
            return {
                route.path
                for route in create_app(FrontDoor(), ServerConfig(**options)).routes
                if hasattr(route, "path")
            }

        assert set(page_files()) <= paths() and not set(page_files()) & paths(no_page=True)


class TestRootPath:
    def test_a_proxy_may_keep_the_prefix_or_take_it_off(self, guarded: httpx.Client):
        page = page_files()["/"].content
        assert guarded.get("/models/chat/").content == guarded.get("/").content == page
        assert guarded.get("/models/chat/page/main.js").status_code == 200
        assert guarded.get("/models/chat/v1/models").status_code == 401  # the key is checked behind the prefix
        key = {"Authorization": "Bearer secret"}
        assert guarded.get("/models/chat/v1/models", headers=key).status_code == 200
        assert guarded.get("/models/chatter", headers=key).status_code == 404
        assert guarded.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/models/chat"}]

    def test_a_prefix_without_its_slash_is_sent_to_where_relative_links_work(self, guarded: httpx.Client):
        response = guarded.get("/models/chat")
        assert (response.status_code, response.headers["location"]) == (307, "chat/")

    @pytest.mark.parametrize("prefix", ["models", "/a//b", "/a/../b", "https://x", "/a b", "/ä"])
    def test_what_is_no_path_is_refused(self, prefix: str):
        with pytest.raises(ConfigError, match="--root-path"):
            create_app(FrontDoor(), ServerConfig(root_path=prefix))

    @pytest.mark.parametrize("prefix", ["/v1", "/v1/models", "/page", "/debug/"])
    def test_a_prefix_with_paths_of_the_server_is_refused(self, prefix: str):
        with pytest.raises(ConfigError, match="paths of its own"):
            create_app(FrontDoor(), ServerConfig(root_path=prefix))


class TestFiles:
    def test_no_text_is_ever_read_as_html(self):
        for name, source in SOURCES.items():
            assert READS_HTML.search(source) is None, name

    def test_all_links_are_relative_and_lead_to_files_of_the_page(self):
        for name, source in SOURCES.items():
            for link in (link or module for link, module in LINK.findall(source)):
                target = link.removeprefix("page/") if name == "index.html" else link.removeprefix("./")
                assert link.startswith("#") or f"/page/{target}" in page_files(), f"{name}: {link}"

    def test_nothing_is_inline_that_the_policy_forbids(self):
        for name in ("index.html", "icon.svg"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", SOURCES[name]), name
        for name, source in SOURCES.items():
            assert not re.search(r"""[{,] style: |setAttribute\("style"|: url\(|@import""", source), name

    def test_the_page_is_small(self):
        assert sum(len(file.content) for file in page_files().values()) <= MAX_PAGE_BYTES
        for name, source in SOURCES.items():
            assert source.count("\n") <= MAX_MODULE_LINES, name

    def test_every_file_goes_into_the_wheel(self):
        """It takes the whole package, without what git ignores."""
        wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel == {"packages": ["jsg"]}
        if not (ROOT / ".git").exists():
            pytest.skip("needs a checkout")
        ignored = subprocess.run(
            ["git", "check-ignore", "--no-index", *STATIC.iterdir()], cwd=ROOT, capture_output=True
        )
        assert (ignored.returncode, ignored.stdout) == (1, b"")
