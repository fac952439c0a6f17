"""The first hour on a device, rehearsed: what fails costs no other part, is named, and a later call goes on."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bench import report as reporting
from bench.device import __main__ as program
from bench.device import advice, coordinator
from bench.device.catalogue import PARTS, STEP, Entry
from bench.device.coordinator import Coordinator
from bench.device.device_tests import read
from bench.device.failures import Failure, Kind
from bench.device.plan import ACCELERATOR, TPU, TRIAL, Plan
from bench.device.results import Folder, OtherRunError, Record

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTED = """
import json, os, subprocess, sys, time
task = json.loads(sys.stdin.readline())
def tell(**event):
    print(json.dumps(event), flush=True)
match task["part"]:
    case "fine" | "second" | "rates":
        print("a library says hello")
        tell(header={"torch": "1"})
        tell(figure={"name": "a", "unit": "ms", "samples": [1.0], "facts": {"context": task["context"]}})
    case "crashes":
        tell(figure={"name": "b", "unit": "ms", "samples": [2.0], "facts": {}})
        print("the device fell off", file=sys.stderr, flush=True)
        os.abort()
    case "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        tell(header={"child": child.pid})
        tell(figure={"name": "c", "unit": "ms", "samples": [2.0], "facts": {}})
        time.sleep(600)
    case "complains":
        tell(failed="c: ValueError: no file " + __file__)
        tell(left_out="d: no time left")
        tell(figure={"name": "e", "unit": "ms", "samples": [float("nan")], "facts": {}})
        tell(figure={"name": "f", "unit": "ms", "samples": [], "facts": {}})
        sys.exit(1)
    case "does not compile":
        tell(failed="x: JaxRuntimeError: Shared memory size limit exceeded", op="paged_attention")
"""
LIMITS = {"fine": 60, "crashes": 60, "hangs": 5, "complains": 60, "does not compile": 60, "second": 60}
CONDITIONS = {"device": "a card", "plan": "trial", "code": "1"}

Make = Callable[..., Coordinator]


@pytest.fixture
def make(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes the coordinator of a call. Its parts are real processes that do what `SCRIPTED` says."""
    worker = tmp_path / "worker.py"
    worker.write_text(SCRIPTED)
    monkeypatch.setattr(coordinator, "TORCH_WORKER", worker)
    entries = {name: Entry(name, limit, interpreter="torch", ops=STEP) for name, limit in LIMITS.items()}

    def make_call(*, code: str = "1", seconds: float = 60, python: str | None = sys.executable) -> Coordinator:
        return Coordinator(
            folder=Folder(tmp_path / "results", CONDITIONS | {"code": code}, program.FIXED),
            plan=TRIAL,
            commit="abc",
            deadline=time.monotonic() + seconds,
            samples=1,
            interpreters={} if python is None else {"torch": python},
            parts=entries,
        )

    return make_call


def reasons(call: Coordinator, part: str) -> list[str]:
    return [failure.reason for failure in call.folder.records[part].failures]


def test_a_part_that_crashes_or_hangs_costs_no_other(make: Make, tmp_path: pathlib.Path):
    call = make()
    assert call.run(["crashes", "hangs", "complains", "fine"]) == 5
    program.write_results(call, {"plan": "trial", "commit": "abc", "versions": {}, "cpu": "x", "date": "y"})
    run = json.loads((tmp_path / "results" / "run.json").read_text())
    assert [figure["name"] for figure in run["figures"]] == ["a", "b", "c"]
    assert run["figures"][0]["facts"] == {"context": TRIAL.context, "call": 1}
    assert run["header"]["torch"] == "1"
    assert run["header"]["unmeasured"] == [
        "crashes: exit status -6",
        "hangs: ended after 5 s",
        "c: ValueError: no file worker.py",
        "e: some of its samples are no numbers",
        "a figure that has no name, no unit, no samples or no facts",
        "d: no time left",
    ]
    assert "the device fell off" in (tmp_path / "results" / "run.log").read_text()
    with pytest.raises(ProcessLookupError):  # what the part had started is gone too
        wait_until_gone(run["header"]["child"])
    report = (tmp_path / "results" / "report.md").read_text()
    for said in (
        "**failed** (crash)",
        "Crashes crashed: exit status -6",
        "Hangs hung: ended after 5 s",
        "--again hangs",
    ):
        assert said in report, said


def wait_until_gone(pid: int) -> None:
    for _ in range(200):
        os.kill(pid, 0)
        if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # nobody has reaped it yet
        time.sleep(0.05)


