"""What to do next, from what was measured and what failed. Each piece of advice gives its reason. No JAX here.

The most important comes first: what is broken, what is wrong, what is slow, and last what was not measured at all.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from bench.device.catalogue import PARTS, Entry
from bench.device.failures import GONE, Failure, Kind
from bench.device.results import Record, figures_of
from bench.device.summary import Figures, targets
from bench.report import Figure
from jsg.extras import install_command

WANTED_OF_FLOOR = 0.8
WORTH = 1.03
"""How many times as fast another choice must be before a default is worth changing."""
SPREAD = 1.2
"""How many times the best sample of a rate may be the median before the device is not a quiet one."""
MOST_NAMED = 4
COMMAND = "python -m bench.device"
OF_GPU = {
    "device": f"install JAX for CUDA ({install_command('cuda')}) into the environment of this interpreter, look "
    "whether nvidia-smi shows a driver of 580 or newer, and run the same command again",
    "messages": "docs/nvidia.md, 'When something is wrong', has the messages",
    "compile": "if it needs too much shared memory, lower block_k or num_stages of its kernel in {sizes}",
    "wrong": "find the smallest case that is wrong with make test-gpu, and compare it with "
    "implementation='reference'; try other sizes of its blocks in {sizes}",
    "crash": "repeat it under compute-sanitizer ({again}), with CUDA_LAUNCH_BLOCKING=1 so that the error names the "
    "kernel",
    "hang": "TF_CPP_VMODULE=command_buffer_thunk=3,gpu_executable=3 CUDA_LAUNCH_BLOCKING=1 ",
    "memory": "see with nvidia-smi whether another process holds memory",
    "quiet": "see with nvidia-smi -q -d PERFORMANCE,CLOCK whether the card is throttled, and whether anything else "
    "runs on it",
    "page": "docs/nvidia.md",
}
"""What to do on a GPU, where it differs by platform."""
OF_TPU = OF_GPU | {
    "device": f"install JAX for TPUs ({install_command('tpu')}) into the environment of this interpreter, unset "
    "JAX_PLATFORMS, and run the same command again",
    "messages": "docs/tpu.md says what a start needs",
    "compile": "if it needs too much vector memory, lower the block sizes of its kernel in jsg/kernels_pallas",
    "wrong": "compare the smallest case that is wrong with implementation='reference', and with the kernel in Pallas' "
    "interpret mode on a CPU; try other block sizes",
    "crash": "repeat it alone ({again})",
    "hang": "",
    "memory": "see whether another process has the chips",
    "quiet": "see whether anything else runs on the machine",
    "page": "docs/tpu.md",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do.

    Attributes:
        what: What was found.
        do: What to do about it.
        why: Why that, and what it means for the figures.
    """

    what: str
    do: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """All that is known of a run.

    Attributes:
        records: Those that count, in the order of the catalogue.
        omitted: The parts that did not run, and why.
        card: The name of the device.
        parts: The catalogue.
    """

    records: Mapping[str, Record]
    omitted: Mapping[str, str]
    card: str
    parts: Mapping[str, Entry] = dataclasses.field(default_factory=lambda: PARTS)

    def do(self, what: str, **fields: str) -> str:
        """What to do on this platform."""
        return (OF_TPU if self.card.startswith("TPU") else OF_GPU)[what].format(**fields)

    def header(self, field: str, default: str) -> str:
        """A field that some part has sent for the head of the report."""
        return str(next((each.header[field] for each in self.records.values() if field in each.header), default))

    def reasons(self, kind: Kind, of: str) -> list[str]:
        """The failures of one kind in one part, as text without the part's name."""
        return [failure.reason.removeprefix(f"{of}: ") for name, failure in self.failures(kind) if name == of]

    def failures(self, kind: Kind) -> Iterator[tuple[str, Failure]]:
        """The failures of one kind, with their parts."""
        for name, record in self.records.items():
            yield from ((name, failure) for failure in record.failures if failure.kind is kind)

    @property
    def block_sizes(self) -> str:
        """The file that has the sizes of the kernels' blocks on this card."""
        return self.header("block_sizes", "the file of the card's class in jsg/kernels_pallas/tuning")


