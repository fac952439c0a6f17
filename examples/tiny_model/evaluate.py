"""Score a model on the held-out cases of every task.

    python examples/tiny_model/evaluate.py jsg/assets/tiny

`evaluate` takes any callable that completes prompts, so the same cases judge this dense forward pass and a server.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from model import Params, TinyConfig, forward, load_model, logits
from tasks import EVALUATED, Case, Message, held_out_cases
from tokenizer import END, render_chat
from tokenizers import Tokenizer

Prompt = str | list[Message]
Complete = Callable[[list[Prompt]], list[str]]
MAX_NEW_TOKENS = 64


def is_right(case: Case, completion: str) -> bool:
    """Return whether a completion is the expected answer, exactly; raw text counts up to its first line break."""
    if isinstance(case.prompt, str):
        completion = completion.lstrip(" ").split("\n")[0]
    return completion.strip() == case.answer.strip()


def evaluate(complete: Complete, tasks: Sequence[str] = tuple(EVALUATED), count: int = 200) -> dict[str, float]:
    """Return the share of exact answers per task over `count` held-out cases each."""
    scores = {}
    for task in tasks:
        cases = held_out_cases(task, count)
        completions = complete([case.prompt for case in cases])
        scores[task] = sum(map(is_right, cases, completions)) / len(cases)
    return scores


def prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt, chat messages rendered for an answer."""
    return prompt if isinstance(prompt, str) else render_chat(prompt)


@partial(jax.jit, static_argnames=("config",))
def _next_tokens(params: Params, config: TinyConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the likeliest next token of every row [B], for rows of the given lengths."""
    hidden = forward(params, config, tokens)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(logits(params, last), axis=-1)


class DenseCompleter:
    """Greedy completion by recomputing every prefix: slow, and simple enough to trust."""

    def __init__(self, folder: Path, rows: int = 50) -> None:
        """Load the model's files; `rows` prompts are completed at once."""
        self.params, self.config = load_model(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.rows = rows

    def __call__(self, prompts: list[Prompt]) -> list[str]:
        """Return the completion of every prompt."""
        encoded = [self.tokenizer.encode(prompt_text(prompt)).ids for prompt in prompts]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        completions = [""] * len(prompts)
        for start in range(0, len(order), self.rows):
            chosen = order[start : start + self.rows]
            for index, text in zip(chosen, self._complete_rows([encoded[index] for index in chosen]), strict=True):
                completions[index] = text
        return completions

    def _complete_rows(self, prompts: list[list[int]]) -> list[str]:
        """Complete prompts of similar length together."""
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = lengths.copy()
        width = -(-(lengths.max() + MAX_NEW_TOKENS) // 64) * 64
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        end_id = self.tokenizer.token_to_id(END)
        active = np.ones(len(prompts), bool)
        for _ in range(MAX_NEW_TOKENS):
            # Only the columns in use are computed, in a few widths so that few shapes compile.
            used = min(width, -(-int(lengths.max()) // 64) * 64)
            chosen = np.asarray(_next_tokens(self.params, self.config, tokens[:, :used], lengths))
            active &= chosen != end_id
            if not active.any():
                break
            rows = np.flatnonzero(active)
            tokens[rows, lengths[rows]] = chosen[rows]
            lengths[rows] += 1
        pairs = zip(tokens, starts, lengths, strict=True)
        return [self.tokenizer.decode(row[start:stop].tolist()) for row, start, stop in pairs]


def main() -> None:
    """Print every task's score, and a few wrong answers if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="cases per task")
    parser.add_argument("--tasks", nargs="*", default=EVALUATED)
    parser.add_argument("--wrong", type=int, default=0, help="how many wrong answers to print per task")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()
    complete = DenseCompleter(args.folder)
    scores = {}
    for task in args.tasks:
        cases = held_out_cases(task, args.count)
        completions = complete([case.prompt for case in cases])
        right = [is_right(case, text) for case, text in zip(cases, completions, strict=True)]
        scores[task] = sum(right) / len(right)
        print(f"{task:16} {scores[task]:6.1%}", flush=True)
        wrong = [(case, text) for case, text, fine in zip(cases, completions, right, strict=True) if not fine]
        for case, text in wrong[: args.wrong]:
            print(f"    {prompt_text(case.prompt)[-160:]!r}\n      -> {text!r}, expected {case.answer!r}")
    if args.json:
        args.json.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
