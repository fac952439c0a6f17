"""The tests that need a GPU, as `make test-gpu` runs them: how many passed, and which failed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bench.device.events import Part
from bench.report import ROOT

TESTS = "tests/kernels_pallas"
"""The folder of all tests that need a GPU. Others import packages that may be missing where only these can run."""
OPTIONS = ("-m", "gpu", "-n", "0", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
"""pytest-benchmark, where it is installed, warns that it does not work beside xdist, and a warning is an error here."""
EXIT_SOME_FAILED = 1


class Result(NamedTuple):
    """What became of one test. `error` is its first line; empty if it passed."""

    name: str
    error: str
    is_skipped: bool


def run(part: Part) -> None:
    """Runs them. Each one that fails is a failure of its own."""
    file = part.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", *OPTIONS, TESTS, f"--junitxml={file}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cuda"}, stdout=sys.stderr)
    if done.returncode not in (0, EXIT_SOME_FAILED) or not file.exists():
        raise RuntimeError(f"pytest ended with status {done.returncode}")
    results = list(read(file))
    tried = [each for each in results if not each.is_skipped]
    for each in tried:
        if each.error:
            part.failed_as(f"{each.name}: {each.error}")
    passed = [each for each in tried if not each.error]
    facts = {"num_tried": len(tried), "num_skipped": len(results) - len(tried)}
    part.add("tests on the device that passed", "tests", [len(passed)], kind="tests", **facts)


def read(file: Path) -> Iterator[Result]:
    """The results in a file that pytest has written."""
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        problems = [each for each in case if each.tag in ("failure", "error")]
        error = (problems[0].get("message") or problems[0].tag).splitlines()[0] if problems else ""
        is_skipped = any(each.tag == "skipped" for each in case)
        yield Result(case.get("name", ""), error, is_skipped)
