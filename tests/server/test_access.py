"""Who may come in: keys, the admin, and web pages."""

import dataclasses
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jsg.config import EngineConfig, ServerConfig
from jsg.errors import ConfigError
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.http.access import PROBES, KeyRing
from jsg.server.http.origins import checked_origins, is_loopback
from jsg.server.page.routes import page_files
from tests.server.battery import interface
from tests.server.running import LONG, RunningServer
from tests.server.threads import ServerMaker

USER, OTHER, ADMIN = "user-key-1", "user-key-2", "admin-key"
PAGE = "https://chat.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
MESSAGE = "a request must carry a key, but this one has none or a wrong one; send 'Authorization: Bearer KEY'"
REFUSED = {"error": {"message": MESSAGE}, "object": "error", "message": MESSAGE, "code": 401}


@pytest.fixture(scope="module")
def guarded(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# who may come in\n\n  {OTHER}  \n")
    keys.chmod(0o600)
    with make_server(
        server={
            "api_key": (USER,),
            "api_key_file": str(keys),
            "admin_api_key": ADMIN,
            "cors_allow_origin": (PAGE,),
        }
    ) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def raw_status(server: RunningServer, target: str, method: str = "GET", extra: str = "") -> int:
    """The status of a request whose target no client library has tidied."""
    url = server.http.base_url
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{extra}\r\n".encode()
        )
        return int(connection.makefile("rb").readline().split()[1])


class TestKeyRing:
    def ring(self, *keys: str, admin: str | None = None) -> KeyRing:
        return KeyRing.of(ServerConfig(api_key=keys, admin_api_key=admin))

    def admits(self, ring: KeyRing, key: str | None) -> bool | None:
        """Whether the caller of the key is an admin; None when it may not come in."""
        caller = ring.caller(None if key is None else key.encode())
        return None if caller is None else caller.is_admin

    def test_who_may_come_in_and_who_is_the_admin(self):
        """Of several users none is; with an admin's key alone everybody may come in."""
        for keys, admin, expected in (
            ((), None, {None: True, "anything": True}),
            (("a",), None, {"a": True, "b": None, "": None, None: None}),
            (("a", "b"), None, {"a": False, "b": False, "ab": None, None: None}),
            (("a",), "z", {"a": False, "z": True, "b": None, None: None}),
            ((), "z", {"z": True, "b": False, None: False}),
        ):
            ring = self.ring(*keys, admin=admin)
            assert {key: self.admits(ring, key) for key in expected} == expected, (keys, admin)

    def test_tenants_are_apart_and_say_nothing_of_their_keys(self):
        ring = self.ring("sekrit-a", "sekrit-b", admin="sekrit-z")
        callers = [ring.caller(key) for key in (b"sekrit-a", b"sekrit-b", b"sekrit-z")]
        tenants = {caller.tenant for caller in callers if caller is not None}
        assert len(tenants) == 3 and "" not in tenants
        assert not any("sekrit" in tenant for tenant in tenants)

    def test_all_keys_are_compared_and_all_at_one_length(self, monkeypatch):
        compared: list[tuple[int, int]] = []
        monkeypatch.setattr(
            "hmac.compare_digest", lambda known, given: compared.append((len(known), len(given))) or known == given
        )
        ring = self.ring("a", "a-longer-key", admin="z" * 100)
        for key in (b"a", b"a-longer-key", b"wrong", b"", b"\xff" * 5000, None):
            compared.clear()
            ring.caller(key)
            assert compared == [(32, 32)] * 3

    @pytest.mark.parametrize("key", ["", " ", "with space", "line\nbreak", "ümlaut", "\x7f", "tab\t"])
    @pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
    def test_what_no_header_can_carry_is_no_key(self, name, key):
        with pytest.raises(ConfigError, match="printable ASCII") as caught:
            KeyRing.of(ServerConfig(**{name: key}))
        assert not key.strip() or key not in str(caught.value)

    @pytest.mark.parametrize("knobs", [{"api_key": ("k", "k")}, {"api_key": ("k", "l"), "admin_api_key": "l"}])
    def test_a_key_belongs_to_one(self, knobs):
        with pytest.raises(ConfigError, match="given once"):
            KeyRing.of(ServerConfig(**knobs))


