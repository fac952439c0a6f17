"""Records what the Hugging Face implementation computes for the checkpoints of `variants.py` and `vision_variants.py`.

    python -m tests.golden.record --torch-python PY [VARIANT ...]

PY is a Python 3.11 environment with torch==2.13.0 (CPU), transformers, numpy and safetensors. One file per variant, in
`data/`, at most 200 KB: token ids, logits (of all positions at some columns, of some positions whole), the greedy
continuation, and a JSON note with config, seed, versions and the weights' sha256; of a vision model also what its image
tokens are embedded as. For `embedding` it has vectors instead. `torch_side.py`, `vision_torch_side.py` and
`embedding_torch_side.py` are what PY runs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.golden.variants import VARIANTS
from tests.golden.vision_variants import VISION_VARIANTS

DATA = Path(__file__).parent / "data"
MAX_FILE_BYTES = 200_000
EMBEDDING = "embedding"


def main() -> None:
    parser = argparse.ArgumentParser(description="Record logits of the Hugging Face implementation.")
    parser.add_argument("--torch-python", required=True, help="interpreter of the environment that has torch")
    parser.add_argument(
        "variants", nargs="*", default=sorted({*VARIANTS, *VISION_VARIANTS, EMBEDDING}), help="default: all"
    )
    args = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    for module, known in (
        ("torch_side", VARIANTS),
        ("vision_torch_side", VISION_VARIANTS),
        ("embedding_torch_side", {EMBEDDING}),
    ):
        if chosen := [variant for variant in args.variants if variant in known]:
            command = [args.torch_python, "-m", f"tests.golden.{module}", str(DATA), *chosen]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    for variant in args.variants:
        num_bytes = (DATA / f"{variant}.npz").stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            sys.exit(f"{variant}.npz has {num_bytes} bytes, above {MAX_FILE_BYTES}; record fewer logits")


if __name__ == "__main__":
    main()
