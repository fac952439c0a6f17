"""The comparison of prefill attention runs where there is no GPU, and notices a side that is wrong."""

import functools

import jax
import pytest

from bench import prefill_attention

measure = functools.partial(prefill_attention.measure, 32, heads=4, kv_heads=2, head_dim=16, count=1)


@pytest.mark.slow  # a fast test below runs both sides too
@pytest.mark.parametrize("page_size", [1, 16], ids=lambda page_size: f"pages of {page_size}")
def test_every_side_that_a_cpu_can_run_gives_the_same_attention(page_size: int):
    sides = ("xla", f"ragged, pages of {page_size}")
    samples = measure("float32", sides=sides)
    assert list(samples) == list(sides)
    assert all(milliseconds > 0 for side in samples.values() for milliseconds in side)


def test_a_cpu_measures_what_is_compiled_for_it():
    assert list(measure("float32")) == ["xla"]


def test_cudnn_is_left_out_where_there_is_none(capsys: pytest.CaptureFixture[str]):
    assert list(measure("float32", sides=("xla", "cudnn"))) == ["xla"]
    assert "without cuDNN" in capsys.readouterr().err


def test_scores_that_would_fill_the_memory_are_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_attention, "MAX_SCORES", 4 * 32**2 - 1)
    assert not measure("float32")


def test_a_side_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def without_mask(queries: jax.Array, keys: jax.Array, values: jax.Array, *, implementation: str) -> jax.Array:
        return jax.nn.dot_product_attention(queries, keys, values)

    monkeypatch.setattr(prefill_attention, "_dense", without_mask)
    with pytest.raises(ArithmeticError, match="xla"):
        measure("float32", sides=("ragged, pages of 1", "xla"))