class TestKeyFile:
    def of(self, path: Path, content: bytes, mode: int = 0o600) -> KeyRing:
        path.write_bytes(content)
        path.chmod(mode)
        return KeyRing.of(ServerConfig(api_key=("flag",), api_key_file=str(path)))

    def test_lines_are_keys_besides_those_of_the_flag(self, tmp_path):
        ring = self.of(tmp_path / "keys", b"#comment\r\none\r\n\n\ttwo \n# three", mode=0o644)
        callers = [ring.caller(key) for key in (b"flag", b"one", b"two", b"three", b"# three", b"")]
        assert [caller is not None for caller in callers] == [True, True, True, False, False, False]

    def test_the_log_has_the_names_of_keys(self, tmp_path):
        ring = self.of(tmp_path / "keys", b"alice: one\n two\nbob@home:\tthree\nca:rol\n")
        found = {key: ring.caller(key.encode()) for key in ("flag", "one", "two", "three", "ca:rol", "alice: one")}
        names = {key: caller.key for key, caller in found.items() if caller is not None}
        assert names == {"flag": "key-1", "one": "alice", "two": "key-3", "three": "bob@home", "ca:rol": "key-5"}

    @pytest.mark.parametrize(
        ("content", "mode", "said"),
        [
            (b"", 0o600, "at least one key"),
            (b"# none\n\n", 0o600, "at least one key"),
            (b"two words\n", 0o600, "printable ASCII"),
            (b"\xc3\xa4\n", 0o600, "printable ASCII"),
            (b"flag\n", 0o600, "given once"),
            (b"a" * (2**20 + 2), 0o600, "at most"),
            (b"one\n", 0o622, "chmod go-w"),
            (b"one\n", 0o660, "chmod go-w"),
        ],
    )
    def test_what_is_wrong_with_it_is_said(self, tmp_path, content, mode, said):
        with pytest.raises(ConfigError, match=said) as caught:
            self.of(tmp_path / "keys", content, mode)
        assert str(tmp_path) not in str(caught.value)

    def test_it_must_be_there(self, tmp_path):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ConfigError, match="--api-key-file must be a file"):
                KeyRing.of(ServerConfig(api_key_file=str(path)))

    def test_a_server_does_not_start_without_it(self, make_server: ServerMaker, tmp_path):
        with make_server(server={"api_key_file": str(tmp_path / "missing")}, wait=False) as server:
            error = server.join()
        assert isinstance(error, ConfigError) and "--api-key-file" in str(error)


def all_routes() -> list[tuple[str, str]]:
    """Method and path of everything the server answers, with a value for each parameter; not the web page."""
    pending, routes = list(create_app(FrontDoor(), ServerConfig()).routes), set()
    while pending:
        route: Any = pending.pop()
        if (router := getattr(route, "original_router", None)) is not None:  # of an included module
            pending += router.routes
        else:
            path = re.sub(r"[{}]|:path", "", route.path)
            routes |= {(method, path) for method in route.methods}
    return sorted(route for route in routes if route[1] not in page_files())


def test_events_of_the_cache_are_not_for_servers_of_several_users(tmp_path):
    where = {"kv_events_endpoint": "tcp://127.0.0.1:5557"}
    with pytest.raises(ConfigError, match="several users' keys"):
        create_app(FrontDoor(), ServerConfig(api_key=("a", "b"), **where))
    create_app(FrontDoor(), ServerConfig(api_key=("a",), admin_api_key="b", **where))


def test_a_single_user_has_the_namespace_of_all():
    """Routers find prefixes by their tokens alone."""
    caller = KeyRing(["a"], None).caller(b"a")
    assert caller is not None and caller.namespace() == ""
    assert KeyRing(["a", "b"], None).caller(b"a").namespace() != ""


