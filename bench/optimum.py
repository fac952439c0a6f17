"""Computes the best hit rate that any prefix cache could have: `python -m bench.optimum FILE`.

Every edge of the radix tree over all prompts must be computed exactly once. In sorted order the prefix that a prompt
shares with all prompts before it is the one that it shares with its neighbour, so the tree need not be built.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

Prompt = Sequence[int]


class Optimum(NamedTuple):
    """The number of tokens of all prompts, and how many of them must be computed."""

    num_tokens: int
    num_edges: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that need not be computed."""
        return 1 - self.num_edges / self.num_tokens if self.num_tokens else 0.0


def optimum(prompts: Iterable[Prompt]) -> Optimum:
    """What a cache without limits saves, in any order of the prompts."""
    in_order = sorted(tuple(prompt) for prompt in prompts)
    num_tokens = sum(map(len, in_order))
    shared = sum(common_prefix_len(left, right) for left, right in itertools.pairwise(in_order))
    return Optimum(num_tokens, num_tokens - shared)


def common_prefix_len(left: Prompt, right: Prompt) -> int:
    """The number of equal tokens at the beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.optimum", description=optimum.__doc__)
    parser.add_argument("file", type=Path, help="file with one prompt on each line, as a JSON list of token ids")
    lines = parser.parse_args().file.read_text(encoding="utf-8").splitlines()
    best = optimum(json.loads(line) for line in lines if line.strip())
    print(f"{best.num_tokens} prompt tokens, {best.num_edges} to compute, hit rate at best {best.hit_rate:.4f}")


if __name__ == "__main__":
    main()
