"""Models whose products are in e4m3, beside the same arithmetic in plain numpy: see `fp8_reference.py`."""

from pathlib import Path

import numpy as np
import pytest

from jsg.engine.device import fp8_kernels
from jsg.models.config import read_spec
from jsg.models.loading import load_model, with_kept
from tests.golden.compare import MAX_DIFFERENCE
from tests.models.fp8_reference import write_model
from tests.models.paged import PagedModel

PROMPT = list(range(63, 69))
"""None of its numbers is so near a tie that it is rounded apart; one that is makes logits differ by up to 0.04.

If numbers are off by a millionth before they are rounded, the definition's logits are the same to `MAX_DIFFERENCE`.
"""


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("experts", "blocks"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dense", "channel"), ("dense", "blocks"), ("experts", "channel"))
        ),
    ],
)
def test_logits_are_those_of_rounded_rows_and_restored_kernels(tmp_path: Path, shape: str, kind: str):
    """They are as near as those of a model in float32 are to its definition."""
    written = write_model(tmp_path / "model", shape, kind)
    spec = with_kept(written.directory, read_spec(written.directory))
    model = load_model(written.directory, spec)
    fp8_kernels.lay_out(model)
    found = PagedModel(spec, model).extend({0: PROMPT})[0]
    assert np.abs(found - written.logits(PROMPT)).max() < MAX_DIFFERENCE
    assert np.abs(found - written.logits(PROMPT, round_rows=False)).max() > 0.05
