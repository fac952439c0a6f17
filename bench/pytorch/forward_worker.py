"""Runs Hugging Face transformers in a separate process, so that PyTorch and JAX never share one.

The interpreter of `--torch-python` runs this file, which imports nothing of jsg. It reads one JSON object per line and
answers each with one: first the model's configuration, then work: {"cached": tokens, "new": tokens, "batch": rows,
"count": times}. Each sample is one forward pass on a filled cache, whose argmax the host reads. `generate` does the
same for one step, with more Python around it.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import __version__ as transformers_version


class Worker:
    """A model with random weights, and the cache of its last work."""

    def __init__(self, fields: dict):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.config = LlamaConfig(**{k: v for k, v in fields.items() if k not in ("architectures", "model_type")})
        self.model = LlamaForCausalLM(self.config).eval()

    @torch.inference_mode()
    def samples(self, cached: int, new: int, batch: int, count: int) -> list[tuple[float, float]]:
        """(processor, wall) milliseconds of each run. The filled cache is restored between runs."""
        tokens = torch.randint(self.config.vocab_size, (batch, new))
        shape = (batch, self.config.num_key_value_heads, cached, self.config.head_dim)
        primed = [(torch.randn(shape), torch.randn(shape)) for _ in range(self.config.num_hidden_layers)]
        found = []
        for _ in range(count):
            cache = DynamicCache(config=self.config)
            if cached:
                for layer, (keys, values) in enumerate(primed):
                    cache.update(keys, values, layer)
            cpu, wall = time.process_time(), time.perf_counter()
            logits = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            logits[:, -1].argmax(-1).tolist()
            found.append(((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3))
        return found


def main() -> None:
    """Answers until standard input ends."""
    worker = Worker(json.loads(sys.stdin.readline()))
    parameters = sum(parameter.numel() for parameter in worker.model.parameters())
    answer(torch=torch.__version__, transformers=transformers_version, num_parameters=parameters)
    for line in sys.stdin:
        answer(samples=worker.samples(**json.loads(line)))


def answer(**fields: object) -> None:
    """Writes one line."""
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