class TestEveryRoute:
    def test_none_is_missing(self):
        described = interface()["paths"]
        shown = {(m.upper(), re.sub("[{}]", "", path)) for path, methods in described.items() for m in methods}
        wanted = {
            ("POST", "/generate"),
            ("GET", "/openapi.json"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/metrics"),
        }
        assert shown | wanted <= set(all_routes())

    @pytest.mark.parametrize(("method", "path"), all_routes())
    def test_it_needs_a_key_unless_it_is_a_probe(self, guarded: RunningServer, method, path):
        response = guarded.http.request(method, path, json={} if method == "POST" else None)
        if path in PROBES:
            assert response.status_code == 200
            return
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v1/messages"):
            assert response.json()["error"]["type"] == "authentication_error" if method != "HEAD" else True
        for key in (USER, OTHER, ADMIN):
            body = {} if method == "POST" else None
            with guarded.http.stream(method, path, headers=bearer(key), json=body) as response:  # one has no end
                assert response.status_code != 401

    @pytest.mark.parametrize(
        "target",
        [
            *"// /page /page/ /page/../generate /page/main.js/ //health /health/ /HEALTH /health// /./health".split(),
            *"/x/../health /health/../generate /health%2f /%2fhealth /health%00 /health;x /healthz /ready/x".split(),
            *"/nowhere /metrics /openapi.json /docs /redoc * /health%3fx".split(),
        ],
    )
    def test_nothing_that_looks_like_a_probe_is_one(self, guarded: RunningServer, target):
        for method in ("GET", "HEAD", "POST", "OPTIONS", "ODD"):
            assert raw_status(guarded, target, method) in (400, 401), method  # 400: what is no request at all

    @pytest.mark.parametrize("target", ["/health?x=/generate", "/%68ealth", "/ready", "http://localhost/health"])
    def test_the_probes_under_any_spelling_show_what_probes_show(self, guarded: RunningServer, target):
        assert raw_status(guarded, target) == 200 and raw_status(guarded, target, "POST") == 405


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Bearer {USER}x"},
            {"Authorization": f"Bearer {USER[:-1]}"},
            {"Authorization": USER},
            {"Authorization": f"Basic {USER}"},
            {"Authorization": "Bearer"},
            {"x-api-key": ""},
            {"x-api-key": f"Bearer {USER}"},
            {"x-api-key": OTHER, **bearer(USER)},  # whose request would it be?
            {"api-key": USER},
            {"Cookie": f"api_key={USER}"},
        ],
    )
    def test_what_does_not_open(self, guarded: RunningServer, headers):
        response = guarded.http.post("/generate", json={"text": "a"}, headers=headers)
        assert (response.status_code, response.json()) == (401, REFUSED)

    @pytest.mark.parametrize(
        "headers",
        [
            bearer(USER),
            bearer(OTHER),
            bearer(ADMIN),
            {"Authorization": f"bearer {USER}"},
            {"Authorization": f"BEARER   {USER}"},
            {"x-api-key": OTHER},
            {"X-Api-Key": USER, **bearer(USER)},
        ],
    )
    def test_what_opens(self, guarded: RunningServer, headers):
        assert guarded.http.post("/generate", json={"text": "a"}, headers=headers).status_code == 200

    def test_no_key_is_shown_anywhere(self, make_server: ServerMaker, capfd, caplog: pytest.LogCaptureFixture):
        caplog.set_level(logging.DEBUG)
        with make_server(server={"api_key": (USER, OTHER), "admin_api_key": ADMIN}) as server:
            told = [server.greeting]
            for path in ("/get_server_info", "/server_info", "/openapi.json", "/metrics", "/v1/models"):
                told.append(server.http.get(path, headers=bearer(ADMIN)).text)
        told += [*capfd.readouterr(), caplog.text]
        for key in (USER, OTHER, ADMIN):
            assert not any(key in text for text in told)
        assert "Authorization: Bearer YOUR_KEY" in server.greeting
        # Others on the machine read the command line of an engine, which is made of this record.
        assert not any("key" in field.name for field in dataclasses.fields(EngineConfig))

    def test_the_server_says_nothing_of_itself(self, guarded: RunningServer):
        for headers in ({}, bearer(USER)):
            assert "server" not in guarded.http.get("/health", headers=headers).headers


