"""The plot shows what a run of `bench.device` has measured, and nothing else."""

import json
import pathlib

import pytest

from bench import plot_roofline

HEADER = {"cpu": "a processor", "plan": "trial", "date": "2026-11-20T00:00:00", "commit": "abc"}


def figure(name: str, kind: str, samples: list[float], **facts: object) -> dict[str, object]:
    return {"name": name, "unit": "ms", "min": min(samples), "samples": samples, "facts": {"kind": kind} | facts}


RUN = {
    "header": HEADER,
    "figures": [
        figure("copy", "copy", [900.0, 1000.0]),
        figure("matmul", "matmul", [50.0, 100.0]),
        figure("decode B=1", "decode", [2.0, 4.0], num_flops=2e9, num_bytes=1e9, of_floor=0.5),
        figure("attention B=1", "attention", [700.0], ms=0.5, num_flops=1e9, num_bytes=5e8, of_floor=0.7),
        figure("prefill T=64", "prefill", [1.0], num_flops=8e10, num_bytes=1e9),
        figure("sample", "sampling", [1.0]),
    ],
}


def test_a_point_is_what_was_done_by_what_was_moved():
    points = {point.name: point for point in plot_roofline.points(RUN["figures"])}
    assert set(points) == {"decode B=1", "attention B=1", "prefill T=64"}
    assert points["decode B=1"].intensity == 2 and points["decode B=1"].flops_per_s == 1e12
    assert points["attention B=1"].flops_per_s == 2e12, "its samples are rates; its time is a fact"
    assert points["prefill T=64"].of_floor is None


def test_draws_roofs_and_floors(tmp_path: pathlib.Path):
    source, first, second = tmp_path / "run.json", tmp_path / "a.svg", tmp_path / "b.svg"
    source.write_text(json.dumps(RUN))
    for image in (first, second):
        plot_roofline.main([str(source), "-o", str(image)])
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    for shown in ("copy 1000 GB/s", "matmul 100 TFLOP/s", "decode B=1", "attention B=1", "a processor", "2026-11-20"):
        assert shown in text, shown
    assert "sample" not in text


@pytest.mark.parametrize("missing", ["copy", "matmul", "decode B=1"])
def test_without_rates_or_steps_there_is_nothing_to_draw(missing: str):
    kept = [each for each in RUN["figures"] if each["name"] != missing]
    if missing == "decode B=1":
        kept = kept[:2]
    with pytest.raises(ValueError, match="parts rates and steps"):
        plot_roofline.draw({"header": HEADER, "figures": kept})
