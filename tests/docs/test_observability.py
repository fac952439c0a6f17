"""docs/observability.md says what the code says."""

import pathlib
import re

from docs.tables import observability
from jsg.server.telemetry import tracing
from jsg.server.telemetry.abort_reasons import ABORT_REASONS
from jsg.server.telemetry.request_log import LogLine
from tests.test_layout import ROOT

PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")


def test_the_tables_show_what_there_is():
    for row in (
        "| `jsg:requests_running` | gauge |",
        "| `jsg:requests_finished_total` | counter | `route`, `reason` |",
        "| `jsg:event_loop_lag_seconds` | histogram |",
    ):
        assert row in observability.metrics()
    assert "| `vllm:kv_cache_usage_perc` | `jsg:kv_usage` |" in observability.aliases()
    shown = set(re.findall(r"`(\w+)`", observability.log_fields()))
    assert set(LogLine.__dataclass_fields__) <= shown


def test_every_attribute_of_a_span_is_described():
    source = pathlib.Path(tracing.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:gen_ai|jsg|http)\.[a-z_.]+|error\.type)"', source))
    assert len(names) > 20
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_every_reason_of_an_abort_is_described():
    assert {reason for reason in ABORT_REASONS if f"`{reason}`" not in PAGE} == set()
