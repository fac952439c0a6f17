"""`python -m bench.device`: everything runs on four packages, and figures stand beside targets."""

import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from bench import plot_roofline
from bench import report as reporting
from bench.device import __main__ as program
from bench.device import catalogue, events, steps, summary
from bench.device.engine import _reading_alone
from bench.device.plan import ACCELERATOR, PLANS, TPU, TRIAL, Plan
from jsg.engine import tpu_chips
from jsg.engine.device.programs import COMMON, SWITCHED
from tests.sched import test_groups

ROOT = pathlib.Path(__file__).parents[2]
ALLOWED = ("jax", "jaxlib", "flax", "numpy", "jaxtyping", "ml_dtypes", "llvmlite")
"""What a device machine has; it needs llvmlite only where a CPU is the device, as in these tests."""
TRIED_ALONE = ("states", "experts", "quantised", "few-bits", "encoder", "xla-no-graphs", "compile", "programs", "chips")
BLOCK = "import sys; sys.modules.update(dict.fromkeys({names!r}))"
"""As `sitecustomize.py` on the path: these imports fail, in child processes too."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions and all they need, extras left out."""
    found: set[str] = set()
    to_do = list(names)
    while to_do:
        name = canonical(to_do.pop())
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        to_do += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return found


@pytest.fixture
def bare_environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment in which only the allowed packages can be imported."""
    allowed = closure(ALLOWED)
    blocked = sorted(
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonical(owner) for owner in owners} & allowed and module.isidentifier()
    )
    assert {"safetensors", "transformers", "tokenizers", "msgspec", "zmq", "fastapi", "interegular"} <= set(blocked)
    assert not {"jax", "flax", "numpy", "jaxtyping", "jsg", "bench"} & set(blocked)
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=blocked))
    return os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}


def run_program(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.device", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_part_imports_with_few_packages(bare_environment: dict[str, str]):
    modules = sorted({entry.run.partition(":")[0] for entry in catalogue.PARTS.values() if entry.run})
    assert "bench.device.engine" in modules
    script = f"import {', '.join(modules)}; from bench import prefill_attention"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=bare_environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    blocked = subprocess.run([sys.executable, "-c", "import msgspec"], cwd=ROOT, env=bare_environment, check=False)
    assert blocked.returncode == 1


def test_without_cascade_no_step_reads_for_a_group():
    """Otherwise a load would be compared with itself."""
    engine = test_groups.make_engine()
    for number in range(5):
        engine.add(test_groups.make_request(f"r{number}", (*test_groups.PREFIX, number)))
    shared = []
    for step in range(6):
        with _reading_alone(engine) if step % 2 else contextlib.nullcontext():
            engine.step()
        shared.append(bool(test_groups.shared_by(engine)))
    assert shared == [False, False, True, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "kinds_without"),
    [
        pytest.param(
            TRIED_ALONE,
            {"states", "expert-routes", "experts", "quantised", "few-bits", "encode", "compile", "programs"}
            | {"chips", "chips-agreement"},
            id="most",
        ),
        pytest.param((), set(), marks=pytest.mark.long, id="all"),
    ],
)
def test_runs_as_a_whole(
    tmp_path: pathlib.Path, bare_environment: dict[str, str], without: tuple[str, ...], kinds_without: set[str]
):
    """With the parts that `test_device_models.py` tries alone it is long. XLA compiles without optimising."""
    folder = tmp_path / "results"
    bare_environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    # They go the way of xla-no-graphs and xla-default.
    left_out = {"xla-skip-temp", "xla-skip-profiled", "xla-no-split-k", "xla-ftz", "xla-autotune", *without}
    chosen = [name for name in catalogue.PARTS if name not in left_out]
    arguments = ["--plan", "trial", "--samples", "2", "--commit", "abc", "--only", ",".join(chosen)]
    done = run_program([*arguments, "--folder", str(folder)], bare_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((folder / "run.json").read_text())
    torch_parts = [name for name, entry in catalogue.PARTS.items() if entry.run is None]
    others = dict.fromkeys(("serving", "vllm", "tests"), "this interpreter lacks")
    reasons = dict(reason.split(": ", 1) for reason in run["header"]["unmeasured"])
    assert {name for name, reason in reasons.items() if reason == "no interpreter with torch (--torch-python)"} == set(
        torch_parts
    )
    assert {name: reason[:22] for name, reason in reasons.items() if name not in torch_parts} == others
    assert set(run["header"]["part_s"]) == set(chosen) - set(torch_parts) - set(others)
    assert run["header"]["commit"] == "abc"
    kinds = {figure["facts"]["kind"] for figure in run["figures"]}
    assert kinds | kinds_without == {
        *("copy", "matmul", "error", "decode", "prefill", "decode-shared", "attention", "attention-cascade"),
        *("engine", "engine-alone", "engine-load", "cascade-gain", "agreement", "start-cold", "start-warm"),
        *(
            "sampling",
            "attention-prefill",
            "compare",
            "expert-routes",
            "experts",
            "quantised",
            "few-bits",
            "encode",
            "profile",
        ),
        *("compile", "programs", "states", "chips", "chips-agreement"),
    }
    assert all(figure["facts"]["is_right"] for figure in run["figures"] if figure["facts"]["kind"] == "error")
    bare = [figure for figure in run["figures"] if figure["facts"]["kind"] in ("decode", "prefill")]
    assert len(bare) == 3 and all(figure["facts"]["of_floor"] > 0 for figure in bare)
    sampling = [figure["facts"] for figure in run["figures"] if figure["facts"]["kind"] == "sampling"]
    assert len(sampling) == len(COMMON + SWITCHED)
    assert all(facts["floor"] > 0 for facts in sampling), "the floor comes from the rates of the process before"
    each, once = (figure["facts"] for figure in run["figures"] if figure["facts"]["kind"] == "decode-shared")
    assert not each["shares"] and once["shares"]
    own = bare[1]["facts"]["num_bytes"]
    assert each["num_bytes"] == once["num_bytes"] < own, "memory has to be read once, however often caches are"
    [engine] = (figure["facts"] for figure in run["figures"] if figure["name"].startswith("engine, decode B=4"))
    assert engine["tokens_per_step"] == 4 and abs(engine["context"] - TRIAL.context) < 16
    wanted = {row["what"] for row in run["header"]["targets"]}
    assert {"bare step, B=4", "through the engine, B=4", "start, warm cache, weights aside"} <= wanted
    assert not (folder / "run.log").exists()
    assert "## What to do next" in (folder / "report.md").read_text()
    plot_roofline.main([str(folder / "run.json"), "-o", str(tmp_path / "run.svg")])
    assert "decode B=4 ctx 264" in (tmp_path / "run.svg").read_text()


@pytest.mark.slow  # others show processes that are scripted, and that each part can be imported
def test_measures_the_rates_in_a_process_of_its_own(tmp_path: pathlib.Path, bare_environment: dict[str, str]):
    arguments = ["--plan", "trial", "--samples", "1", "--only", "rates", "--folder", str(tmp_path / "results")]
    done = run_program(arguments, bare_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "results" / "run.json").read_text())
    assert list(run["header"]["part_s"]) == ["rates"]
    assert [figure["facts"]["kind"] for figure in run["figures"]] == ["copy", "matmul"]
    assert all(min(figure["samples"]) > 0 for figure in run["figures"])
    assert run["header"]["device_kind"] == "cpu" and run["header"]["nvidia"] == "no nvidia-smi"


def make_part(output: io.StringIO, **changes: object) -> events.Part:
    task = {"part": "steps", "plan": TRIAL.as_json(), "rates": [1e9, 1e12], "samples": 2, "folder": "x"}
    return events.Part(task | {"seconds": 60, "started_at": time.time()} | changes, output)


def test_what_fails_within_a_part_costs_the_part_nothing(capsys: pytest.CaptureFixture[str]):
    output = io.StringIO()
    part = make_part(output)
    part.attempt("a", lambda: [][0])
    part.attempt("b", lambda: part.add("b", "ms", [1.0], kind="x"))
    late = make_part(output, seconds=-1)
    late.attempt("c", lambda: pytest.fail("it is too late"))
    assert [events.read(line) for line in output.getvalue().splitlines()] == [
        {"failed": "a: IndexError: list index out of range"},
        {"figure": {"name": "b", "unit": "ms", "samples": [1.0], "facts": {"kind": "x"}}},
        {"left_out": "c: no time left"},
    ]
    assert "IndexError" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["", "hello", "7", "[]", '{"a": 1}', '{"figure": {}, "failed": ""}', "NaN"])
def test_other_lines_are_no_events(line: str):
    assert events.read(line) is None


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_survives_the_way_to_a_part(plan: Plan):
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_asks_for_nothing_that_its_model_cannot_do(plan: Plan):
    longest = max(plan.context + 1, *plan.prefills, plan.engine_context)
    assert longest <= plan.shape["max_position_embeddings"]
    assert plan.shared_context < plan.context and not any(plan.shared_context % size for size in plan.page_sizes)
    assert plan.context > 16 * plan.steps // 2 + plan.alone_tokens // 2


def test_a_model_that_does_not_fit_has_fewer_layers():
    assert ACCELERATOR.fit(None) is ACCELERATOR
    assert ACCELERATOR.fit(104 * 2**30) is ACCELERATOR  # what JAX takes of an H200
    small = ACCELERATOR.fit(40 * 2**30).shape["num_hidden_layers"]
    assert 1 < small < ACCELERATOR.shape["num_hidden_layers"]
    assert ACCELERATOR.fit(2**30).shape["num_hidden_layers"] == 1


def test_the_bare_step_has_the_shape_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    assert [steps.padded(rows) for rows in (1, 4, 256)] == [1, 4, 256]
    monkeypatch.setattr(steps, "ROW_MULTIPLE", {"cpu": 8})
    assert [steps.padded(rows) for rows in (1, 8, 9, 256)] == [8, 8, 16, 256]


def test_only_comparisons_do_without_the_options_of_the_engine():
    without = {name for name, entry in catalogue.PARTS.items() if not entry.has_engine_options}
    assert without == {"xla-default", "xla-no-split-k"}


def test_parts_are_taken_in_their_order():
    assert program._part_names("sampling,steps") == ["steps", "sampling"]
    with pytest.raises(program.argparse.ArgumentTypeError, match=r"the parts are rates, .*, but got nothing"):
        program._part_names("nothing")


def test_a_gpu_is_described_by_its_driver(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "NVIDIA H200, 580.1, 143771 MiB, 700.00 W, 1980 MHz, 3201 MHz"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = program.describe_gpu()
    assert gpu is not None and gpu["name"] == "NVIDIA H200" and gpu["driver_version"] == "580.1"
    assert re.fullmatch(r"gpu-hour-nvidia-h200-\d{4}-\d\d-\d\d", program._default_folder(gpu).name)
    script.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert program.describe_gpu() is None


def test_a_tpu_is_described_by_its_chips(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tpu_chips, "PCI_DEVICES", tmp_path)
    assert program.describe_tpu() is None
    for number, (vendor, device) in enumerate([("0x1ae0", "0x006f")] * 4 + [("0x8086", "0x006f")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
    tpu = program.describe_tpu()
    assert tpu is not None and tpu["name"] == "TPU v6e-4 (4 chips)"
    assert re.fullmatch(r"tpu-hour-v6e-4-4-chips-\d{4}-\d\d-\d\d", program._default_folder(tpu).name)
    head = {"versions": {}, "cpu": "x"}
    assert program.conditions(tpu, TPU, head)["device"] == tpu["name"]


def figure(samples: list[float], **facts: object) -> reporting.Figure:
    return reporting.Figure(str(facts["kind"]), "ms", tuple(samples), facts)


FIGURES = (
    figure([5.0, 4.0], kind="decode", rows=32, tokens_per_s=8000, floor=3.0, of_floor=0.75, floor_tokens_per_s=10_667),
    figure([9.0], kind="prefill", tokens_per_s=20_000),
    figure([8.0], kind="prefill", tokens_per_s=36_000),
    figure([3000.0, 3900.0], kind="attention", floor=4000.0, of_floor=0.975),
    figure([10.0], kind="attention-cascade", case="nothing shared", times_plain=1.05),
    figure([4.1], kind="engine", rows=32, tokens_per_s=7800),
    figure([1.6], kind="cascade-gain", can_share=True),
    figure([2.0], kind="engine-load", load="shared", shares=True, tokens_per_s=7000),
    figure([3.0], kind="engine-load", load="shared", shares=False, tokens_per_s=4400),
    figure([3.0], kind="torch-load", load="shared", tokens_per_s=500),
    figure([3.0], kind="torch-load", load="shared", tokens_per_s=1000),
    figure([4.0], kind="engine-alone", tokens_per_s=250),
    figure([5.0], kind="torch-alone", tokens_per_s=200),
    figure([31.0], kind="start-warm"),
)


def test_targets_compare_figures_with_floors_and_with_each_other():
    rows = {row.what: row for row in summary.targets(FIGURES)}
    assert {what: round(row.ratio, 3) for what, row in rows.items()} == {
        "bare step, B=32": 0.75,
        "prefill": 1.029,
        "attention": 0.975,
        "cascade with nothing to share": 0.952,
        "through the engine, B=32": 0.976,
        "shared prefix, with cascade": 1.6,
        "against PyTorch, one request": 1.25,
        "against PyTorch, shared load": 7.0,
        "start, warm cache, weights aside": 0.968,
    }
    missed = {what for what, row in rows.items() if not row.is_met}
    assert missed == {"bare step, B=32", "cascade with nothing to share", "start, warm cache, weights aside"}
    _, first, *rest = summary.table(list(rows.values())).splitlines()
    assert first.split()[:3] == ["bare", "step,", "B=32"] and first.endswith("missed") and len(rest) == len(rows) - 1


def test_what_was_not_measured_has_no_row():
    assert summary.targets([]) == []
    assert summary.targets(FIGURES[5:6]) == [], "the engine without the bare step"
