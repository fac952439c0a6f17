"""Compares jsg with llama.cpp on small GGUF files: `python -m tests.gguf.beside_llama_cpp PYTHON`.

PYTHON is an interpreter of an environment with `xllamacpp`. It prints, for each architecture and with weights that are
whole and of all types, the largest difference of log-probabilities of 512 tokens after prompts of 8 to 96 tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from tests.gguf.models import kind_of, made
from tests.gguf.test_models import MORE, SAME
from tests.gguf.test_tokenizer import TEXTS
from tests.golden.variants import random_tokens
from tests.models.paged import PagedModel, load_directory

LENS = (8, 33, 96)
VARIANTS = [name for name in (*SAME, *MORE, "llama3_rope_v4") if name not in ("phi3", "mistral_window")]
"""Without heads of their own width, which llama.cpp's Phi-3 has not, and windows, which it does not see in a Llama."""


def theirs(python: str, path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    command = [python, str(Path(__file__).with_name("llama_side.py")), str(path)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder
        for variant in sys.argv[2:] or VARIANTS:
            for name, how in {"whole": lambda *_: "F32", "few bits": kind_of}.items():
                model = made(variant, how)
                path = model.write(Path(folder) / f"{variant}-{name}.gguf")
                directory = resolve_model(str(path))
                tokens = random_tokens(variant, 5, max(LENS))
                asked = {"prompts": [tokens[:length] for length in LENS], "size": 512, "texts": TEXTS}
                found = theirs(python, path, asked)
                if "error" in found:
                    print(variant, name, found["error"])
                    continue
                logits = PagedModel(*load_directory(directory)).extend({0: tokens})[0][np.array(LENS) - 1]
                ours = np.asarray(jax.nn.log_softmax(logits))
                tokenizer = load_tokenizer(directory)
                ids = [tokenizer.encode(text) for text in TEXTS]
                differs = np.abs(ours - np.array(found["scores"])).max()
                print(f"{variant:20} {name:9} {differs:.1e}  ids {'the same' if ids == found['ids'] else 'differ'}")


if __name__ == "__main__":
    main(sys.argv[1])