def advise(run: Run) -> list[Advice]:
    """Everything to do, the most important first. Nothing is concluded from speeds that should not be trusted."""
    doubts = distrusted(run)
    figures = Figures(figures_of(record for name, record in run.records.items() if name not in doubts))
    rules = (_device, _compile, _wrong, _crash, _hang, _memory, _other, _interrupted)
    found = [advice for rule in rules for advice in rule(run)]
    for rule in (_spread, _steps, _engine, _attention, _prefill, _options, _cascade, _types, _others, _programs):
        found += rule(run, figures)
    found += _missing(run)
    has_all = all(record.is_done for record in run.records.values()) and not any(map(_waits, run.omitted.values()))
    return [*found, *([_finished(run)] if has_all else [])]


def distrusted(run: Run) -> dict[str, str]:
    """For each part whose figures should not be trusted or are not those of a kernel, the reason."""
    wrong = _wrong_ops(run)
    found = {}
    for name, record in run.records.items():
        if name != "correct" and (ops := sorted(wrong.keys() & set(run.parts[name].ops))):
            found[name] = f"its kernels gave wrong numbers: {', '.join(ops)}"
        elif ops := sorted(set(record.by_reference) & set(run.parts[name].ops)):
            found[name] = f"computed by the slow reference: {', '.join(ops)}"
    return found


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def _device(run: Run) -> Iterator[Advice]:
    if any("JAX found no other device" in reason for reason in run.omitted.values()):
        yield Advice(
            f"JAX runs on the CPU, though {run.card} was expected",
            run.do("device"),
            f"nothing was measured on the device; {run.do('messages')}",
        )


def _compile(run: Run) -> Iterator[Advice]:
    """One piece for each operation; for failures that name none, one for each part."""
    groups: dict[str, list[Failure]] = collections.defaultdict(list)
    for name, failure in run.failures(Kind.COMPILE):
        groups[failure.op or f"a kernel of part {name}"].append(failure)
    for subject, failures in groups.items():
        known = any(failure.op for failure in failures)
        rest = "the other parts were measured with the reference in its place, which is slow" if known else ""
        yield Advice(
            f"{subject} does not compile for the {run.card}: {_named([each.reason for each in failures])}",
            f"{run.do('compile', sizes=run.block_sizes)}; if a "
            "type is refused, let the operation raise NotImplementedError for it; then run the same command again, "
            "which repeats every part because the code has changed",
            rest or "figures that need it are missing",
        )


