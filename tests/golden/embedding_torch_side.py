"""Records vectors and scores for `embedding.py`, as Qwen3-Embedding and Qwen3-Reranker are used with transformers.

Run by `record.py`, in the environment that has torch.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from tests.golden.embedding import CONFIG, QUERY, SEED, TEXTS, write_embedding_model


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_embedding_model(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
        with torch.no_grad():
            last = model(**batch).last_hidden_state[:, -1]
        scores = [score(folder, tokenizer, text) for text in TEXTS]
    whole = torch.nn.functional.normalize(last, dim=1)
    cut = torch.nn.functional.normalize(last[:, :24], dim=1)
    note = {"config": CONFIG, "seed": SEED, "torch": torch.__version__, "transformers": transformers.__version__}
    lens = batch["attention_mask"].sum(1).numpy().astype(np.int32)
    ids = np.concatenate([row[-count:] for row, count in zip(batch["input_ids"].numpy(), lens, strict=True)])
    arrays = {"lens": lens, "ids": ids.astype(np.int32), "states": last, "whole": whole, "cut": cut, "scores": scores}
    np.savez_compressed(directory / "embedding.npz", note=np.array(json.dumps(note)), **arrays)


def score(folder: str, tokenizer: Any, document: str) -> float:
    """The share of yes, with the text that the card of Qwen3-Reranker puts around a query and a document."""
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    behind = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    pair = f"<Instruct>: {instruct}\n<Query>: {QUERY}\n<Document>: {document}"
    ids = [i for text in (before, pair, behind) for i in tokenizer.encode(text, add_special_tokens=False)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    labels = [tokenizer.convert_tokens_to_ids(label) for label in ("no", "yes")]
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, -1, labels].softmax(0)[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
