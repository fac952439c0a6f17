"""Score a model on the held-out cases of every kind of question.

    python examples/tiny_vision/evaluate_vision.py jsg/assets/tiny-vision

`evaluate` takes any callable that answers questions about pictures, so the same cases judge this dense forward pass
and an engine.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from questions import KINDS, Case, held_out_cases
from scenes import draw
from tokenizers import Tokenizer
from tower import forward, load_model, preprocess, text_model

Complete = Callable[[list[tuple[Image.Image, str]]], list[str]]
SIDE = 120
"""Pixels of a side of the pictures that are shown; the model's own tiles are smaller."""
MAX_NEW_TOKENS = 56


def is_right(case: Case, completion: str) -> bool:
    """Whether a completion is the expected answer, exactly."""
    return completion.strip() == case.question.answer


def evaluate(complete: Complete, kinds: Sequence[str] = tuple(KINDS), count: int = 100) -> dict[str, float]:
    """The share of exact answers per kind over `count` held-out cases each."""
    scores = {}
    for kind in kinds:
        cases = held_out_cases(kind, count)
        completions = complete([(draw(case.scene, SIDE), case.question.prompt) for case in cases])
        scores[kind] = sum(map(is_right, cases, completions)) / len(cases)
    return scores


@partial(jax.jit, static_argnames=("configs",))
def _next_tokens(tower, text, configs, pixels, tokens, lengths) -> jax.Array:
    """The likeliest next token of every row [B], for rows of the given lengths."""
    hidden = forward(tower, text, configs, pixels, tokens)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(text_model.logits(text, last), axis=-1)


class DenseCompleter:
    """Greedy answers by recomputing every prefix: slow, and simple enough to trust."""

    def __init__(self, folder: Path) -> None:
        """Load the model's files."""
        self.tower, self.text, self.configs = load_model(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, prompts: list[tuple[Image.Image, str]]) -> list[str]:
        """The answer to every question about its picture; all of them at once."""
        tower_config, text_config = self.configs
        patches, end_id = tower_config.num_patches, self.tokenizer.token_to_id("<|end|>")
        pixels = np.stack([preprocess(image, tower_config) for image, _ in prompts])
        tokens = np.zeros((len(prompts), 128), np.int32)
        lengths = np.zeros(len(prompts), np.int32)
        for row, (_, question) in enumerate(prompts):
            first = text_config.vocab_size + row * patches
            before = self.tokenizer.encode("<|user|>").ids
            after = self.tokenizer.encode(f"{question}<|end|><|assistant|>").ids
            ids = [*before, *range(first, first + patches), *after]
            lengths[row] = len(ids)
            tokens[row, : len(ids)] = ids
        starts, active = lengths.copy(), np.ones(len(prompts), bool)
        for _ in range(MAX_NEW_TOKENS):
            used = min(128, -(-int(lengths.max() + 1) // 32) * 32)  # few widths, so that few shapes compile
            chosen = np.asarray(_next_tokens(self.tower, self.text, self.configs, pixels, tokens[:, :used], lengths))
            active &= chosen != end_id
            if not active.any():
                break
            rows = np.flatnonzero(active)
            tokens[rows, lengths[rows]] = chosen[rows]
            lengths[rows] += 1
        answers = zip(tokens, starts, lengths, strict=True)
        return [self.tokenizer.decode(row[start:stop].tolist()) for row, start, stop in answers]


def main() -> None:
    """Print every kind's score, and a few wrong answers if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="cases per kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--wrong", type=int, default=0, help="how many wrong answers to print per kind")
    args = parser.parse_args()
    complete = DenseCompleter(args.folder)
    for kind in args.kinds:
        cases = held_out_cases(kind, args.count)
        completions = complete([(draw(case.scene, SIDE), case.question.prompt) for case in cases])
        wrong = [(case, text) for case, text in zip(cases, completions, strict=True) if not is_right(case, text)]
        print(f"{kind:10} {1 - len(wrong) / len(cases):6.1%}", flush=True)
        for case, text in wrong[: args.wrong]:
            print(f"    {case.question.prompt!r} -> {text!r}, expected {case.question.answer!r}")


if __name__ == "__main__":
    main()