def test_a_later_call_does_what_is_left(make: Make):
    assert make().run(["fine", "complains"]) == 3
    second = make()
    assert second.run(["fine", "complains", "second"]) == 3
    assert second.omitted == {"fine": "done in call 1"}
    third = make()
    assert third.run(["fine", "complains", "second"]) == 0
    assert third.omitted == {
        "fine": "done in call 1",
        "complains": "it failed 2 times (--again complains)",
        "second": "done in call 2",
    }
    assert make().run(["fine", "complains"], again=["complains"]) == 3
    changed = make(code="2")
    assert changed.run(["fine"]) == 0 and changed.omitted == {}
    assert changed.folder.records["fine"].call == 4, "a call that runs nothing is not counted"
    with pytest.raises(OtherRunError, match="has results of device a card, but this is another; give another --folder"):
        Folder(changed.folder.path, CONDITIONS | {"device": "another"}, program.FIXED)


def test_without_time_or_torch_a_part_is_left_out(make: Make):
    call = make(python=None)
    assert call.run(["fine"]) == 0
    assert call.omitted == {"fine": "no interpreter with torch (--torch-python)"}
    call = make(seconds=0)
    assert call.run(["fine"]) == 0
    assert call.omitted == {"fine": "no time left"}


def test_an_interpreter_that_is_not_there_costs_its_part_only(make: Make):
    call = make(python="/no/such/python")
    assert call.run(["fine"]) == 1
    assert reasons(call, "fine") == ["fine: it could not be started: No such file or directory"]


def test_after_a_kernel_that_does_not_compile_the_reference_takes_its_place(make: Make):
    call = make()
    assert call.run(["does not compile", "second"]) == 1
    assert call.folder.records["second"].by_reference == ("paged_attention",)
    mended = make(code="2")
    mended.run(["second"])
    assert mended.folder.records["second"].by_reference == ()


def test_a_part_that_only_the_end_of_the_call_has_cut_runs_again(make: Make):
    call = make(seconds=60)
    record = call.folder.begin("fine", date="", commit="abc", is_cut=True)
    record.left_out.append("fine: the call ended after 3 s of it")
    call.folder.end(record, 3.0)
    again = make()
    assert again.run(["fine"]) == 0
    assert again.folder.records["fine"].is_done and again.folder.records["fine"].attempts == 1


def test_a_part_that_takes_the_machine_down_twice_is_not_begun_again(make: Make):
    for _ in range(2):
        call = make()
        assert call.folder.why_not("fine") is None
        call.folder.begin("fine", date="", commit="abc")
    assert make().folder.why_not("fine") == "it failed 2 times (--again fine)"


def with_header(call: Coordinator, plan: Plan, **fields: object) -> Coordinator:
    record = call.folder.begin("rates", date="", commit="abc")
    record.header |= fields
    return dataclasses.replace(call, plan=plan)


def test_a_gpu_that_jax_does_not_find_ends_the_run(make: Make):
    call = with_header(make(), ACCELERATOR, platform="cpu")
    call.folder.end(call.folder.records["rates"], 1.0)
    assert call.run(["fine", "second"]) == 0
    assert set(call.omitted) == {"fine", "second"}
    [first, *_] = advice.advise(program._run_of(call))
    assert "JAX runs on the CPU" in first.what and "pip install 'jax[cuda13]'" in first.do


def test_a_tpu_gets_no_part_that_is_about_gpus(make: Make):
    parts = {"fine": Entry("a", 60, interpreter="torch"), "second": Entry("b", 60, is_for_tpu=False)}
    call = dataclasses.replace(with_header(make(), TPU, platform="tpu"), parts=parts)
    assert call.run(["fine", "second"]) == 0
    assert call.omitted == {"second": "it is about GPUs"}
    about_gpus = {name for name, entry in PARTS.items() if not entry.is_for_tpu or entry.needs_gpu}
    assert about_gpus == {"tests", "prefill", *(name for name in PARTS if name.startswith("xla-"))}


def test_without_any_device_nothing_else_is_tried(make: Make):
    call = with_header(make(), TRIAL)
    call.folder.records["rates"].failures.append(Failure.from_reason("rates: RuntimeError: no backend"))
    assert call.run(["fine"]) == 0
    assert call.omitted == {"fine": "the rates, which begin with finding the device, failed"}


