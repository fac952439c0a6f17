"""Our metrics under the names that dashboards for SGLang and vLLM use.

An alias is a view: it renames the samples of one of our families, so nothing is counted twice.
"""

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import final

from jsg.server.telemetry.abort_reasons import ABORT_REASONS
from jsg.server.telemetry.series import Family, Series


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """One series of SGLang or vLLM.

    Attributes:
        name: Their name in a scrape.
        source: Our name of the series.
        labels: Our label → their label; samples that differ in other labels are added up.
        constants: Their labels that always have the same value.
        only: Our label → the values whose samples count; all values count for other labels.
    """

    name: str
    source: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


_REASON = {"reason": "finished_reason"}
_NOT_ABORTED = ("error", "refused", "queue_full")

ALIASES: dict[str, tuple[Alias, ...]] = {
    "sglang": (
        Alias("sglang:num_running_reqs", "jsg:requests_running"),
        Alias("sglang:num_queue_reqs", "jsg:requests_waiting"),
        Alias("sglang:num_used_tokens", "jsg:kv_used_tokens"),
        Alias("sglang:max_total_num_tokens", "jsg:kv_capacity_tokens"),
        Alias("sglang:token_usage", "jsg:kv_usage"),
        Alias(
            "sglang:cache_config_info", "jsg:cache_info", labels={"page_size": "page_size", "num_pages": "num_pages"}
        ),
        Alias("sglang:cache_hit_rate", "jsg:cache_hit_rate"),
        Alias("sglang:gen_throughput", "jsg:generation_throughput"),
        Alias("sglang:prompt_tokens_total", "jsg:prompt_tokens_total"),
        Alias("sglang:cached_tokens_total", "jsg:cached_tokens_total"),
        Alias("sglang:generation_tokens_total", "jsg:generation_tokens_total"),
        Alias("sglang:evicted_tokens_total", "jsg:evicted_tokens_total"),
        Alias("sglang:num_requests_total", "jsg:requests_finished_total"),
        Alias("sglang:num_aborted_requests_total", "jsg:requests_aborted_total"),
        Alias("sglang:num_retracted_requests_total", "jsg:retracts_total"),
        Alias("sglang:time_to_first_token_seconds", "jsg:time_to_first_token_seconds"),
        Alias("sglang:inter_token_latency_seconds", "jsg:inter_token_latency_seconds"),
        Alias("sglang:time_per_output_token_seconds", "jsg:inter_token_latency_seconds"),
        Alias("sglang:e2e_request_latency_seconds", "jsg:e2e_request_latency_seconds"),
        Alias("sglang:queue_time_seconds", "jsg:queue_time_seconds"),
    ),
    "vllm": (
        Alias("vllm:num_requests_running", "jsg:requests_running"),
        Alias("vllm:num_requests_waiting", "jsg:requests_waiting"),
        Alias("vllm:kv_cache_usage_perc", "jsg:kv_usage"),
        Alias(
            "vllm:cache_config_info",
            "jsg:cache_info",
            labels={"block_size": "block_size", "num_blocks": "num_gpu_blocks"},
        ),
        Alias("vllm:gpu_cache_usage_perc", "jsg:kv_usage"),
        Alias("vllm:prefix_cache_queries_total", "jsg:engine_prompt_tokens_total"),
        Alias("vllm:prefix_cache_hits_total", "jsg:engine_cached_tokens_total"),
        Alias("vllm:gpu_prefix_cache_queries_total", "jsg:engine_prompt_tokens_total"),
        Alias("vllm:gpu_prefix_cache_hits_total", "jsg:engine_cached_tokens_total"),
        Alias("vllm:num_preemptions_total", "jsg:retracts_total"),
        Alias("vllm:prompt_tokens_total", "jsg:prompt_tokens_total"),
        Alias("vllm:generation_tokens_total", "jsg:generation_tokens_total"),
        Alias("vllm:request_success_total", "jsg:requests_finished_total", labels=_REASON),
        Alias(
            "vllm:request_success_total",
            "jsg:requests_aborted_total",
            constants={"finished_reason": "abort"},
            only={"reason": tuple(reason for reason in ABORT_REASONS if reason not in _NOT_ABORTED)},
        ),
        Alias(
            "vllm:request_success_total",
            "jsg:requests_aborted_total",
            constants={"finished_reason": "error"},
            only={"reason": ("error",)},
        ),
        Alias("vllm:time_to_first_token_seconds", "jsg:time_to_first_token_seconds"),
        Alias("vllm:inter_token_latency_seconds", "jsg:inter_token_latency_seconds"),
        Alias("vllm:time_per_output_token_seconds", "jsg:inter_token_latency_seconds"),
        Alias("vllm:e2e_request_latency_seconds", "jsg:e2e_request_latency_seconds"),
        Alias("vllm:request_queue_time_seconds", "jsg:queue_time_seconds"),
        Alias("vllm:request_prefill_time_seconds", "jsg:prefill_time_seconds"),
        Alias("vllm:request_decode_time_seconds", "jsg:decode_time_seconds"),
        Alias("vllm:request_prompt_tokens", "jsg:request_prompt_tokens"),
        Alias("vllm:request_generation_tokens", "jsg:request_generation_tokens"),
        Alias("vllm:request_params_max_tokens", "jsg:request_max_tokens"),
        Alias("vllm:request_max_num_generation_tokens", "jsg:request_max_tokens"),
    ),
}
"""The value of `--metrics-alias` → the series of that server."""

