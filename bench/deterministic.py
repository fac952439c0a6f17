"""Measures the cost of --deterministic: two engines do the same work, one with the option and one without."""

from pathlib import Path

from bench.clock import Timed, alternate, timed
from bench.loop import Decoding, make_decoding_engine, random_prompt
from bench.report import Report
from bench.shared_prefix import run_all
from jsg.engine.core import EngineCore

PROMPT_LEN = 256


def measure_deterministic(
    report: Report, directory: Path, *, batches: tuple[int, ...], rounds: int, steps: int
) -> None:
    """Times decode steps at each batch size, then the prefill of one prompt."""
    engines = {
        "default": make_decoding_engine(directory, max(batches), disable_radix_cache=True),
        "deterministic": make_decoding_engine(
            directory, max(batches), disable_radix_cache=True, deterministic=True, chunked_prefill_size=None
        ),
    }
    for batch in batches:
        decoding = {mode: Decoding(core, batch, PROMPT_LEN) for mode, core in engines.items()}
        sides = {mode: timed(lambda each=each: each.run(steps)) for mode, each in decoding.items()}
        _compare(report, f"decode B={batch}", sides, rounds=rounds, steps=steps)
        for each in decoding.values():
            each.end()
    sides = {mode: timed(lambda core=core: _prefill(core)) for mode, core in engines.items()}
    _compare(report, f"prefill T={PROMPT_LEN}", sides, rounds=rounds, steps=1)
    for core in engines.values():
        core.close()


def _compare(report: Report, name: str, sides: dict[str, Timed], *, rounds: int, steps: int) -> None:
    samples = alternate(sides, rounds=rounds, per_round=1, warm_up=1)
    figures = {
        mode: report.add(f"{name}, {mode}", "ms cpu", [sample.cpu_ms / steps for sample in samples[mode]])
        for mode in sides
    }
    ratio = figures["deterministic"].smallest / figures["default"].smallest
    report.add(f"{name}, deterministic / default", "x", [ratio])


def _prefill(core: EngineCore) -> None:
    run_all(core, [random_prompt(0, PROMPT_LEN, core.info.vocab_size)], 1)