def test_the_plan_is_cut_down_once_the_memory_is_known(make: Make):
    call = with_header(make(), ACCELERATOR)
    call._take(call.folder.records["rates"], {"header": {"memory_bytes": 40 * 2**30}})
    assert 1 < call.plan.shape["num_hidden_layers"] < 32
    assert call.folder.records["rates"].header["num_layers"] == call.plan.shape["num_hidden_layers"]
    program.write_results(call, reporting.describe_run("x", []) | {"plan": "8b"})
    report = (call.folder.path / "report.md").read_text()
    assert f"The model has {call.plan.shape['num_hidden_layers']} of its 32 layers here" in report
    assert not json.loads((call.folder.path / "run.json").read_text())["header"]["targets_are_meant_for_this"]


KILLED = """
import pathlib, sys, time
sys.path.insert(0, {root!r})
from bench.device import coordinator
from bench.device.catalogue import Entry
from bench.device.plan import TRIAL
from bench.device.results import Folder
coordinator.TORCH_WORKER = pathlib.Path({worker!r})
parts = {{name: Entry(name, 60, interpreter="torch") for name in ("fine", "hangs", "second")}}
coordinator.Coordinator(
    folder=Folder(pathlib.Path({folder!r}), {conditions!r}), plan=TRIAL, commit="abc", deadline=time.monotonic() + 60,
    samples=1, interpreters={{"torch": sys.executable}}, parts=parts,
).run(list(parts))
"""


def test_reasons_are_without_paths():
    assert coordinator.without_paths("decode 4/2/32: no file /a/b/c.py") == "decode 4/2/32: no file c.py"


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(make: Make, tmp_path: pathlib.Path):
    """What it leaves behind is ended, since it would hold the device's memory, and what it had measured is kept."""
    call = make()
    script = KILLED.format(
        root=str(ROOT), worker=str(tmp_path / "worker.py"), folder=str(call.folder.path), conditions=CONDITIONS
    )
    file = call.folder.path / "parts" / "hangs.json"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as process:
        while not (file.exists() and json.loads(file.read_text())["figures"]):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    child = json.loads(file.read_text())["header"]["child"]
    os.kill(child, 0)
    later = make()
    assert not later.folder.records["hangs"].has_ended
    [advised] = [each for each in advice.advise(program._run_of(later)) if "in the middle of hangs" in each.what]
    assert "same command" in advised.do
    assert later.run(["fine", "hangs", "second"]) == 1
    assert later.omitted == {"fine": "done in call 1"}
    assert [failure.kind for failure in later.folder.records["hangs"].failures] == [Kind.HANG]
    with pytest.raises(ProcessLookupError):
        wait_until_gone(child)


BROKEN = "tests.bench.broken_parts:"
BROKEN_PARTS = {
    "sampling": Entry("check", 60, BROKEN + "check_wrong_kernel"),  # before the reference takes the kernel's place
    "correct": Entry("check", 60, BROKEN + "check_without_kernel"),
    "attention": dataclasses.replace(PARTS["attention"], run=BROKEN + "speed_without_kernel"),
    "prefill": Entry("memory", 60, BROKEN + "take_all_memory", figures=("prefills",)),
    "engine": Entry("hang", 9, BROKEN + "hang"),
    "chips": Entry("a device that goes away", 60, BROKEN + "lose_device"),
}
SHORT = dataclasses.replace(TRIAL, checks=("decode",), check_models=(), page_sizes=(1,))