EVERYWHERE: dict[str, Mapping[str, str]] = {"sglang": {}, "vllm": {"engine": "0"}}
"""The value of `--metrics-alias` → the labels besides `model_name` that all series of that server have."""


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """An alias with all that is the same in each scrape.

    Attributes:
        alias: The alias.
        series: The description under their name.
        everywhere: The values of the labels that all samples have; they come before the others.
    """

    alias: Alias
    series: Series
    everywhere: tuple[str, ...]

    def samples(self, source: Family) -> dict[tuple[str, ...], tuple[float, ...]]:
        """The samples under their labels."""
        sums: dict[tuple[str, ...], tuple[float, ...]] = {}
        for values, numbers in source.samples.items():
            ours = dict(zip(source.series.labels, values, strict=True))
            if all(ours[label] in counted for label, counted in self.alias.only.items()):
                theirs = (*self.everywhere, *(ours[label] for label in self.alias.labels))
                sums[theirs] = tuple(map(operator.add, sums[theirs], numbers)) if theirs in sums else numbers
        return sums


@final
class AliasFamilies:
    """Families under the names of another server."""

    def __init__(self, server: str, model_name: str, known: Iterable[Series]) -> None:
        """Takes a value of `--metrics-alias` and all our series."""
        ours = {series.name: series for series in known}
        self._views = [_view(server, alias, ours[alias.source], model_name) for alias in ALIASES[server]]

    def of(self, families: Iterable[Family]) -> list[Family]:
        """The families under the names of that server. Families without such a name are left out."""
        present = {family.series.name: family for family in families}
        found: dict[str, Family] = {}
        for view in self._views:
            source = present.get(view.alias.source)
            if source is not None:
                before = found[view.alias.name].samples if view.alias.name in found else {}
                found[view.alias.name] = Family(view.series, {**before, **view.samples(source)})
        return [*found.values()]


def _view(server: str, alias: Alias, source: Series, model_name: str) -> _View:
    everywhere = {"model_name": model_name, **EVERYWHERE[server], **alias.constants}
    labels = (*everywhere, *alias.labels.values())
    text = f"{alias.source}, as {server} names it."
    return _View(alias, Series(alias.name, source.kind, text, labels, source.bounds), tuple(everywhere.values()))
