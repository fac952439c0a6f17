"""Reads the record of a variant, and computes how far results are from it."""

import json
from typing import Any

import numpy as np

from tests.golden.record import DATA

MAX_DIFFERENCE = 5e-5


class Recorded:
    """One file of `data/`: its arrays, and the note in it."""

    def __init__(self, variant: str):
        with np.load(DATA / f"{variant}.npz", allow_pickle=False) as file:
            self.arrays = dict(file)
        self.note: dict[str, Any] = json.loads(str(self.arrays["note"]))
        self.tokens: list[int] = self.arrays["tokens"].tolist()
        self.greedy: list[int] = self.arrays["greedy"].tolist()

    def difference(self, logits: np.ndarray) -> float:
        """Largest absolute difference from the recorded logits of the whole prompt."""
        columns = np.abs(logits[:, self.arrays["columns"]] - self.arrays["column_logits"]).max()
        whole = np.abs(logits[self.arrays["whole_positions"]] - self.arrays["whole_logits"]).max()
        return float(max(columns, whole))
