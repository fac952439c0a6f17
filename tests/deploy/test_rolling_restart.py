"""Proxies before two servers that are restarted one after the other, with the recipes of docs/proxies.md."""

import collections
import contextlib
import dataclasses
import itertools
import json
import random
import re
import shutil
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jsg.free_ports import free_ports
from tests.deploy.manifests import configured, of_file
from tests.deploy.test_gateways import GATEWAYS, Gateway, num_finished, started
from tests.server.running import ROOT, ServerProcess, running, wait_until

PAGE = (ROOT / "docs" / "proxies.md").read_text(encoding="utf-8")
NUM_CLIENTS, NUM_ROUNDS = 6, 2
START_S = 60
SERVER = ["serve", "tiny", "--max-running-requests", "8", "--max-total-tokens", "32768"]
WRAPPED = {  # what a recipe for nginx needs around it where it is not one file among those of a system
    "nginx": """
        daemon off;
        master_process off; # it would leave its workers where it is killed
        pid {folder}/pid;
        events {{}}
        http {{
            access_log off;
            client_body_temp_path {folder}/1;
            proxy_temp_path {folder}/2;
            fastcgi_temp_path {folder}/3;
            uwsgi_temp_path {folder}/4;
            scgi_temp_path {folder}/5;
            {recipe}
        }}""",
}
COMMANDS = {
    "haproxy": ("haproxy", "-f", "{file}"),
    "nginx": ("nginx", "-e", "stderr", "-c", "{file}"),
    "caddy": ("caddy", "run", "--adapter", "caddyfile", "--config", "{file}"),
}

Started = contextlib.AbstractContextManager[str]
"""What runs a proxy and gives its address."""


def recipe_of(proxy: str) -> str:
    """The block that the page gives for a rolling restart with this proxy."""
    [recipe] = re.findall(rf"^### {proxy}\n.*?^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    return recipe


@contextlib.contextmanager
def proxied(proxy: str, ports: list[int], folder: Path) -> Iterator[str]:
    """Starts a proxy with the recipe of the page; gives its address."""
    if shutil.which(proxy) is None:
        pytest.skip(f"needs {proxy}: it is in Debian's package of this name")
    own, recipe = free_ports(), recipe_of(proxy)
    for written, port in zip(("8080", "30001", "30002"), (own, *ports), strict=True):
        assert f"127.0.0.1:{written}" in recipe
        recipe = recipe.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
    file = folder / "recipe"
    file.write_text(textwrap.dedent(WRAPPED.get(proxy, "{recipe}")).format(folder=folder, recipe=recipe))
    with started([part.format(file=file) for part in COMMANDS[proxy]], folder):
        yield f"http://127.0.0.1:{own}"


@dataclasses.dataclass
class Load:
    """Clients that keep their connections and send one chat after the other, every second one as a stream.

    Attributes:
        lost: What was lost, and why.
        num_answered: Answers that came whole.
    """

    url: str
    lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_answered: int = 0
    _is_over: threading.Event = dataclasses.field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _send(self, client: int) -> None:
        chance = random.Random(client)
        with httpx.Client(base_url=self.url, timeout=60) as http:
            for number in itertools.count():
                if self._is_over.is_set():
                    return
                length = (4, 40, 400)[number % 3]
                content = f"{chance.getrandbits(256):x}"  # gateways send what begins alike to one server
                chat = {"model": "tiny", "messages": [{"role": "user", "content": content}], "ignore_eos": True}
                chat |= {"max_tokens": length, "stream": (number + client) % 2 == 0}
                try:
                    answer = http.post("/v1/chat/completions", json=chat)
                    problem = problem_of(answer, length)
                except httpx.HTTPError as error:
                    problem = repr(error)
                if problem is None:
                    self.num_answered += 1
                else:
                    self.lost[problem] += 1


def problem_of(answer: httpx.Response, length: int) -> str | None:
    """Why an answer is not the whole one; None if it is."""
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        found = answer.json()["usage"]["completion_tokens"]
        return None if found == length else f"{found} tokens of {length}"
    *events, last = [line for line in answer.text.splitlines() if line]
    if last != "data: [DONE]":
        return f"a stream that ends with {last}"
    reasons = [choice["finish_reason"] for event in events for choice in json.loads(event[5:])["choices"]]
    return None if reasons[-1:] == ["length"] else f"a stream that ends because of {reasons[-1:]}"


def ending_of(arguments: list[str]) -> list[str]:
    """The options of a server's command line that say how it ends."""
    _, server = configured(arguments)
    return ["--drain-delay", str(server.drain_delay), "--shutdown-timeout", str(server.shutdown_timeout)]


@pytest.fixture
def restart_each(compile_cache_dir: str) -> Callable[[list[str], Callable[[list[int]], Started]], None]:
    """Restarts two servers, each with these options, one after the other, and sends requests to what is before them."""

    def restart(ending: list[str], started_before: Callable[[list[int]], Started]) -> None:
        command = ["-m", "jsg.cli", *SERVER, *ending, "--compilation-cache-dir", compile_cache_dir, "--port"]
        ports = [free_ports(), free_ports()]
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(contextlib.ExitStack()) for _ in ports]

            def serve(which: int) -> ServerProcess:
                return servers[which].enter_context(running([*command, str(ports[which])]))

            processes = [serve(which) for which in range(len(ports))]
            url = stack.enter_context(started_before(ports))
            wait_until(lambda: is_ready(url), START_S)
            load = Load(url)
            with load.running():
                for which in [*range(len(ports))] * NUM_ROUNDS:
                    processes[which].process.terminate()
                    assert processes[which].end()[0] == 0
                    servers[which].close()
                    processes[which] = serve(which)
                for each in processes:  # who has come back is asked again
                    wait_until(lambda process=each: num_finished(process) > 0)
        print(json.dumps({"answered": load.num_answered, "lost": load.lost}))
        assert not load.lost, (load.num_answered, load.lost)

    return restart


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/v1/models").status_code == 200
    return False


@pytest.mark.long
@pytest.mark.parametrize("proxy", COMMANDS)
def test_a_rolling_restart_loses_no_request(proxy: str, restart_each, tmp_path: Path):
    [shown] = re.findall(r"^jsg serve MODEL --port 30001 (.*)$", PAGE, re.MULTILINE)
    restart_each(ending_of(["tiny", *shown.split()]), lambda ports: proxied(proxy, ports, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("gateway", GATEWAYS, ids=lambda gateway: gateway.pin)
def test_nor_does_one_with_the_gateway_of_compose(gateway: Gateway, restart_each, tmp_path: Path):
    ending = ending_of(of_file("compose/compose.yaml")["services"]["jsg-0"]["command"])
    restart_each(ending, lambda ports: gateway.running([f"http://127.0.0.1:{port}" for port in ports], tmp_path))