@pytest.mark.slow
def test_every_failure_is_named_with_what_to_do(tmp_path: pathlib.Path):
    """Real parts in which a kernel does not compile, is wrong, takes all memory, or hangs."""
    call = Coordinator(
        folder=Folder(tmp_path, CONDITIONS),
        plan=SHORT,
        commit="abc",
        deadline=time.monotonic() + 300,
        samples=1,
        interpreters={},
        parts=BROKEN_PARTS,
    )
    call.run(list(BROKEN_PARTS))
    records = call.folder.records
    kinds = {name: [(each.kind, each.op) for each in record.failures] for name, record in records.items()}
    assert kinds == {
        "correct": [(Kind.COMPILE, "paged_attention")],
        "attention": [],
        "prefill": [(Kind.MEMORY, None)],
        "engine": [(Kind.HANG, None)],
        "sampling": [(Kind.WRONG, None)],
        "chips": [(Kind.CRASH, None)],
    }
    assert records["attention"].by_reference == ("paged_attention",)
    assert {figure.facts["kind"] for figure in records["attention"].figures} == {"attention", "attention-cascade"}
    assert reasons(call, "engine")[0].partition(":")[2].startswith(" ended after 9 s, in hang (broken_parts.py:")
    assert [figure.name for figure in records["prefill"].figures] == ["before"]
    run = dataclasses.replace(program._run_of(call), parts=BROKEN_PARTS)
    found = [each for each in advice.advise(run) if "lost the device" not in each.what]
    assert [each.what.partition(": ")[0] for each in found[:4]] == [
        "paged_attention does not compile for the a card",
        "paged_attention computes wrong numbers on the a card",
        "engine hung",
        "prefill ran out of memory (it ran by the reference, which needs more memory)",
    ]
    assert "lower prefills of the plan" in found[3].do
    said = {each.what.partition(":")[0]: each for each in advice.advise(dataclasses.replace(run, card="TPU v6e"))}
    assert "look whether another process has it" in said["chips lost the device"].do
    assert "interpret mode" in said["paged_attention computes wrong numbers on the TPU v6e"].do
    assert not [each for each in said.values() if "nvidia" in each.do + each.why or "CUDA" in each.do]


REASONS = {
    "a: JaxRuntimeError: RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 139264": Kind.COMPILE,
    "a: XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13958643712 bytes.": Kind.MEMORY,
    "torch generate: OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB": Kind.MEMORY,
    "a: NotImplementedError: cannot cast to `float8_e4m3fn`": Kind.COMPILE,
    "correct: ArithmeticError: wrong on this device: attention error": Kind.WRONG,
    "test_x[1]: AssertionError: not equal": Kind.WRONG,
    "steps: exit status -11": Kind.CRASH,
    "a: JaxRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered": Kind.CRASH,
    "c: ValueError: no file worker.py": Kind.OTHER,
    "a: JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not": Kind.COMPILE,
    "a: JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15G": Kind.MEMORY,
    "a: JaxRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel: unsupported shape cast": Kind.COMPILE,
    "rates: RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use": Kind.CRASH,
}


@pytest.mark.parametrize(("reason", "kind"), REASONS.items(), ids=map(str, range(len(REASONS))))
def test_the_kind_of_a_failure_is_read_from_its_text(reason: str, kind: Kind):
    assert Failure.from_reason(reason).kind is kind


def test_a_refused_program_names_its_operation():
    text = "steps: CompileError: the program x (kernels: {}) must compile for the NVIDIA L4, but is refused: y"
    assert Failure.from_reason(text.format("_decode_kernel, _combine_kernel")).op == "paged_attention"
    assert Failure.from_reason(text.format("_decode_kernel, rotate_and_write_kernel")).op is None
    assert Failure.from_reason(text.format("rotated, write_by_head")).op == "rotate_and_write"
    for kernel, op in {"kept_threshold_kernel": "kept_threshold", "penalised_kernel": "penalised"}.items():
        assert Failure.from_reason(text.format(kernel)).op == op


def figure(name: str, samples: list[float], **facts: object) -> reporting.Figure:
    return reporting.Figure(name, "ms", tuple(samples), facts)


def record(part: str, *figures: reporting.Figure, call: int = 1, **fields: object) -> Record:
    common = {"date": "", "commit": "abc", "conditions": CONDITIONS, "has_ended": True}
    return Record(part=part, call=call, figures=list(figures), **(common | fields))


def advised(*records: Record, **omitted: str) -> dict[str, str]:
    run = advice.Run({each.part: each for each in records}, omitted, "NVIDIA L4")
    return {each.what: each.do for each in advice.advise(run)}


def comparison(part: str, one: float, many: float, call: int = 1) -> Record:
    sides = {1: one, 256: many}
    figures = [figure(f"decode B={rows}, {part}", [ms], kind="compare", rows=rows) for rows, ms in sides.items()]
    return record(part, *figures, call=call)


def test_what_is_slow_is_advised_with_its_reason():
    found = advised(
        record("steps", figure("decode B=32", [4.0], kind="decode", rows=32, of_floor=0.7, tokens_per_s=1)),
        record("profile", figure("k", [1.0], kind="profile", rows=32, kernel="_decode_kernel", share=0.6)),
        record("attention", figure("attention B=32", [900.0], kind="attention", of_floor=0.73)),
    )
    steps, attention, end = found
    assert "decode B=32: 70%" in steps and "60% of a step of 32 rows is _decode_kernel" in found[steps]
    assert "attention B=32: 73%" in attention and "tuning" in found[attention]
    assert "without a failure" in end


