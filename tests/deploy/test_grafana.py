"""Every query of the dashboard and of the alerts finds something in a real scrape."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest
import yaml

from jsg.config import ServerConfig
from jsg.server.telemetry.telemetry import Telemetry
from tests.deploy.manifests import of_kind
from tests.deploy.promql import TARGET_LABELS, PromqlError, Series, check, tokens_of
from tests.engine.fake_core import FAILING_TOKEN
from tests.server.scrape import Scrape, scrape
from tests.server.threads import ServerMaker
from tests.test_layout import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/jsg.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
RULES = yaml.safe_load((ROOT / "deploy/prometheus/jsg.rules.yml").read_text())["groups"][0]["rules"]
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())

GRID_WIDTH = 24
PANEL_TYPES = {"stat", "timeseries", "heatmap"}
NOT_SHOWN = {
    "jsg:cache_info": "constant, for routers",
    "jsg:engine_generated_tokens_total": "the front's count is what clients got",
    "jsg:generation_throughput": "a rate over the interval of the panel is better",
}
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
SUFFIXES = ("_bucket", "_sum", "_count")


class Known:
    """The series of a scrape."""

    def __init__(self, result: Scrape) -> None:
        self._result = result
        series = [family.series for family in Telemetry(ServerConfig()).families()]
        self._histograms = {each.name for each in series if each.kind == "histogram"}

    def __call__(self, name: str) -> Series | None:
        if name == "up":
            return Series({}, is_counter=False)  # Prometheus makes it of each target
        samples = self._result.samples.get(name)
        if not samples:
            return None
        labels: dict[str, set[str]] = {}
        for pairs in samples:
            for label, value in pairs:
                labels.setdefault(label, set()).add(value)
        is_part = any(name == stem + suffix for stem in self._histograms for suffix in SUFFIXES)
        return Series(labels, is_part or name.endswith("_total"))


@pytest.fixture(scope="module")
def known(make_server: ServerMaker) -> Iterator[Known]:
    """A server's series after some traffic, a server error too."""
    with make_server() as server:
        post(server.http, {"text": "hello", "sampling_params": {"max_new_tokens": 4}}, 200)
        post(server.http, {"input_ids": [FAILING_TOKEN]}, 500)
        post(server.http, {"nonsense": 1}, 400)
        server.http.get("/ready")
        yield Known(scrape(server.http))


def post(http: httpx.Client, body: dict, status: int) -> None:
    assert http.post("/generate", json=body).status_code == status


