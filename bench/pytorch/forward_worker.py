"""Hugging Face transformers in a process of its own, so that PyTorch and JAX never meet.

Run by the interpreter given as `--torch-python`; knows nothing of jsg. Reads one JSON object per line and answers with
one: first the model's configuration, then work: {"cached": tokens, "new": tokens, "batch": rows, "count": times}. Each
sample is one forward pass on a primed cache, its argmax read by the host: what `generate` does for one step, without
its Python around it.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import __version__ as transformers_version


class Worker:
    """A model with random weights, and the cache of the work it did last."""

    def __init__(self, fields: dict):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.config = LlamaConfig(**{k: v for k, v in fields.items() if k not in ("architectures", "model_type")})
        self.model = LlamaForCausalLM(self.config).eval()

    @torch.inference_mode()
    def samples(self, cached: int, new: int, batch: int, count: int) -> list[tuple[float, float]]:
        """(processor, wall) milliseconds of each run; the primed cache is put back in place between runs."""
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
    """Serves until its input ends."""
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