def test_an_option_of_xla_is_advised_if_it_gains_and_loses_nowhere():
    base = comparison("xla-engine", 1.0, 4.0)
    for one, many, call, is_worth in (
        (0.9, 4.0, 1, True),
        (0.98, 4.0, 1, False),
        (0.9, 4.5, 1, False),
        (0.9, 4.0, 2, False),
    ):
        found = advised(base, comparison("xla-autotune", one, many, call))
        assert any("xla_gpu_autotune_level=4" in do for do in found.values()) == is_worth


def test_short_types_are_advised_up_to_where_they_gain():
    times = {"none": {8: 0.77, 256: 1.42}, "int8": {8: 0.62, 256: 2.14}}
    figures = [
        figure(f"{name} {rows}", [ms], kind="quantised", quantization=name, rows=rows)
        for name, sides in times.items()
        for rows, ms in sides.items()
    ]
    [what, _] = found = advised(record("quantised", *figures))
    assert "int8 are slower for 256 rows" in what and "gains speed on this card up to 8 rows" in found[what]


def test_products_that_xla_makes_faster_are_left_to_it():
    times = {"none": {8: 0.77, 256: 1.42}, "int8": {8: 0.62, 256: 1.4}, "int8 by XLA": {8: 0.7, 256: 1.3}}
    figures = [
        figure(f"{name} {rows}", [ms], kind="few-bits", quantization=name, rows=rows)
        for name, sides in times.items()
        for rows, ms in sides.items()
    ]
    [what, _] = found = advised(record("few-bits", *figures))
    assert "int8 are slower than XLA's for 256 rows" in what and "few_bits_columns" in found[what]


def test_a_kernel_for_chunks_is_advised_if_it_loses_after_no_prefix():
    for cudnn, mosaic, advised_one in ((0.97, 1.4, "by_cudnn"), (2.4, 1.4, "by_mosaic"), (2.4, 2.2, None)):
        figures = [
            figure(f"{name} {cached}", [ms], kind="attention-prefill", implementation=name, length=8192, cached=cached)
            for name, first, after in (("triton", 2.1, 6.0), ("cudnn", cudnn, 5.9), ("mosaic", mosaic, 6.1))
            for cached, ms in ((0, first), (8192, after))
        ]
        found = advised(record("prefill", *figures))
        assert [do.split()[1] for do in found.values() if '"chunks"' in do] == ([advised_one] if advised_one else [])


def test_wrong_numbers_make_speeds_doubtful():
    wrong = figure("attention error, decode", [0.3], kind="error", at_most=0.05, is_right=False, op="paged_attention")
    records = {
        "correct": record("correct", wrong, failures=[Failure(Kind.WRONG, "correct: wrong on this device: x")]),
        "steps": record("steps", figure("d", [1.0], kind="decode", rows=1, of_floor=0.1, tokens_per_s=1)),
        "sampling": record("sampling", by_reference=("kept_threshold",)),
        "quantised": record("quantised", figure("q", [1.0], kind="other")),
    }
    run = advice.Run(records, {}, "NVIDIA L4")
    assert advice.distrusted(run) == {
        "steps": "its kernels gave wrong numbers: paged_attention",
        "sampling": "computed by the slow reference: kept_threshold",
    }
    [first, *rest] = advice.advise(run)
    assert (
        "attention error, decode: 0.3, at most 0.05" in first.what and "do not trust the speeds of steps" in first.why
    )
    assert rest == []


def test_what_did_not_run_is_advised():
    found = advised(record("steps", is_cut=True, left_out=["x"]), vllm="no interpreter with vllm (--vllm-python)")
    assert next(iter(found.values())) == "run the same command again"
    assert not any("without a failure" in what for what in found)
    assert "vllm did not run: no interpreter with vllm (--vllm-python)" in found


def test_results_of_tests_are_read(tmp_path: pathlib.Path):
    cases = '<testcase name="a"/><testcase name="b"><failure message="AssertionError: 1 != 2&#10;x"/></testcase>'
    (tmp_path / "tests.xml").write_text(f'<testsuites>{cases}<testcase name="c"><skipped/></testcase></testsuites>')
    found = [(each.name, each.error, each.is_skipped) for each in read(tmp_path / "tests.xml")]
    assert found == [("a", "", False), ("b", "AssertionError: 1 != 2", False), ("c", "", True)]
