"""One model on two hosts answers as in one process (design §1.1), in every family: two processes on loopback."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import small
from tests.engine.hosts.ports import free_address
from tests.engine.shared_out import MAX_DIFFERENCE, SharedOut, answers
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint

FAMILIES = {
    "llama_gqa_head_dim": (4, {}),  # two devices on each host, and key-value heads that are there twice
    "mistral_window": (2, small.DETERMINISTIC),
    "mixtral": (2, small.DETERMINISTIC),
}
"""Devices, and knobs; deterministic mode has fewer programs."""


def answers_of_hosts(run: dict[str, Any], num_hosts: int = 2) -> dict[str, Any]:
    """The answers of an engine on a number of hosts, of which the leader is started last."""
    hosts = {"nnodes": num_hosts, "dist_init_addr": free_address(), "dist_timeout": 120.0}
    runs = [run | {"knobs": run["knobs"] | hosts | {"node_rank": rank}} for rank in reversed(range(num_hosts))]
    with ThreadPoolExecutor(num_hosts) as pool:
        *followers, (said,) = pool.map(answers, [[each] for each in runs])
    assert followers == [[None]] * (num_hosts - 1), "the others have followed to the end"
    return said


@pytest.mark.slow
def test_two_hosts_answer_as_two_devices_to_the_last_bit(shared_out: SharedOut):
    together = answers_of_hosts({**shared_out.run, "tp_size": 2})
    for part in ("tokens", "logprobs", "prompt_logprobs", "collectives"):
        assert together[part] == shared_out.by_count[2][part], part


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_the_tokens_are_those_of_one_process(tmp_path: Path, compile_cache_dir: str, variant: str):
    """They are long: two hosts answer as two devices to the last bit, and two devices as one."""
    write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 24}
    common["num_requests"] = 5
    count, common["knobs"] = FAMILIES[variant]
    (alone,) = answers([{**common, "tp_size": 1}])
    together = answers_of_hosts({**common, "tp_size": count})
    assert together["tokens"] == alone["tokens"]
    for scores in ("logprobs", "prompt_logprobs"):
        assert len(together[scores]) == len(alone[scores]) > 0
        assert np.abs(np.subtract(together[scores], alone[scores])).max() < MAX_DIFFERENCE
    assert together["collectives"]["forward"] == [2 * VARIANTS[variant]["num_hidden_layers"] + 1, 0, 0]


@pytest.mark.slow
def test_a_host_has_experts_of_its_own(tmp_path: Path, compile_cache_dir: str):
    write_checkpoint(tmp_path, "mixtral", random_tensors("mixtral", 0))
    common = {"variant": "mixtral", "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 12}
    (alone,) = answers([{**common, "tp_size": 1, "knobs": small.DETERMINISTIC}])
    together = answers_of_hosts(
        {**common, "tp_size": 2, "knobs": {"ep_size": 2, "speculative": "auto", **small.DETERMINISTIC}}
    )
    assert together["tokens"] == alone["tokens"]


@pytest.mark.slow
def test_8_bits_pages_and_retracts(tmp_path: Path, compile_cache_dir: str):
    variant = "llama_biases"
    write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 40}
    knobs = {"quantization": "int8", "page_size": 4, "max_total_tokens": 152, "schedule_conservativeness": 0.01}
    knobs |= small.DETERMINISTIC
    (alone,) = answers([{**common, "tp_size": 1, "knobs": knobs}])
    together = answers_of_hosts({**common, "tp_size": 2, "knobs": knobs})
    assert together["tokens"] == alone["tokens"] and together["stats"] == alone["stats"]
    assert together["stats"]["num_retracts"]
