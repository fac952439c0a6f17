"""What a scrape of `/metrics` says, for tests."""

import time
from collections.abc import Callable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 10

Labels = tuple[tuple[str, str], ...]


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in self.samples.setdefault(sample.name, {}), f"{sample.name} {labels} comes twice"
                self.samples[sample.name][labels] = sample.value

    def get(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name with these labels; there must be one."""
        found = [value for has, value in self.samples[name].items() if labels.items() <= dict(has).items()]
        assert found, f"{name} has no sample with {labels}: {sorted(self.samples[name])}"
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name that are not 0, by the value of a label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples[name].items():
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0) + value
        return {key: value for key, value in sums.items() if value}

    @property
    def state(self) -> str:
        """The only state that `jsg:state` says the server is in."""
        (state,) = self.by("jsg:state", "state")
        assert set(self.samples["jsg:state"].values()) == {0, 1}
        return state


def scrape(http: httpx.Client, headers: Mapping[str, str] | None = None) -> Scrape:
    """A body that was made for this scrape."""
    response = http.get("/metrics", headers={"Cache-Control": "no-cache", **(headers or {})})
    assert response.status_code == 200, response.text
    return Scrape(response.text)


def scrape_until(http: httpx.Client, condition: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape of which the condition is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(result := scrape(http)):
        assert time.monotonic() < deadline, f"never true; last: {result.samples}"
        time.sleep(0.02)
    return result
