"""Environments of clients: their packages, made once under `.cache/clients`, and the cases that run in them."""

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MADE = HERE.parents[1] / ".cache" / "clients"
PYTEST = "pytest==9.2.0"
PIN = re.compile(r"[@\w./-]+(\[[\w,]+\])?==\d[\w.]*")
SUITE_S = 900
"""The longest that a suite may take."""


class UnreachableError(Exception):
    """The registry of the packages cannot be reached."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """The packages of a client, and the suite that runs with them.

    Attributes:
        name: Its name in `environments.toml`.
        pins: `NAME==VERSION` of each package that its users install.
    """

    name: str
    pins: tuple[str, ...]

    @property
    def directory(self) -> Path:
        return MADE / self.name

    @property
    def suite(self) -> Path:
        """The file of its cases, or the folder of such files."""
        name = f"with_{re.sub(r'-\d+$', '', self.name).replace('-', '_')}"
        return HERE / name if (HERE / name).is_dir() else next(HERE.glob(f"{name}.*"))

    @property
    def files(self) -> list[Path]:
        """All files of the suite."""
        return sorted(self.suite.glob("*.py")) if self.suite.is_dir() else [self.suite]

    @property
    def is_node(self) -> bool:
        return self.suite.suffix == ".mjs"

    def cases(self) -> list[str]:
        """The names of the cases of its suite, which are read without running it."""
        if self.is_node:
            return re.findall(r'^test\("([^"]+)"', self.suite.read_text(), re.MULTILINE)
        nodes = [node for file in self.files for node in ast.parse(file.read_text()).body]
        return [node.name for node in nodes if getattr(node, "name", "").startswith("test_")]

    def make(self) -> None:
        """Installs the packages, unless these very ones are installed.

        Raises:
            UnreachableError: There is no network, or the tool that installs them is missing.
        """
        if not self.is_node:
            make_python(self.directory, (*self.pins, PYTEST))
            return
        if shutil.which("npm") is None:
            raise UnreachableError("npm is not installed")
        packages = [pin.replace("==", "@") for pin in self.pins]
        _make(
            self.directory,
            self.pins,
            ["npm", "install", "--silent", "--no-fund", "--no-audit", *packages],
            ["npm", "ping"],
        )

    @property
    def _python(self) -> Path:
        return self.directory / "bin" / "python"

    def run(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Runs the suite. `addresses` are variables of its process.

        Returns:
            Each case that ran → empty if it passed, otherwise what went wrong, or why it was skipped.
        """
        report = self.directory / "report.xml"
        report.unlink(missing_ok=True)
        suite = self.directory / self.suite.name  # Node looks for packages beside the file
        if self.suite.is_dir():
            shutil.rmtree(suite, ignore_errors=True)
            shutil.copytree(self.suite, suite)
        else:
            shutil.copy(self.suite, suite)
        if self.is_node:
            command = ["node", "--test", "--test-reporter", "junit", "--test-reporter-destination", report, suite]
        else:
            # The files of a folder are named for what they try, and import one another from the folder.
            options = ["-q", "-p", "no:cacheprovider", "--import-mode", "importlib", "-c", "/dev/null"]
            options += ["-o", "python_files=*.py", "-o", f"pythonpath={self.directory}"]
            command = [self._python, "-I", "-m", "pytest", *options, "--rootdir", self.directory, suite]
            command += ["--junit-xml", report]
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={"PATH": os.environ["PATH"], "HOME": str(self.directory), **addresses},
            capture_output=True,
            text=True,
            timeout=SUITE_S,
        )
        assert report.exists(), done.stdout + done.stderr
        return {case.get("name", ""): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _outcome(case: ET.Element) -> str:
    return "\n".join(f"{part.tag}: {part.get('message')}\n{part.text or ''}" for part in case if part.tag in FAILED)


def make_python(directory: Path, pins: Sequence[str]) -> Path:
    """Makes an environment of Python with these packages, unless it has these very ones.

    Returns:
        The folder of its programs.

    Raises:
        UnreachableError: There is no network.
    """
    programs = directory / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    _make(directory, pins, [*pip, "install", "--quiet", *pins], [*pip, "index", "versions", "pip"], is_python=True)
    return programs


def _make(
    directory: Path, pins: Sequence[str], install: list[str], probe: list[str], *, is_python: bool = False
) -> None:
    stamp = directory / ".made"
    if stamp.exists() and stamp.read_text() == "\n".join(pins):
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if is_python:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    run: dict[str, Any] = {"cwd": directory, "capture_output": True, "text": True}
    done = subprocess.run(install, **run)
    if done.returncode and subprocess.run(probe, **run).returncode:
        raise UnreachableError(f"the registry cannot be reached: {' '.join(probe[-3:])} fails")
    assert done.returncode == 0, done.stdout + done.stderr
    stamp.write_text("\n".join(pins))


FAILED = ("failure", "error", "skipped")


def environments() -> dict[str, Environment]:
    """All environments, by name."""
    pins = tomllib.loads((HERE / "environments.toml").read_text())
    return {name: Environment(name, tuple(packages)) for name, packages in pins.items()}
