"""A pytest plugin that measures the CPU time of each test, its fixtures and the processes that it waited for.

`make test-times` runs the fast tests with `--cpu-times` and prints CPU seconds by folder, the dearest files and the
dearest tests. A shared fixture is paid for by the test that asks for it first.
"""

import collections
import os
from collections.abc import Callable, Generator

import pytest

NAME = "cpu_s"
GROUPS: dict[str, tuple[int, Callable[[str], str]]] = {  # how many rows are printed, and a test's place in them
    "folders": (40, lambda test: test.split("::")[0].rpartition("/")[0]),
    "files": (50, lambda test: test.split("::")[0]),
    "tests": (60, lambda test: test),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", action="store_true", help="print which tests take how much CPU time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes())


def cpu_s() -> float:
    """CPU seconds that this process has used, with those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """Adds to each report what its phase cost; in the process that prints, adds up what the reports say."""

    def __init__(self) -> None:
        self.before_s = cpu_s()
        self.by_test: dict[str, float] = collections.defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = cpu_s()
        report.user_properties = [*report.user_properties, (NAME, now_s - self.before_s)]
        self.before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A property is a property of the test, so the report of its teardown lists those of all phases before it too.
        # The report of a worker that crashed has none.
        self.by_test[report.nodeid] += report.user_properties[-1][1] if report.user_properties else 0.0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(self.by_test.values())
        terminalreporter.section(f"CPU time: {total_s / 60:.1f} minutes in {len(self.by_test)} tests")
        for title, (most, place) in GROUPS.items():
            sums: dict[str, float] = collections.defaultdict(float)
            for test, seconds in self.by_test.items():
                sums[place(test)] += seconds
            terminalreporter.line(f"{title}:")
            for name, seconds in sorted(sums.items(), key=lambda pair: -pair[1])[:most]:
                terminalreporter.line(f"  {seconds:8.1f} s  {name}")