class TestAdmin:
    @pytest.mark.parametrize(("method", "path"), [("POST", "/flush_cache"), ("GET", "/debug/radix?text=true")])
    def test_what_touches_others_is_for_the_admin(self, guarded: RunningServer, method, path):
        for key in (USER, OTHER):
            response = guarded.http.request(method, path, headers=bearer(key))
            assert response.status_code == 403 and "--admin-api-key" in response.json()["error"]["message"]
        assert guarded.http.request(method, path, headers=bearer(ADMIN)).status_code == 200

    def test_all_of_a_user_are_only_his(self, guarded: RunningServer):
        everything = {"abort_all": True}
        with guarded.holding(1, bearer(USER)), guarded.holding(1, bearer(OTHER)):
            aborted = guarded.http.post("/abort_request", json=everything, headers=bearer(USER)).json()["aborted"]
            assert aborted == 1
            guarded.wait_for_stats(bearer(USER), num_running=1)
            assert guarded.http.post("/abort_request", json=everything, headers=bearer(ADMIN)).json()["aborted"] == 1
            guarded.wait_for_stats(bearer(USER), num_running=0)

    def test_without_an_admin_key_nobody_of_several_is(self, make_server: ServerMaker):
        with make_server(server={"api_key": (USER, OTHER)}) as server:
            assert server.http.post("/flush_cache", headers=bearer(USER)).status_code == 403

    def test_with_an_admin_key_alone_users_need_none(self, make_server: ServerMaker):
        with make_server(server={"admin_api_key": ADMIN}) as server:
            assert server.http.post("/generate", json={"text": "a"}).status_code == 200
            assert server.http.post("/flush_cache").status_code == 403
            assert server.http.post("/flush_cache", headers=bearer(ADMIN)).status_code == 200
            assert "YOUR_KEY" not in server.greeting


