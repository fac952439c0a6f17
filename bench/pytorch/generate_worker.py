"""Generates with Hugging Face transformers: `PYTHON generate_worker.py DIRECTORY DTYPE THREADS WAY TOKENS`.

The interpreter of `--torch-python` runs this file, which imports nothing of jsg. It says its versions, then reads one
JSON object per line, {"prompts": lists of ids of one length, "max_tokens": tokens}, and answers each with one: the
tokens that each row has got, and, if they are seen, the seconds until the first and the last of them. WAY is "static"
or "continuous", and a continuous batch has keys and values of at most TOKENS.
"""

import functools
import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)
from transformers import __version__ as transformers_version

PAGE_TOKENS = 32


class Watch(StoppingCriteria):
    """Stops nothing, and notes when tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
    ids, watch, started = torch.tensor(prompts), Watch(), time.perf_counter()
    lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False}
    ends = {"eos_token_id": None, "pad_token_id": 0, "stopping_criteria": [watch]}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **ends)
    made = found.shape[1] - ids.shape[1]
    seen = {"first_s": watch.times[0] - started, "last_s": watch.times[-1] - started}
    return {"output_tokens": [made] * len(prompts), **seen}


def generate_continuously(
    model: torch.nn.Module, num_tokens: int, prompts: list[list[int]], max_tokens: int
) -> dict[str, object]:
    """Its thread ends with the batch, because it computes while it waits. Its keys and values stay for the next one."""
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pool = ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=num_tokens // PAGE_TOKENS)
    found = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=pool, persistent_manager=True
    )
    return {"output_tokens": [len(answer.generated_tokens) for answer in found.values()]}


def main(directory: str, dtype: str, num_threads: str, way: str, num_tokens: str) -> None:
    torch.set_num_threads(int(num_threads))
    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind, attn_implementation="sdpa").eval()
    if way == "continuous":
        answer = functools.partial(generate_continuously, model, int(num_tokens))
    else:
        answer = functools.partial(generate, model)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers_version}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
