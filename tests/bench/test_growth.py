"""The curves of `bench.growth`: their exponents by hand, and that what is beyond a bound ends with exit status 1."""

import itertools
import json
import pathlib
import time
from collections.abc import Callable

import pytest

from bench.growth import __main__ as growth
from bench.growth.curve import Calls, Curve, Measured, Point, exponent_of, measure

SIZES = (100, 400, 1600, 6400)


@pytest.mark.parametrize(
    ("value", "exponent"),
    [
        (lambda n: 3 * n, 1),
        (lambda n: 5000 + 3 * n, 1),
        (lambda n: 1e6 + 3 * n**2, 2),
        (lambda n: 1e5 + 1000 * n + 2 * n**2, pytest.approx(1.9, abs=0.1)),
        (lambda n: 2 * n**0.5, 0.5),
        (lambda n: 7, 0),
        (lambda n: 7 + n / 6400, pytest.approx(0.05, abs=0.05)),
        (lambda n: 8 - n / 6400, pytest.approx(0, abs=0.1)),
    ],
)
def test_exponents_by_hand(value: Callable[[int], float], exponent: float):
    assert exponent_of(SIZES, [value(n) for n in SIZES]) == pytest.approx(exponent, abs=0.01)


def measured(work: Callable[[int], int], stall_ms: float = 1, **bounds: float) -> Measured:
    curve = Curve("n things", SIZES, lambda _: iter(()), **bounds)
    return Measured(curve, tuple(Point(n, n / 1e3, stall_ms, work(n)) for n in SIZES))


def test_bounds():
    assert measured(lambda n: n).problems() == measured(lambda _: 0).problems() == []
    [problem] = measured(lambda n: n * n).problems()
    assert problem == "n things: the work grows with exponent 2.00; bound 1.2"
    assert "the time grows with exponent 1.00; bound 0.3" in measured(lambda _: 0, max_exponent=0.3).problems()[0]
    [problem] = measured(lambda n: n, stall_ms=80).problems()
    assert problem == "n things: one call takes 80 ms; bound 50 ms"
    assert measured(lambda n: n, stall_ms=80, max_stall_ms=None).problems() == []


def test_sizes_have_one_factor_between_them():
    with pytest.raises(AssertionError, match="n things: sizes have one factor"):
        Curve("n things", (1, 2, 8), lambda _: iter(()))


def quadratic(size: int) -> Calls:
    """`size` calls that each look at all things so far."""
    for number in range(size):
        yield lambda number=number: number


def test_a_curve_is_measured_call_by_call():
    done = measure(Curve("n looks", (8, 32, 128, 512), quadratic), repeats=1)
    assert [point.work for point in done.points] == [n * (n - 1) // 2 for n in (8, 32, 128, 512)]
    assert done.work_exponent == pytest.approx(2, abs=0.02)
    assert 0 <= done.stall_ms < 1e3 * done.points[-1].cpu_s
    assert len(measure(Curve("n looks", (8, 32, 128, 512), quadratic), is_quick=True).points) == 3


def broken(_: int) -> Calls:
    yield lambda: 1 // 0


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    topics = {
        "some": (Curve("n looks", (8, 32, 128), quadratic), Curve("n things", (1, 2, 4), lambda _: iter(()), 9)),
        "more": (Curve("n errors", (1, 2, 4), broken),),
    }
    monkeypatch.setattr(growth, "all_curves", lambda: topics)
    monkeypatch.setattr(time, "process_time_ns", itertools.count(0, 1000).__next__)
    file = tmp_path / "growth.json"
    assert growth.main(["--output", str(file)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "n looks: the work grows with exponent 2.01; bound 1.2",
        "n errors: it ended with ZeroDivisionError: integer division or modulo by zero",
    ]
    first, *_ = json.loads(file.read_text())["figures"]
    assert first["name"] == "n looks" and first["facts"]["sizes"] == [8, 32, 128] and first["facts"]["attempts"] == 3
    assert growth.main(["--only", "things", "--quick", "--output", str(file)]) == 0
    capsys.readouterr()
    assert growth.main(["--markdown", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| n things | 4 | 0 ms | 0.00 | 0 ms |"
    with pytest.raises(SystemExit):
        growth.main(["--only", "nothing"])


def test_every_topic_has_curves():
    topics = growth.all_curves()
    assert {"constrained", "flat", "lang"} <= topics.keys()
    names = [curve.name for curves in topics.values() for curve in curves]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.long
def test_no_curve_grows_too_fast(capsys: pytest.CaptureFixture[str]):
    assert growth.main([]) == 0, capsys.readouterr().err
