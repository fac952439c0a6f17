"""The optimal hit rate against counting every node of the tree."""

import json
import pathlib
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from bench.optimum import common_prefix_len, optimum
from bench.shared_prefix import Workload

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


@given(PROMPTS)
def test_edges_are_the_distinct_prefixes(prompts: list[list[int]]):
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    best = optimum(prompts)
    assert (best.num_tokens, best.num_edges) == (sum(map(len, prompts)), len(prefixes))


@given(PROMPTS)
def test_order_does_not_matter(prompts: list[list[int]]):
    assert optimum(prompts) == optimum(reversed(prompts))


def test_common_prefix():
    pairs = ((b"", b"a"), (b"ab", b"ab"), (b"abc", b"abd"), (b"ab", b"abc"))
    assert [common_prefix_len(*pair) for pair in pairs] == [0, 2, 2, 2]


def test_the_workload_of_the_issue():
    workload = Workload()
    best = optimum(workload.prompts(16_384))
    assert (best.num_tokens, best.num_edges) == (64 * 544, 512 + 64 * 32)


def test_the_tool_reads_a_file(tmp_path: pathlib.Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, ([1, 2, 3, 4], [1, 2, 5, 6]))) + "\n")
    done = subprocess.run([sys.executable, "-m", "bench.optimum", file], capture_output=True, text=True, check=True)
    assert done.stdout == "8 prompt tokens, 6 to compute, hit rate at best 0.2500\n"
