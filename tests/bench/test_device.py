"""`python -m bench.device` where nothing but jax, flax, numpy and jaxtyping is installed."""

import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

import pytest

from bench import device

ROOT = pathlib.Path(__file__).parents[2]
ALLOWED = ("jax", "jaxlib", "flax", "numpy", "jaxtyping")
CHILD = """
import runpy, sys
blocked, sys.argv = sys.argv[1].split(","), ["device", *sys.argv[2:]]
sys.modules.update(dict.fromkeys(blocked))
runpy.run_module("bench.device", run_name="__main__")
"""


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


def modules_of_others() -> list[str]:
    allowed = closure(ALLOWED)
    return sorted(
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonical(owner) for owner in owners} & allowed and module.isidentifier()
    )


def test_runs_with_four_packages_only(tmp_path: pathlib.Path):
    blocked = modules_of_others()
    assert {"safetensors", "transformers", "tokenizers", "msgspec", "zmq", "fastapi", "interegular"} <= set(blocked)
    assert not {"jax", "flax", "numpy", "jaxtyping", "jsg", "bench"} & set(blocked)
    output = tmp_path / "run.json"
    arguments = ["--plan", "trial", "--samples", "2", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, ",".join(blocked), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(output.read_text())
    names = [figure["name"] for figure in run["figures"]]
    for part in ("copy", "matmul", "attention error, decode", "decode B=1", "decode B=4", "prefill T=64", "greedy"):
        assert any(name.startswith(part) for name in names), part
    steps = [figure for figure in run["figures"] if figure["name"].startswith(("decode", "prefill"))]
    assert all(figure["facts"]["floor_ms"] > 0 and len(figure["samples"]) == 2 for figure in steps)
    assert run["header"]["unmeasured"] == []
    assert run["header"]["torch"].startswith("not compared")


def test_a_model_that_does_not_fit_has_fewer_layers():
    plan = device.ACCELERATOR
    assert device.fit(plan, None) is plan
    assert device.fit(plan, 104 * 2**30) == plan  # what JAX takes of an H200
    small = device.fit(plan, 24 * 2**30).shape["num_hidden_layers"]
    assert 1 < small < plan.shape["num_hidden_layers"]
    assert device.fit(plan, 2**30).shape["num_hidden_layers"] == 1


def test_a_part_that_fails_is_noted_and_the_others_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    report = device.reporting.Report("bench.device", [], tmp_path / "run.json", unmeasured=[])
    config = None
    bench = device.Bench(report, device.TRIAL, config, 1, 1.0, 0.0)  # pyright: ignore[reportArgumentType]

    def fails() -> None:
        raise ArithmeticError("attention is wrong\nand more")

    assert device.run_parts(bench, [fails, lambda: report.add("b", "ms", [1.0])]) == 1
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["header"]["unmeasured"] == ["ArithmeticError: attention is wrong"]
    assert [figure["name"] for figure in run["figures"]] == ["b"]
    assert "attention is wrong" in capsys.readouterr().out
