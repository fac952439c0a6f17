"""A curve: how the processor time of something grows with its size, and how long its longest single call takes.

A topic is a module of this package with a tuple `CURVES`. The command finds every module that has one, so that a new
topic or curve needs no line elsewhere:

    def forks(size: int) -> Calls:
        state = prepared(size)              # is not timed
        yield lambda: state.fork(size)      # one timed call

    def a_stream(size: int) -> Calls:
        reader = Reader()
        for delta in deltas(size):          # each turn of the loop is one timed call: the longest is the worst stall
            yield lambda delta=delta: reader.add(delta)

    CURVES = (
        Curve("fork(n)", (250, 1000, 4000, 16000), forks),
        Curve("a stream of n tokens", (2000, 8000, 32000, 128000), a_stream),
    )

What stands between two `yield`s is not timed, and neither is what follows the last one, where a curve closes what it
opened. A call may return an `int`: a count of work, such as visited nodes. Their sums are reported beside the seconds,
and have an exponent too.

Times are processor time of all threads of this process, so other users of the machine hardly disturb them, and a
program's threads count. Python's garbage collector is off meanwhile: the server collects in its own time
(`jsg/server/garbage.py`), and its pauses depend on the whole heap and not on what is measured.
"""

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

Calls = Iterator[Callable[[], object]]
"""What is timed of one size, call by call."""

MIN_GROWTH = 2.0
"""Below this factor between the first size and the last, the time is as good as constant."""
MIN_SIZES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Something whose time is measured at several sizes.

    Attributes:
        name: What it is, with `n` for the size, such as "n forks inside of each other".
        sizes: Rising, each the same factor above the one before; at least three. The factor 4 over four sizes shows
            an exponent well, and the largest size should take 0.05 to 3 s of CPU if it is as fast as it should be.
        calls: Prepares a size, and yields what is timed, call by call.
        max_exponent: The bound of the exponent. 1.2 lets n log n pass; something flat has a lower one.
        max_stall_ms: The bound of the longest call at the largest size; None where one call does all the work and
            nobody waits for it, such as a thread of its own.
    """

    name: str
    sizes: tuple[int, ...]
    calls: Callable[[int], Calls]
    max_exponent: float = 1.2
    max_stall_ms: float | None = 50.0

    def __post_init__(self) -> None:
        factors = [after / before for before, after in itertools.pairwise(self.sizes)]
        assert len(self.sizes) >= MIN_SIZES and min(factors) > 1.5, f"{self.name}: at least three rising sizes"
        assert max(factors) < 1.01 * min(factors), f"{self.name}: sizes have one factor between them"


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """What one size took.

    Attributes:
        cpu_s: The processor time of all calls, the median of the repetitions.
        stall_ms: The processor time of the longest call, the median of the repetitions.
        work: The sum of what the calls counted; 0 where they count nothing.
    """

    size: int
    cpu_s: float
    stall_ms: float
    work: int


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A curve with its points."""

    curve: Curve
    points: tuple[Point, ...]

    @property
    def exponent(self) -> float:
        """The exponent of the processor time."""
        return exponent_of(self._sizes, [point.cpu_s for point in self.points])

    @property
    def work_exponent(self) -> float | None:
        """The exponent of the counted work; None where nothing is counted."""
        work = [point.work for point in self.points]
        return exponent_of(self._sizes, work) if all(work) else None

    @property
    def stall_ms(self) -> float:
        """The longest call at the largest size."""
        return self.points[-1].stall_ms

    def problems(self) -> list[str]:
        """What is beyond a bound, each as a sentence."""
        curve, found = self.curve, []
        for name, exponent in (("time", self.exponent), ("work", self.work_exponent)):
            if exponent is not None and exponent > curve.max_exponent:
                found.append(
                    f"{curve.name}: the {name} grows with exponent {exponent:.2f}; bound {curve.max_exponent:g}"
                )
        if curve.max_stall_ms is not None and self.stall_ms > curve.max_stall_ms:
            found.append(f"{curve.name}: one call takes {self.stall_ms:.0f} ms; bound {curve.max_stall_ms:g} ms")
        return found

    @property
    def _sizes(self) -> list[int]:
        return [point.size for point in self.points]


def exponent_of(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The exponent k of `constant + factor * size ** k`, from values at sizes with one factor between them.

    The constant falls out of the differences between neighbours, which grow with the same exponent. Of these the two
    uppermost count, because of several terms the largest exponent shows last. Where the values hardly grow, or noise
    hides the differences, it is the median slope of the upper values, which a constant makes smaller.
    """
    steps = [after - before for before, after in itertools.pairwise(values[-3:])]
    if values[-1] >= MIN_GROWTH * values[0] and min(steps) > 0:
        return _slope(sizes[-2:], steps)
    return _slope(sizes[-3:], values[-3:])


def measure(curve: Curve, *, repeats: int = 3, is_quick: bool = False) -> Measured:
    """Measures a curve; the smallest size runs once more before, so that no time is that of a first use.

    Args:
        curve: The curve.
        repeats: How often each size is measured.
        is_quick: Measures each size once, and not the largest one.
    """
    _run(curve, curve.sizes[0])
    sizes = curve.sizes[:-1] if is_quick and len(curve.sizes) > MIN_SIZES else curve.sizes
    return Measured(curve, tuple(_point(curve, size, 1 if is_quick else repeats) for size in sizes))


def _point(curve: Curve, size: int, repeats: int) -> Point:
    runs = [_run(curve, size) for _ in range(repeats)]
    return Point(
        size,
        statistics.median(run.cpu_s for run in runs),
        statistics.median(run.stall_ms for run in runs),
        runs[-1].work,
    )


def _run(curve: Curve, size: int) -> Point:
    """Runs all calls of a size once."""
    total = longest = work = 0
    gc.collect()
    gc.disable()
    try:
        for call in curve.calls(size):
            began = time.process_time_ns()
            counted = call()
            spent = time.process_time_ns() - began
            total += spent
            longest = max(longest, spent)
            work += counted if type(counted) is int else 0
    finally:
        gc.enable()
    return Point(size, total / 1e9, longest / 1e6, work)


def _slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points in a log-log plot."""
    points = [(math.log(size), math.log(max(value, 1e-9))) for size, value in zip(sizes, values, strict=True)]
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
