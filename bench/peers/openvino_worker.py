"""Generates with OpenVINO GenAI: `PYTHON openvino_worker.py FILE THREADS POOL_GIB ROWS`, FILE being GGUF.

The interpreter of `--openvino-python` runs this file, which imports nothing of jsg. It speaks as
`bench/pytorch/generate_worker.py` does; rows are batched by OpenVINO's own scheduler.
"""

import json
import sys
import time

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]


def generate(pipe: openvino_genai.LLMPipeline, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
    started = time.perf_counter()
    options = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
    ids = np.array(prompts, np.int64)
    rows = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    found = pipe.generate(rows, options)
    first_s = found.perf_metrics.get_ttft().mean / 1e3
    return {
        "output_tokens": [len(tokens) for tokens in found.tokens],
        "first_s": first_s,
        "last_s": time.perf_counter() - started,
    }


def main(path: str, num_threads: str, pool_gib: str, max_rows: str) -> None:
    schedule = openvino_genai.SchedulerConfig()
    schedule.cache_size, schedule.max_num_seqs = int(pool_gib), int(max_rows)
    schedule.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": int(num_threads)}
    pipe = openvino_genai.LLMPipeline(path, "CPU", scheduler_config=schedule, **properties)
    print(json.dumps({"openvino_genai": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(pipe, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
