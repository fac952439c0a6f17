"""docs/observability.md says what the code says."""

import importlib.util
import pathlib
import re
from types import ModuleType

import pytest

from jsg.server.telemetry import tracing
from jsg.server.telemetry.abort_reasons import ABORT_REASONS
from jsg.server.telemetry.request_log import LogLine
from tests.test_layout import ROOT

SCRIPT = ROOT / "docs" / "observability_tables.py"
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("observability_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(tables: ModuleType):
    for name, make in tables.TABLES.items():
        assert tables.made_part(name) == make(), "run: .venv/bin/python docs/observability_tables.py"


def test_the_tables_show_what_there_is(tables: ModuleType):
    for row in (
        "| `jsg:requests_running` | gauge |",
        "| `jsg:requests_finished_total` | counter | `route`, `reason` |",
        "| `jsg:event_loop_lag_seconds` | histogram |",
    ):
        assert row in tables.metrics()
    assert "| `vllm:kv_cache_usage_perc` | `jsg:kv_usage` |" in tables.aliases()
    shown = set(re.findall(r"`(\w+)`", tables.log_fields()))
    assert set(LogLine.__dataclass_fields__) <= shown


def test_every_attribute_of_a_span_is_described():
    source = pathlib.Path(tracing.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:gen_ai|jsg|http)\.[a-z_.]+|error\.type)"', source))
    assert len(names) > 20
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_every_reason_of_an_abort_is_described():
    assert {reason for reason in ABORT_REASONS if f"`{reason}`" not in PAGE} == set()
