"""Measures the cost of structured output and the gain of jump-forward, end to end: `python -m bench.jump_forward`.

It runs two programs of the SGLang paper, a character and a city as JSON with fixed white space, for a batch of
requests. Two kinds of output take turns: unconstrained output, with as many tokens as each request has with the
grammar, and constrained output with each mode of jump-forward. The wall time of `jsg.Engine.generate` is measured, so
the machine should be quiet.

The model "tiny" is the embedded one, which was trained on JSON. "100m" has random weights with one change, because all
tokens would otherwise be about equally likely, and drafts would be rejected by chance. Every hidden state has one large
constant component, which the head turns into a preference for longer tokens. A trained model has a similar preference
for the tokens that its tokenizer would write.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import jsg
from bench import settled
from bench.report import Report
from bench.shapes import LLAMA_100M, write_model

NAMES = r"[A-Za-z ]{1,16}"
CHARACTER = (
    rf'\{{"name": "{NAMES}", "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)", '
    r'"blood status": "(Pure-blood|Half-blood|Muggle-born)", "occupation": "(student|teacher|auror|minister)", '
    rf'"wand": \{{"wood": "{NAMES}", "core": "{NAMES}", "length": [0-9]{{1,2}}\.[0-9]\}}, '
    rf'"alive": "(Alive|Deceased)", "patronus": "{NAMES}", "bogart": "{NAMES}"\}}'
)
CITY = (
    rf'\{{"name": "{NAMES}", "country": "{NAMES}", "latitude": "-?[0-9]{{1,2}}\.[0-9]{{2}}", '
    rf'"population": [1-9][0-9]{{3,7}}, "top 3 landmarks": \["{NAMES}", "{NAMES}", "{NAMES}"\]\}}'
)
PROGRAMS = {"character": CHARACTER, "city": CITY}
PROMPTS = {"character": "Harry Potter is a character. As JSON:\n", "city": "Paris is a city. As JSON:\n"}
MODES = ("off", "draft", "retokenize")
RATIOS = (
    ("off", "unconstrained", "<= 1.05 at B=16"),
    ("off", "draft", ">= 1.5"),
    ("unconstrained", "draft", "> 1"),
    ("off", "retokenize", ">= 1.5"),
    ("unconstrained", "retokenize", "> 1"),
)
HEAD_SLOPE = 0.05  # the head's preference for each byte of a token


def make_100m(directory: Path) -> Path:
    """A checkpoint of about 100 million parameters with the sentencepiece vocabulary of `mistral-common`."""
    import mistral_common
    from safetensors.numpy import save_file

    from jsg.processing.tokenizer import load_tokenizer, vocabulary_bytes

    data = Path(mistral_common.__file__).parent / "data"
    shape = LLAMA_100M | {"vocab_size": 32_768, "bos_token_id": 1, "eos_token_id": 2}
    write_model(directory, shape)
    shutil.copy(next(data.glob("*.model.v3")), directory / "tokenizer.model")
    lengths = np.array([len(token) for token in vocabulary_bytes(load_tokenizer(directory))], np.float32)
    save_file(random_weights(shape, lengths), directory / "model.safetensors")
    return directory


def random_weights(shape: dict[str, Any], lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Random weights. Component 0 of the residual stream is constant, and only the head reads it."""
    random = np.random.default_rng(0)
    width, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns), np.float32) * 0.02).astype(np.float32)

    weights = {"model.norm.weight": np.ones(width, np.float32), "model.embed_tokens.weight": matrix(vocab, width)}
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["lm_head.weight"] = matrix(vocab, width)
    weights["lm_head.weight"][:, 0] = HEAD_SLOPE * np.pad(lengths, (0, vocab - len(lengths)))[:vocab]
    for layer in range(shape["num_hidden_layers"]):
        sizes = {
            "self_attn.q_proj": (heads * dim, width),
            "self_attn.k_proj": (kv_heads * dim, width),
            "self_attn.v_proj": (kv_heads * dim, width),
            "self_attn.o_proj": (width, heads * dim),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        for name, size in sizes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*size)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"][0] = 0.0  # nothing is added to the constant component
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    return weights


def run(
    engine: jsg.Engine, prompt: str, batch: int, params: dict[str, Any] | list[dict[str, Any]]
) -> tuple[float, list[int], float]:
    """Seconds, the output tokens of each request, and the share of forced tokens, beginning with an empty cache."""
    engine.flush_cache()
    prompts = [f"{prompt}{number}. " for number in range(batch)]
    started = time.perf_counter()
    answers = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    shares = [answer["meta_info"].get("constraint", {}).get("forced_share", 0.0) for answer in answers]
    return seconds, [answer["meta_info"]["completion_tokens"] for answer in answers], sum(shares) / batch


def measure(report: Report, model: str, engine: jsg.Engine, batch: int, rounds: int) -> None:
    for name, regex in PROGRAMS.items():
        prompt = PROMPTS[name]
        plain = {"temperature": 0.0, "regex": regex, "max_new_tokens": 400}
        _, lengths, _ = run(engine, prompt, batch, plain | {"jump_forward": "off"})
        free = [{"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
        variants: dict[str, Any] = {"unconstrained": free} | {mode: plain | {"jump_forward": mode} for mode in MODES}
        samples: dict[str, list[float]] = {variant: [] for variant in variants}
        facts: dict[str, dict[str, Any]] = {}
        for turn in range(rounds + 1):
            for variant, params in variants.items():
                seconds, lengths, _ = run(engine, prompt, batch, params)
                if turn:  # the first turn fills the caches of masks
                    samples[variant].append(1000 * seconds / sum(lengths))
                facts[variant] = {"tokens": sum(lengths)}
        for mode in MODES:  # not in the timed runs, because the report needs another program
            _, _, share = run(engine, prompt, batch, plain | {"jump_forward": mode, "return_constraint": True})
            facts[mode]["forced_share"] = share
        label = f"{model} B={batch} {name}"
        medians = {
            variant: report.add(f"{label}: {variant}", "ms/tok", values, **facts[variant]).median
            for variant, values in samples.items()
        }
        for above, below, target in RATIOS:
            ratio = medians[above] / medians[below]
            report.add(f"{label}: {above} / {below}", "ratio", [ratio], target=target)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.jump_forward",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny,100m", help="tiny, 100m, or both, separated by a comma")
    parser.add_argument("--batch", default="1,16", help="numbers of requests at once, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="how many times each side is timed")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    options = parser.parse_args(arguments)
    report = Report("bench.jump_forward", arguments, options.output, programs=json.dumps(sorted(PROGRAMS)))
    for model in options.model.split(","):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = "tiny" if model == "tiny" else str(make_100m(directory))
            engine = stack.enter_context(
                settled.compiled_engine(path, max_running_requests=32, max_total_tokens=16_384)
            )
            for batch in map(int, options.batch.split(",")):
                measure(report, model, engine, batch, options.rounds)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
