"""What `bench.quantised` compares, and that it compares what its settings say."""

import json
import pathlib

import numpy as np
import pytest

from bench import quantised
from bench.quantised import Setting, compare


def test_divergence_and_agreement_are_by_position():
    exact = np.log([[0.5, 0.5], [0.9, 0.1]])
    other = np.log([[0.25, 0.75], [0.9, 0.1]])
    divergence, agrees = compare([exact, exact[:1]], [other, exact[:1]])
    np.testing.assert_allclose(divergence, [0.5 * np.log(4 / 3), 0, 0], atol=1e-12)
    assert agrees.tolist() == [False, True, True]


@pytest.mark.slow
def test_eight_bits_are_measured_against_the_published_model(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setattr(quantised, "SETTINGS", (Setting(), Setting(quantization="int8")))
    quantised.main(["--per-task", "1", "--output", str(tmp_path / "it.json")])
    same, eight_bits = json.loads((tmp_path / "it.json").read_text())["figures"]
    assert same["min"] == 0 and same["facts"]["same_likeliest"] == 1
    assert 0 < eight_bits["min"] < 1e-3 and eight_bits["facts"]["weight_bytes"] < 0.4 * same["facts"]["weight_bytes"]
