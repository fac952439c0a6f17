"""`--metrics-alias`: the names of other servers, with the values of ours."""

from collections.abc import Iterator

import pytest

from jsg.server.telemetry.aliases import ALIASES
from tests.server.mixed_run import Client, quiet
from tests.server.scrape import Scrape, scrape_until
from tests.server.threads import ServerMaker


class TestAliases:
    @pytest.fixture(scope="class", params=sorted(ALIASES))
    @classmethod
    def aliased(cls, request: pytest.FixtureRequest, make_server: ServerMaker) -> Iterator[tuple[str, Scrape]]:
        with make_server(server={"metrics_alias": request.param, "served_model_name": "my-model"}) as server:
            client = Client(server.http)
            client.completion("hello", n=2, max_tokens=4, stream=True)
            client.leave([1, 2], after=1)
            yield request.param, scrape_until(server.http, quiet)

    def test_each_is_there_with_the_model_and_the_value_of_ours(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        for alias in ALIASES[server]:
            suffixes = ("_sum", "_count", "_bucket") if f"{alias.source}_count" in result.samples else ("",)
            for suffix in suffixes:
                theirs = result.samples[alias.name + suffix]
                assert all(dict(labels)["model_name"] == "my-model" for labels in theirs), alias.name
                if not alias.constants and alias.source != "jsg:generation_throughput":
                    wanted = {"finished_reason": ("stop", "length")} if "reason" in alias.labels else {}
                    found = sum(
                        value
                        for labels, value in theirs.items()
                        if all(dict(labels)[label] in values for label, values in wanted.items())
                    )
                    assert found == result.get(alias.source + suffix), alias.name
        assert result.get("jsg:generation_tokens_total") > 8

    def test_no_name_is_of_the_other_server(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        prefixes = {name.partition(":")[0] for name in result.samples}
        assert prefixes == {"jsg", server, "process_start_time_seconds"}

    def test_vllm_tells_how_requests_ended(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        if server == "vllm":
            by_reason = result.by("vllm:request_success_total", "finished_reason")
            assert by_reason == {"length": 2, "abort": 1}
