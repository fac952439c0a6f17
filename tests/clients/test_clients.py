"""Clients of the field with their real packages, each in an environment of its own, against real servers.

An inner run per environment makes a report, and each case of it is a test here. See `environments.toml`.
"""

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.environment import MADE, PIN, UnreachableError, environments
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.running import ROOT, running
from tests.server.scripted import TOOL_TEMPLATE

ENVIRONMENTS = environments()
RESULTS = MADE / "results.json"
COMMAND = "python -m pytest -m long tests/clients"
CASES = [(name, case) for name, environment in ENVIRONMENTS.items() for case in environment.cases()]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[dict[str, str]]:
    """`EMBEDDED` serves the embedded model with the real engine, and `SCRIPTED` the model of `scripted_core.py`."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory, TOOL_TEMPLATE)
    knobs = {
        "core": "tests.clients.scripted_core:ScriptedCore",
        "engine": {"model_path": "scripted", "tokenizer_path": str(directory)},
        "server": {"port": 0, "shutdown_timeout": 0.5},
        "tokenizer_dir": str(directory),
    }
    commands = {
        "EMBEDDED": ["-m", "jsg.cli", "serve", "--port", "0", "--compilation-cache-dir", compile_cache_dir],
        "SCRIPTED": ["-m", "tests.server.fake_server", json.dumps(knobs)],
    }
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(command)) for name, command in commands.items()}
        yield {name: str(server.http.base_url).rstrip("/") for name, server in servers.items()}


@pytest.fixture(scope="module")
def outcomes(addresses: dict[str, str]) -> Iterator[Callable[[str], dict[str, str]]]:
    """What became of the cases of an environment, which runs once. `RESULTS` has all of it at the end."""
    results = {}

    @functools.cache
    def run(name: str) -> dict[str, str]:
        try:
            ENVIRONMENTS[name].make()
        except UnreachableError as error:
            pytest.skip(str(error))
        found = ENVIRONMENTS[name].run(addresses)
        failed = {case: why for case, why in found.items() if why}
        passed = len(found) - len(failed)
        results[name] = {"packages": ENVIRONMENTS[name].pins, "cases": len(found), "passed": passed, "failed": failed}
        return found

    yield run
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    RESULTS.write_text(json.dumps({"commit": commit, "command": COMMAND, "clients": results}, indent=2) + "\n")


@pytest.mark.long
@pytest.mark.parametrize(("name", "case"), CASES)
def test_case(outcomes, name, case):
    failure = outcomes(name)[case]
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_package_has_an_exact_version(name):
    pins = ENVIRONMENTS[name].pins
    assert pins
    assert all(PIN.fullmatch(pin) for pin in pins)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_has_cases_and_no_two_have_one_name(name):
    cases = ENVIRONMENTS[name].cases()
    assert cases
    assert len(set(cases)) == len(cases)


def test_every_suite_has_an_environment():
    suites = {path.name for path in Path(__file__).parent.glob("with_*")}
    assert suites == {environment.suite.name for environment in ENVIRONMENTS.values()}


def test_the_page_shows_the_newest_results():
    newest = json.loads(max((ROOT / "bench" / "results").glob("clients-*.json")).read_text())
    page = (ROOT / "docs" / "clients.md").read_text()
    for client in newest["clients"].values():
        packages = ", ".join(pin.replace("==", " ") for pin in client["packages"])
        assert f"| {packages} | {client['cases']} | {client['passed']} |" in page