def _wrong_ops(run: Run) -> dict[str, list[str]]:
    """Operations with wrong results, and in which cases."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for record in run.records.values():
        for figure in record.figures:
            if figure.facts.get("kind") == "error" and not figure.facts["is_right"]:
                case = f"{figure.name}: {max(figure.samples):.2g}, at most {figure.facts['at_most']:g}"
                found[figure.facts.get("op", figure.name)].append(case)
        for failure in record.failures:
            if failure.kind is Kind.WRONG and failure.op:
                found[failure.op].append(failure.reason)
    return found


def _wrong(run: Run) -> Iterator[Advice]:
    wrong = _wrong_ops(run)
    for op, cases in wrong.items():
        parts = [name for name in run.records if name != "correct" and op in run.parts[name].ops]
        yield Advice(
            f"{op} computes wrong numbers on the {run.card}: {_named(cases)}",
            run.do("wrong", sizes=run.block_sizes),
            f"do not trust the speeds of {', '.join(parts) or 'whatever uses it'}: a wrong kernel may be fast",
        )
    others = [failure.reason for _, failure in run.failures(Kind.WRONG) if not failure.op]
    unnamed = [reason for reason in others if "wrong on this device" not in reason]
    if unnamed:
        yield Advice(
            f"wrong results: {_named(unnamed)}",
            "look for the operation that they have in common, and report it with run.log",
            "a wrong result is worth nothing however fast it is",
        )


def _crash(run: Run) -> Iterator[Advice]:
    for name in dict.fromkeys(name for name, _ in run.failures(Kind.CRASH)):
        reason = _named(run.reasons(Kind.CRASH, name))
        if "exit status -9" in reason:
            yield Advice(
                f"{name} was killed from outside: {reason}",
                "look in the kernel's log (dmesg) whether the machine ran out of memory, which is the usual cause",
                "nothing in the part itself failed",
            )
        elif re.search(GONE, reason, re.IGNORECASE):
            yield Advice(
                f"{name} lost the device: {reason}",
                "look whether another process has it; else restart the machine; then run the same command again",
                "a device that is gone answers no later part either; what was measured before is kept",
            )
        else:
            yield Advice(
                f"{name} crashed: {reason}",
                f"read its last lines in run.log; {run.do('crash', again=f'{COMMAND} --only {name} --again {name}')}",
                "a kernel that reads or writes where it must not ends the process, and not always at its own launch",
            )


def _hang(run: Run) -> Iterator[Advice]:
    for name, failure in run.failures(Kind.HANG):
        where = "run.log shows where each thread stood" if run.parts[name].run else "the worker writes no stacks"
        yield Advice(
            f"{name} hung: {failure.reason.removeprefix(f'{name}: ')}",
            f"{where}; repeat it with TF_CPP_MIN_LOG_LEVEL=0 {run.do('hang')}{COMMAND} --only {name} --again {name}; "
            "if it is only slow, raise its limit_s in bench/device/catalogue.py",
            f"it may hang, or take longer than its {run.parts[name].limit_s:g} s; what it sent before is kept",
        )


def _memory(run: Run) -> Iterator[Advice]:
    for name in dict.fromkeys(name for name, _ in run.failures(Kind.MEMORY)):
        reasons = run.reasons(Kind.MEMORY, name)
        figures = ", ".join(run.parts[name].figures) or "the largest figures"
        note = " (it ran by the reference, which needs more memory)" if run.records[name].by_reference else ""
        yield Advice(
            f"{name} ran out of memory{note}: {_named(reasons)}",
            f"{run.do('memory')}; else lower {figures} of the plan in "
            "bench/device/plan.py, or its FIT_FRACTION, which gives the model fewer layers, and run the same command",
            "these figures of the plan decide how much memory the part needs",
        )


def _other(run: Run) -> Iterator[Advice]:
    for name in dict.fromkeys(name for name, _ in run.failures(Kind.OTHER)):
        reasons = run.reasons(Kind.OTHER, name)
        yield Advice(
            f"{name} failed: {_named(reasons)}",
            f"read its traceback in run.log; the same command tries it once more, then --again {name} does",
            "the error is of no kind that this report knows",
        )


def _interrupted(run: Run) -> Iterator[Advice]:
    for name, record in run.records.items():
        if not record.has_ended:
            yield Advice(
                f"the whole run ended in the middle of {name}",
                "run the same command again: it begins with what is left",
                f"it began {record.attempts} times; after the second time only --again {name} repeats it, because a "
                "part that takes the machine down would do so each time",
            )


def _spread(run: Run, figures: Figures) -> Iterator[Advice]:
    for kind in ("copy", "matmul"):
        figure = figures.first(kind=kind)
        if figure is not None and max(figure.samples) > SPREAD * figure.median:
            yield Advice(
                f"{figure.name}: the best sample is {max(figure.samples) / figure.median:.2f} times the median",
                f"{run.do('quiet')}; then repeat everything",
                "every floor follows from this rate, and a device that is not quiet has no sure figures",
            )


def _kernel(figures: Figures, rows: int) -> str:
    """The kernel that takes the most time of a decode step of about so many rows, as the profile has it."""
    traced = figures.all(kind="profile")
    if not traced:
        return f"{COMMAND} --only profile names its kernels"
    nearest = min({figure.facts["rows"] for figure in traced}, key=lambda each: abs(each - rows))
    largest = max(figures.all(kind="profile", rows=nearest), key=lambda figure: figure.facts["share"])
    return f"{largest.facts['share']:.0%} of a step of {nearest} rows is {largest.facts['kernel']}: begin there"


def _steps(run: Run, figures: Figures) -> Iterator[Advice]:
    slow = [each for each in figures.all(kind="decode") if each.facts.get("of_floor", 1.0) < WANTED_OF_FLOOR]
    if slow:
        slowest = min(slow, key=lambda figure: figure.facts["of_floor"])
        names = [f"{figure.name}: {figure.facts['of_floor']:.0%}" for figure in slow]
        yield Advice(
            f"decode steps reach less than {WANTED_OF_FLOOR:.0%} of their floor: {_named(names)}",
            f"trace them: jsg serve MODEL --profile-dir DIR under load; {_kernel(figures, slowest.facts['rows'])}",
            "the floor is the time to read the weights, keys and values once at the bandwidth of the same call",
        )


def _engine(run: Run, figures: Figures) -> Iterator[Advice]:
    for row in targets(figures.all()):
        if row.what.startswith("through the engine") and not row.is_met:
            note = " (figures of two calls: repeat both in one first)" if row.is_across_calls else ""
            yield Advice(
                f"{row.what}: {row.ratio:.0%} of the speed of the bare step{note}",
                "look for gaps between steps in a trace (--profile-dir), and for host work: python -m bench.sched",
                "the device waits for the host where the engine is slower than its own programs",
            )


def _attention(run: Run, figures: Figures) -> Iterator[Advice]:
    slow = [each for each in figures.all(kind="attention") if each.facts.get("of_floor", 1.0) < WANTED_OF_FLOOR]
    if slow:
        names = [f"{figure.name}: {figure.facts['of_floor']:.0%}" for figure in slow]
        yield Advice(
            f"paged_decode reads at less than {WANTED_OF_FLOOR:.0%} of the copy bandwidth: {_named(names)}",
            f"try other splits, block_k, num_warps and num_stages for these rows in {run.block_sizes}, and write down "
            "there how they were measured",
            "sizes that were only compiled, or measured on another card, are guesses",
        )


def _prefill(run: Run, figures: Figures) -> Iterator[Advice]:
    for length in sorted({figure.facts["length"] for figure in figures.all(kind="attention-prefill")}):
        gains: dict[str, list[float]] = collections.defaultdict(list)
        for cached in {each.facts["cached"] for each in figures.all(kind="attention-prefill", length=length)}:
            found = figures.all(kind="attention-prefill", length=length, cached=cached)
            ms = {each.facts["implementation"]: each.smallest for each in found}
            for name in ("cudnn", "mosaic"):
                if name in ms and "triton" in ms:
                    gains[name].append(ms["triton"] / ms[name])
        name = max(gains, key=lambda name: max(gains[name]), default=None)
        if name and max(gains[name]) > WORTH and min(gains[name]) > 1 / WORTH:
            yield Advice(
                f"attention of a chunk of {length} tokens is up to {max(gains[name]):.2f} times as fast with {name}, "
                "nowhere slower",
                f'set by_{name} of "chunks" in {run.block_sizes} from these rows on, and measure the whole model '
                f"({COMMAND} --only steps --again steps)",
                "attention is about a third of a long prefill",
            )


def _options(run: Run, figures: Figures) -> Iterator[Advice]:
    compared: dict[str, dict[int, Figure]] = collections.defaultdict(dict)
    for figure in figures.all(kind="compare"):
        compared[figure.name.rpartition(", ")[2]][figure.facts["rows"]] = figure
    base = compared.pop("xla-engine", {})
    for name, sides in compared.items():
        gains = {
            rows: base[rows].smallest / figure.smallest
            for rows, figure in sides.items()
            if rows in base and figure.facts.get("call") == base[rows].facts.get("call")
        }
        if gains and max(gains.values()) > WORTH and min(gains.values()) > 1 / WORTH:
            shown = ", ".join(f"{gain:.2f} times as fast with {rows} rows" for rows, gain in sorted(gains.items()))
            entry = run.parts[name]
            change = entry.xla_flags or ", ".join(f"{key}={value}" for key, value in entry.xla_options.items())
            yield Advice(
                f"{entry.about}: {shown}",
                f"measure it with the whole model ({COMMAND} --only steps --again steps), and if it holds change "
                f"COMPILER_OPTIONS in jsg/engine/device/executables.py: {change or 'leave them out'}",
                f"more than {WORTH - 1:.0%} is more than these figures vary, and no number of rows gets slower",
            )


def _cascade(run: Run, figures: Figures) -> Iterator[Advice]:
    gain = figures.first(kind="cascade-gain")
    if gain is not None and gain.facts["can_share"] and gain.smallest < 1.0:
        yield Advice(
            f"a prefix that all rows share is read faster by each row alone ({gain.smallest:.2f} times)",
            "raise MIN_GROUP in jsg/kernels_pallas/tile.py and measure again, with a longer prefix too",
            "a cache of the card may hold the prefix, and then reading it once saves little",
        )


def _types(run: Run, figures: Figures) -> Iterator[Advice]:
    """For each short type, up to how many rows its products are faster; and where XLA makes them faster than jsg."""
    by_type: dict[tuple[str, str], dict[int, Figure]] = collections.defaultdict(dict)
    for figure in (*figures.all(kind="quantised"), *figures.all(kind="few-bits")):
        name = figure.facts["quantization"] + (" (rows in e4m3 too)" if figure.facts.get("rounds_rows") else "")
        if "rows" in figure.facts:
            by_type[figure.facts["kind"], name][figure.facts["rows"]] = figure
    for (kind, name), sides in by_type.items():
        of_xla = by_type.get((kind, f"{name} by XLA"), {})
        if slower := sorted(
            rows for rows, figure in sides.items() if rows in of_xla and _gain(of_xla[rows], figure) < 1
        ):
            yield Advice(
                f"jsg's products with kernels in {name} are slower than XLA's for {', '.join(map(str, slower))} rows",
                "let few_bits_columns of this class of card, in jsg/kernels_pallas/tuning, leave these rows to XLA",
                "its rows were chosen by reading machine code, before a device had run it",
            )
        plain = by_type[kind, "none"] if (kind, "none") in by_type and name != "none" else {}
        gains = {rows: _gain(plain[rows], figure) for rows, figure in sides.items() if rows in plain}
        slower = sorted(rows for rows, gain in gains.items() if gain < 1 / WORTH)
        faster = sorted(rows for rows, gain in gains.items() if gain > WORTH)
        if slower:
            up_to = f"up to {faster[-1]} rows" if faster else "for none of these numbers of rows"
            yield Advice(
                f"products with kernels in {name} are slower for {', '.join(map(str, slower))} rows",
                f"say in docs/nvidia.md that {'--quantization ' if kind == 'quantised' else 'kernels in '}{name} gains "
                f"speed on this card {up_to}",
                "the weights still take less memory, so it may be right for a card that is too small",
            )


def _gain(before: Figure, now: Figure) -> float:
    return before.smallest / now.smallest


def _others(run: Run, figures: Figures) -> Iterator[Advice]:
    for row in targets(figures.all()):
        is_slower = row.what.startswith("against") and row.ratio < 1
        if is_slower or (row.what.startswith("start, warm") and not row.is_met):
            yield Advice(
                f"{row.what}: {row.figure}, {row.reference}",
                "see which of the rows above it is missed too, and begin with the lowest layer: attention, step, "
                "engine, then HTTP (python -m bench.front measures the front alone)",
                f"the ratio is {row.ratio:.2f}" + (", of two calls" if row.is_across_calls else ""),
            )


def _programs(run: Run, figures: Figures) -> Iterator[Advice]:
    figure = figures.first(kind="programs")
    if figure is not None and figure.facts["num_compiled"] + figure.facts["num_lowered"] > 0:
        yield Advice(
            f"a start with compiled programs still compiled {figure.facts['num_compiled']}, and lowered "
            f"{figure.facts['num_lowered']}",
            "find which names are not in the folder's manifest.json",
            "such a start should compile nothing",
        )


def _waits(reason: str) -> bool:
    """Whether a part did not run for a reason that is gone in the next call."""
    return reason in ("no time left", "not begun") or "no whole result in this call" in reason


def _missing(run: Run) -> Iterator[Advice]:
    short = [name for name, reason in run.omitted.items() if _waits(reason)]
    short += [name for name, record in run.records.items() if record.was_too_short]
    if short:
        yield Advice(f"not measured yet: {', '.join(short)}", "run the same command again", "it goes on")
    long = [name for name, record in run.records.items() if record.left_out and not record.is_cut]
    if long:
        yield Advice(
            f"left something out in all the time that they have: {', '.join(long)}",
            "raise their limit_s in bench/device/catalogue.py, and give --again with their names",
            "their measurements begin in order, and the last ones did not begin",
        )
    for name, reason in run.omitted.items():
        if re.match(r"no interpreter|this interpreter lacks", reason):
            yield Advice(
                f"{name} did not run: {reason}", "install it, and run the same command again", "it was left out"
            )


def _finished(run: Run) -> Advice:
    return Advice(
        "whatever ran came to its end without a failure",
        f"copy the figures to docs/performance.md and the device to {run.do('page')}, and commit this folder; then run "
        "jsg check MODEL with a real checkpoint, and set sizes that were only compiled by measuring them",
        "random weights say nothing about answers",
    )