class TestDashboard:
    def test_each_query_finds_series_and_its_legend_labels(self, known: Known):
        for title, target in TARGETS:
            labels = check(target["expr"], known)
            for label in LEGEND_LABEL.findall(target["legendFormat"]):
                assert label in labels, f"{title}: the legend names {label}, the query gives {sorted(labels)}"

    def test_every_metric_of_ours_is_shown(self, known: Known):
        """Every metric appears on the dashboard."""
        shown = {token.text for _, target in TARGETS for token in tokens_of(target["expr"]) if token.kind == "name"}
        stems = {re.sub("(_bucket|_sum|_count)$", "", name) for name in shown}
        names = set(known._result.samples)
        ours = {re.sub("(_bucket|_sum|_count)$", "", name) for name in names}
        assert ours - stems == set(NOT_SHOWN)

    def test_variables_are_declared_and_used(self):
        variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
        assert set(variables) == {"datasource", "job", "instance"}
        assert variables["datasource"]["query"] == "prometheus"
        used = {name for _, target in TARGETS for name in VARIABLE.findall(target["expr"])}
        assert used - {"__rate_interval"} == {"job", "instance"}

    def test_variables_ask_for_what_there_is(self, known: Known):
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match and match[2] in TARGET_LABELS
            check(match[1], known)

    def test_each_query_is_limited_to_the_chosen_servers(self):
        for title, target in TARGETS:
            names = [token.text for token in tokens_of(target["expr"]) if token.kind == "name"]
            num_series = sum(name.startswith(("jsg:", "process_")) for name in names)
            assert target["expr"].count('job=~"$job", instance=~"$instance"') == num_series > 0, title

    def test_everything_asks_the_chosen_data_source(self):
        source = {"type": "prometheus", "uid": "${datasource}"}
        for panel in PANELS:
            assert panel["datasource"] == source, panel["title"]
            assert all(target["datasource"] == source for target in panel["targets"]), panel["title"]

    def test_panels_have_places_that_do_not_overlap(self):
        taken: set[tuple[int, int]] = set()
        for panel in DASHBOARD["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= GRID_WIDTH, panel["title"]
            cells = {
                (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells

    def test_panels_are_whole(self):
        ids = [panel["id"] for panel in DASHBOARD["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in PANELS:
            assert panel["type"] in PANEL_TYPES, panel["title"]
            assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "heatmap", panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) > 0, panel["title"]

    def test_its_rows_are_those_of_the_documentation(self):
        rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
        first = ["Overview", "Latency", "Tokens", "Cache", "Scheduler", "Errors", "Front", "Grammars", "Images"]
        assert rows == [*first, "States of hybrid models"]


class TestPrometheus:
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
    def test_each_alert_finds_series_and_the_labels_that_it_names(self, known: Known, rule: dict):
        labels = check(rule["expr"], known)
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in labels

    def test_a_server_that_is_gone_is_an_alert(self):
        """It has no series any more, so that only Prometheus' own of the target tells."""
        [expr] = [rule["expr"] for rule in RULES if rule["alert"] == "JsgEngineDown"]
        [job] = PROMETHEUS["scrape_configs"]
        assert f'up{{job="{job["job_name"]}"}} == 0' in expr

    def test_the_configuration_loads_the_rules_and_scrapes_the_default_port(self):
        assert PROMETHEUS["rule_files"] == ["jsg.rules.yml"]
        [job] = PROMETHEUS["scrape_configs"]
        assert job["static_configs"] == [{"targets": [f"localhost:{ServerConfig().port}"]}]
        assert job.get("metrics_path", "/metrics") == "/metrics"


def test_autoscaling_asks_for_one_number_that_there_is(known: Known):
    [scaled] = of_kind("ScaledObject")
    for trigger in scaled.content["spec"]["triggers"]:
        assert check(trigger["metadata"]["query"], known) == set()
        assert float(trigger["metadata"]["threshold"]) > 0


SERIES = {
    "c_total": Series({"reason": {"stop"}}, is_counter=True),
    "h_bucket": Series({"le": {"1", "+Inf"}}, is_counter=True),
    "g": Series({"state": {"free"}}, is_counter=False),
}


class TestChecker:
    """The checker itself: what is wrong is found."""

    @pytest.mark.parametrize(
        ("query", "labels"),
        [
            ("g", {"state", "job", "instance"}),
            ('g{state="free", job=~"$job"}', {"state", "job", "instance"}),
            ("sum(g)", set()),
            ("sum by (state) (g) / sum by (state) (g)", {"state"}),
            ("rate(c_total[5m])", {"reason", "job", "instance"}),
            ("sum by (reason) (rate(c_total[$__rate_interval])) > 0.5", {"reason"}),
            ("histogram_quantile(0.9, sum by (le, job) (rate(h_bucket[1m])))", {"job"}),
            ("rate(c_total[5m]) > 0 and on (job) g > 1", {"reason", "job", "instance"}),
            ('max_over_time(g{state="free"}[5m]) == 0', {"state", "job", "instance"}),
        ],
    )
    def test_a_right_query(self, query: str, labels: set[str]):
        assert check(query, SERIES.get) == labels

    @pytest.mark.parametrize(
        "query",
        [
            "",
            "missing",
            "g g",
            "g{",
            "g{state}",
            'g{stat="free"}',
            'g{state="fre"}',
            'g{state=~"fr"}',
            "sum by (reason) (g)",
            "sum by reason (g)",
            "sum(g",
            "rate(g[5m])",
            "changes(c_total[5m])",
            "rate(c_total)",
            "rate(c_total[5])",
            "c_total[5m]",
            "irate(c_total[5m])",
            "histogram_quantile(0.9, rate(c_total[5m]))",
            "histogram_quantile(0.9, sum(rate(h_bucket[5m])))",
            "histogram_quantile(sum by (le) (rate(h_bucket[5m])))",
            "h_bucket",
            "g / sum(g)",
            "g > 1 and on (reason) g",
            "g + g * g",
            "sum(1)",
            "g ; g",
        ],
    )
    def test_a_wrong_query(self, query: str):
        with pytest.raises(PromqlError):
            check(query, SERIES.get)
