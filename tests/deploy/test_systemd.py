"""The unit of systemd fits jsg's command line and itself, systemd takes it, and it gives the server few rights."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, configured
from tests.deploy.test_manifests import MIN_EXIT_S, MIN_START_S

UNIT = DEPLOY / "systemd" / "jsg@.service"
MOST_EXPOSED = 2.0  # of 10, as `systemd-analyze security` counts
SECONDS = {"s": 1, "min": 60}
SPECIFIERS = {"%i": "30000", "%d": "/run/credentials/jsg@30000.service", "%C": "/var/cache"}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def section(name: str) -> dict[str, str]:
    """One section of the unit; of a key that comes twice, its last value."""
    parser = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(re.sub(r"\\\n\s*", "", UNIT.read_text(encoding="utf-8")))
    return dict(parser[name])


SERVICE = section("Service")


def seconds(value: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([a-z]+)", value).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(number) * SECONDS[unit]


def replaced(value: str) -> str:
    """A value as systemd reads it."""
    return re.sub("%.", lambda found: SPECIFIERS[found[0]], value)


def test_the_command_line_takes_every_argument():
    program, command, *arguments = shlex.split(replaced(SERVICE["ExecStart"]))
    engine, server = configured(arguments)
    assert Path(program).name == "jsg" and command == "serve" and engine.model_path.startswith("/srv/")
    assert server.port == int(SPECIFIERS["%i"]), "one instance for each port"
    assert server.log_requests
    name, _, source = SERVICE["LoadCredential"].partition(":")
    assert server.api_key_file == f"{SPECIFIERS['%d']}/{name}" and source.startswith("/etc/jsg/")
    assert seconds(SERVICE["TimeoutStopSec"]) >= server.drain_delay + server.shutdown_timeout + MIN_EXIT_S
    assert server.drain_delay > 0


def test_a_start_has_the_time_to_compile():
    assert SERVICE["Type"] == "notify"
    assert seconds(SERVICE["TimeoutStartSec"]) >= MIN_START_S


def test_only_the_front_gets_the_signal_and_a_death_is_followed_by_a_start():
    assert (SERVICE["KillMode"], SERVICE["Restart"]) == ("mixed", "on-failure")
    assert section("Unit")["StartLimitIntervalSec"] == "0"


def test_its_home_is_a_directory_of_its_own_that_nobody_else_enters():
    assert SERVICE["DynamicUser"] == "yes" and SERVICE["CacheDirectoryMode"] == "0700"
    name, _, home = replaced(SERVICE["Environment"]).partition("=")
    assert (name, home) == ("HOME", f"/var/cache/{SERVICE['CacheDirectory']}")


def with_a_program(folder: Path, old: str = "", new: str = "") -> Path:
    """The instance as a file whose program exists, with a text replaced."""
    file = folder / "jsg@30000.service"
    text = UNIT.read_text(encoding="utf-8").replace("/usr/local/lib/jsg/bin/jsg", "/bin/true")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    return file


def analyzed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@needs_systemd
def test_systemd_takes_it(tmp_path: Path):
    for old, new, problem in (
        ("", "", ""),
        ("ProtectHome=yes", "ProtectHomes=yes", "'ProtectHomes'"),
        ("KillMode=mixed", "KillMode=some", "Failed to parse kill mode"),
    ):
        found = analyzed("verify", "--man=no", str(with_a_program(tmp_path, old, new)))
        lines = [line for line in found.stderr.splitlines() if str(tmp_path) in line]
        assert bool(lines) == bool(problem) and problem in "".join(lines), found.stderr


@needs_systemd
def test_it_may_do_little(tmp_path: Path):
    most = f"--threshold={MOST_EXPOSED * 10:.0f}"
    for old, is_little in (("", True), ("CapabilityBoundingSet=\n", False)):
        found = analyzed("security", "--offline=true", "--no-pager", most, str(with_a_program(tmp_path, old)))
        assert (found.returncode == 0) == is_little, found.stdout