class TestOrigins:
    @pytest.mark.parametrize(
        "origin",
        ["*", "null", "", "chat.example.com", "https://chat.example.com/", "https://a.com/x", "https://A.com",
         "https://*.example.com", "https://user@a.com", "https://a.com https://b.com"],
    )  # fmt: skip
    def test_only_named_origins_are_taken(self, origin):
        with pytest.raises(ConfigError, match="--cors-allow-origin"):
            checked_origins([origin])

    def test_origins(self):
        assert checked_origins(["http://localhost:3000", "http://[::1]:80", "app://x"]) == {
            b"http://localhost:3000", b"http://[::1]:80", b"app://x"
        }  # fmt: skip

    def test_the_named_page_is_let_in_and_told_so(self, guarded: RunningServer):
        preflight = guarded.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert (preflight.status_code, preflight.content) == (204, b"")
        granted = preflight.headers
        assert granted["access-control-allow-origin"] == PAGE
        assert "POST" in granted["access-control-allow-methods"]
        assert granted["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "access-control-allow-credentials" not in granted
        for headers, status in (({}, 401), (bearer(USER), 200)):
            response = guarded.http.post("/generate", json={"text": "a"}, headers={"Origin": PAGE, **headers})
            assert response.status_code == status, "the page needs a key like everybody"
            assert response.headers["access-control-allow-origin"] == PAGE
            assert response.headers["vary"] == "Origin"
            assert "x-request-id" in response.headers["access-control-expose-headers"]

    def test_it_may_read_streams_and_failures(self, guarded: RunningServer):
        headers = {"Origin": PAGE, **bearer(USER)}
        body = {**LONG, "sampling_params": {"max_new_tokens": 3}}
        for response in (
            guarded.http.post("/generate", json=body, headers=headers),
            guarded.http.post("/generate", json={"text": 5}, headers=headers),
            guarded.http.get("/nowhere", headers=headers),
        ):
            assert response.headers["access-control-allow-origin"] == PAGE

    @pytest.mark.parametrize(
        "origin", ["https://evil.example.com", "null", "http://chat.example.com", PAGE + ":444", ""]
    )
    @pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/abort_request", "/flush_cache"])
    def test_a_foreign_page_changes_nothing(self, guarded: RunningServer, path, origin):
        headers = {"Origin": origin}
        preflight = guarded.http.options(path, headers={**headers, **PREFLIGHT})
        assert preflight.status_code == 403
        posted = guarded.http.post(path, json={"text": "a"}, headers={**headers, **bearer(ADMIN)})
        assert posted.status_code == 403 and "--cors-allow-origin" in posted.json()["error"]["message"]
        read = guarded.http.get("/v1/models", headers={**headers, **bearer(ADMIN)})
        assert read.status_code == 200
        for response in (preflight, posted, read):
            assert not any(name.startswith("access-control") for name in response.headers), "the browser must hide it"

    def test_closed_by_default(self, server: RunningServer):
        for headers in ({"Origin": PAGE}, {"Origin": PAGE, **PREFLIGHT}):
            assert server.http.options("/generate", headers=headers).headers.get("access-control-allow-origin") is None
        assert server.http.post("/generate", json={"text": "a"}, headers={"Origin": PAGE}).status_code == 403
        assert server.http.post("/generate", json={"text": "a"}).status_code == 200

    def test_a_page_may_delete_and_see_warnings(self, guarded: RunningServer):
        preflight = guarded.http.options("/v1/responses/x", headers={"Origin": PAGE, **PREFLIGHT})
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        body = {"model": "x", "prompt": "a", "user": "me", "provider": {}}
        response = guarded.http.post("/v1/completions", json=body, headers={"Origin": PAGE, **bearer(USER)})
        assert "x-jsg-warnings" in response.headers["access-control-expose-headers"]

    def test_several_origins_are_none(self, server: RunningServer):
        headers = [("Origin", str(server.http.base_url)), ("Origin", "https://evil.example.com")]
        for one_order in (headers, headers[::-1]):
            assert server.http.post("/generate", json={"text": "a"}, headers=one_order).status_code == 400

    @pytest.mark.parametrize(
        ("host", "is_known"),
        [
            *((host, True) for host in ("127.0.0.1", "[::1]:1", "LOCALHOST:9", "a.localhost", "192.0.2.7:1")),
            *((host, True) for host in ("host.docker.internal:30000", "localhost.", "CHAT.example.com:8")),
            *((host, False) for host in ("evil.example.com", "evil.example.com:30000", "localhost.evil.com", "", "[")),
            *((host, False) for host in ("127.0.0.1.evil.com", "xlocalhost", "a.chat.example.com", "example.com")),
        ],
    )  # fmt: skip
    def test_this_machines_own_server_takes_no_strangers_name(self, guarded: RunningServer, host, is_known):
        """A page whose name leads here would be of the server's own origin, and could read whatever GET gives."""
        for path in ("/debug/radix?text=true", "/debug/radix/events", "/v1/models", "/"):
            with guarded.http.stream("GET", path, headers={"Host": host, **bearer(ADMIN)}) as response:
                assert response.status_code == (200 if is_known else 403)

    def test_a_server_for_others_has_any_name(self, make_server: ServerMaker):
        with make_server(server={"host": "0.0.0.0", "api_key": (USER,)}) as server:
            for host in ("jsg.example.com", "10.0.0.1"):
                assert server.http.get("/v1/models", headers={"Host": host, **bearer(USER)}).status_code == 200

    @pytest.mark.parametrize(
        ("host", "is_local"),
        [
            ("127.0.0.1", True),
            ("127.9.9.9", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),
            ("::", False),
        ],
    )
    def test_which_addresses_only_this_machine_reaches(self, host, is_local):
        assert is_loopback(host) == is_local

    @pytest.mark.parametrize(
        ("host", "origin", "status"),
        [
            ("127.0.0.1:30000", "http://127.0.0.1:30000", 200),
            ("localhost:30000", "http://localhost:30000", 200),
            ("[::1]:30000", "http://[::1]:30000", 200),
            ("192.0.2.7", "https://192.0.2.7", 200),
            ("127.0.0.1:30000", "http://127.0.0.1:3000", 403),  # another server of the same machine
            ("evil.example.com:30000", "http://evil.example.com:30000", 403),  # a name that leads here
            ("localhost.evil.example.com", "http://localhost.evil.example.com", 403),
            ("127.0.0.1.evil.example.com", "http://127.0.0.1.evil.example.com", 403),
            ("[", "http://[", 403),
        ],
    )
    def test_the_servers_own_address_is_not_foreign_but_a_name_might_be(
        self, server: RunningServer, host, origin, status
    ):
        response = server.http.post("/generate", json={"text": "a"}, headers={"Host": host, "Origin": origin})
        assert response.status_code == status
