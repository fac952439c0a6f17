"""What llama.cpp computes of a GGUF file: `PYTHON llama_side.py FILE`, where PYTHON has `xllamacpp`.

It reads prompts and texts as JSON from stdin, and prints the log-probabilities of all tokens after each prompt, and the
ids of each text.
"""

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]


def main(path: str) -> None:
    asked = json.load(sys.stdin)
    options = xllamacpp.CommonParams()
    options.model.path, options.hostnames, options.port = path, ["127.0.0.1"], 0
    options.n_ctx, options.n_parallel, options.warmup = 256, 1, False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(options)

    def ask(place: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + place, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    scores = []
    for prompt in asked["prompts"]:
        how = {"n_predict": 1, "n_probs": asked["size"], "temperature": -1, "cache_prompt": False}
        how["logit_bias"] = [[40, 1000.0]]  # an answer of half a character has no scores
        (first,) = ask("/completion", prompt=prompt, **how)["completion_probabilities"]
        by_id = {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}
        scores.append([by_id[i] for i in range(asked["size"])])
    ids = [ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in asked["texts"]]
    json.dump({"scores": scores, "ids": ids}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # its destructor may wait for ever


if __name__ == "__main__":
    main(sys.argv[1])
