"""Records the vectors of `embedding.py` as Qwen3-Embedding's users compute them with transformers.

Run by `record.py`, in the environment that has torch.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoTokenizer

from tests.golden.embedding import CONFIG, SEED, TEXTS, write_embedding_model


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_embedding_model(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
        with torch.no_grad():
            last = model(**batch).last_hidden_state[:, -1]
    whole = torch.nn.functional.normalize(last, dim=1)
    cut = torch.nn.functional.normalize(last[:, :24], dim=1)
    note = {"config": CONFIG, "seed": SEED, "torch": torch.__version__, "transformers": transformers.__version__}
    lens = batch["attention_mask"].sum(1).numpy().astype(np.int32)
    ids = np.concatenate([row[-count:] for row, count in zip(batch["input_ids"].numpy(), lens, strict=True)])
    arrays = {"lens": lens, "ids": ids.astype(np.int32), "states": last, "whole": whole, "cut": cut}
    np.savez_compressed(directory / "embedding.npz", note=np.array(json.dumps(note)), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
