"""The parts of `bench.engine` on a model so small that only what they do counts, not how long it takes."""

import pathlib

import pytest

from bench import engine, null_model
from bench.clock import Sample, alternate
from bench.loop import Decoding, make_decoding_engine
from bench.report import Report
from bench.shapes import write_model
from bench.shared_prefix import Workload, measure_shared_prefix

SHAPE = null_model.SHAPE | {"vocab_size": 1024}
"""It is larger than that of the bench, so that random prompts have no beginning in common by chance."""


@pytest.fixture
def report() -> Report:
    return Report("bench.engine", [], None)


def test_sides_take_turns():
    order = []

    def side(name: str):
        def run(count: int) -> list[Sample]:
            order.extend([name] * count)
            return [Sample(len(order), 0.0)] * count

        return run

    samples = alternate({"a": side("a"), "b": side("b")}, rounds=2, per_round=2, warm_up=1)
    assert "".join(order) == "ab" + "aabb" * 2
    assert {name: len(each) for name, each in samples.items()} == {"a": 4, "b": 4}


@pytest.mark.usefixtures("late")
def test_shared_prefix_reaches_the_optimum(report: Report, tmp_path: pathlib.Path):
    workload = Workload(num_requests=6, shared_len=40, own_len=8, output_len=2)
    directory = write_model(tmp_path, SHAPE)
    measure_shared_prefix(
        report, directory, rounds=1, workload=workload, max_running_requests=4, chunked_prefill_size=64
    )
    figures = {figure.name: figure for figure in report.figures}
    hit_rate = figures["hit rate"]
    assert hit_rate.facts["optimum"] == pytest.approx(1 - (40 + 6 * 8) / (6 * 48))
    assert 0.96 <= hit_rate.facts["of_optimum"] <= 1
    shared, unshared = (figures[f"6 requests {how}"] for how in ("with the radix cache", "with --disable-radix-cache"))
    assert shared.facts["steps"] < unshared.facts["steps"]
    (ratio,) = figures["throughput, shared / unshared"].samples
    assert ratio == pytest.approx(unshared.samples[0] / shared.samples[0])


@pytest.mark.usefixtures("late")
def test_decoding_does_nothing_but_decode(tmp_path: pathlib.Path):
    core = make_decoding_engine(write_model(tmp_path, SHAPE), 2, chunked_prefill_size=64)
    decoding = Decoding(core, 2, 20)
    before = decoding.context_lens
    decoding.run(5)
    assert decoding.context_lens == [length + 5 for length in before]
    assert core.stats()["num_running"] == 2
    decoding.end()
    assert not core.has_work
    core.close()


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        engine._options(["--only", "decode,prefil"])
    assert "the parts are decode, prefill" in capsys.readouterr().err
