"""Which GPU JAX is shown and how much memory it may take, with a real `nvidia-smi` on the path and real processes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest

from jsg.engine import nvidia_smi
from jsg.engine.device import devices as device
from jsg.engine.device.devices import Device, check_number_types, choose, multiplies_e4m3
from jsg.engine.nvidia_smi import Gpu, find_gpus, parse_gpus
from jsg.errors import ConfigError, MemoryPlanError

NO_OPTIONS = {"kv_cache_dtype": "auto", "quantization": "none", "fp8_products": "auto"}
ROOT = pathlib.Path(__file__).parents[2]
GIB = 2**30
BUSY = Gpu(0, "GPU-aaaa-1", "NVIDIA H200", 140 * GIB, 40 * GIB)
FREE = Gpu(1, "GPU-bbbb-2", "NVIDIA H200", 140 * GIB, 139 * GIB)
LISTING = "0, GPU-aaaa-1, NVIDIA H200, 143360, 40960\n1, GPU-bbbb-2, NVIDIA H200, 143360, 142336\n"
PLUGIN = """
import json, os, sys
def initialize():
    names = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")
    print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""
"""A JAX plug-in that says what its process was given when JAX started."""
START = """
import logging, os, jax
from jsg.engine.device.devices import open_device
logging.basicConfig(format="%(levelname)s: %(message)s")
before = dict(os.environ)
print(open_device(0.85))
assert dict(os.environ) == before
print(open_device(0.85))
"""


def write_nvidia_smi(folder: pathlib.Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


def start_jax(folder: pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own opens the device; the first line it prints is what JAX's plug-ins saw."""
    plugin = folder / "modules" / "jax_plugins" / "spy"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    unset = {"JAX_PLATFORMS", *device.FRACTIONS, nvidia_smi.VISIBLE}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{folder / 'modules'}:{ROOT}"}
    command = [sys.executable, "-c", START]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=inherited | paths | environment
    )


class TestProcess:
    def test_jax_is_shown_the_gpu_with_the_most_free_memory_while_it_starts(self, tmp_path: pathlib.Path):
        write_nvidia_smi(tmp_path / "bin", f'[ "$1" = "{nvidia_smi.NVIDIA_SMI[1]}" ] && cat <<EOF\n{LISTING}EOF')
        done = start_jax(tmp_path)
        seen, first, second = done.stdout.splitlines()
        assert json.loads(seen) == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2", "XLA_CLIENT_MEM_FRACTION": "0.8500"}
        assert first == "cpu: cpu; JAX has no other device"
        assert second == first
        assert done.stderr.count("this machine has an NVIDIA H200, but JAX runs on the CPU") == 1
        assert "pip install 'jax[cuda13]'" in done.stderr

    def test_a_busy_gpu_does_not_stop_a_jax_that_cannot_use_one(self, tmp_path: pathlib.Path):
        write_nvidia_smi(tmp_path / "bin", "echo 0, GPU-aaaa-1, NVIDIA H200, 143360, 500")
        done = start_jax(tmp_path)
        assert done.stdout.splitlines()[1:2] == ["cpu: cpu; JAX has no other device"], done.stderr
        assert "pip install 'jax[cuda13]'" in done.stderr

    def test_what_the_user_has_set_stays(self, tmp_path: pathlib.Path):
        write_nvidia_smi(tmp_path / "bin", f"cat <<EOF\n{LISTING}EOF")
        done = start_jax(tmp_path, CUDA_VISIBLE_DEVICES="0", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
        seen = json.loads(done.stdout.splitlines()[0])
        assert seen == {"CUDA_VISIBLE_DEVICES": "0", "XLA_CLIENT_MEM_FRACTION": None}

    @pytest.mark.parametrize("environment", [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}])
    def test_who_wants_no_gpu_is_not_asked_about_one(self, tmp_path: pathlib.Path, environment: dict[str, str]):
        write_nvidia_smi(tmp_path / "bin", f'touch "{tmp_path}/asked"')
        done = start_jax(tmp_path, **environment)
        assert json.loads(done.stdout.splitlines()[0])["CUDA_VISIBLE_DEVICES"] == environment.get(nvidia_smi.VISIBLE)
        assert not (tmp_path / "asked").exists()
        assert "NVIDIA" not in done.stderr

    @pytest.mark.parametrize("platform", ["tpu", "cuda"])
    def test_a_platform_that_does_not_start_is_an_error_of_ours(self, tmp_path: pathlib.Path, platform: str):
        done = start_jax(tmp_path, JAX_PLATFORMS=platform)
        assert f"jsg.errors.ConfigError: JAX must find a device of JAX_PLATFORMS={platform}" in done.stderr


@pytest.mark.parametrize(("count", "is_told"), [(1, True), (4, False)])
def test_devices_of_a_tpu_that_nobody_uses_are_named(monkeypatch, caplog, count: int, is_told: bool):
    chip = mock.Mock(platform="tpu", device_kind="TPU v5 lite", compute_capability="")
    monkeypatch.setattr(device.jax, "local_devices", lambda: [chip] * 4)
    assert device.open_device(0.85, count).name.startswith("tpu: ")
    said = f"4 devices of a TPU, but this engine uses the first {count} only"
    assert (said in caplog.text and "--dp-size" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("platforms", "has_libtpu", "said"),
    [
        (
            "",
            False,
            r"4 chips of a TPU, but JAX runs on the CPU\. JAX for TPUs is not installed: pip install 'jax\[tpu\]'",
        ),
        ("tpu,cpu", True, r"libtpu is installed but did not start: does another process"),
        ("cpu", True, r"^$"),
    ],
)
def test_a_tpu_that_jax_does_not_open_is_named(monkeypatch, caplog, platforms: str, has_libtpu: bool, said: str):
    monkeypatch.setattr(device, "chip_devices", lambda: [1] * 4)
    monkeypatch.setattr(device, "has_libtpu", lambda: has_libtpu)
    monkeypatch.setattr(device, "_platforms", lambda: platforms)
    assert device.open_device(0.85).platform == "cpu"
    assert re.search(said, "\n".join(caplog.messages))


class TestListing:
    def test_memory_is_in_bytes(self):
        assert parse_gpus(LISTING) == (BUSY, FREE)

    @pytest.mark.parametrize(
        "text",
        [
            "0, GPU-a, NVIDIA GB10, [N/A], [N/A]\n",
            "0, GPU-a, NVIDIA H200, 100\n",
            "0, GPU-a, NVIDIA H200, 100, 200\n",
            "0, GPU-a, NVIDIA H200, 0, 0\n",
            "0, MIG-a, NVIDIA H200, 100, 50\n",
            "NVIDIA-SMI has failed\n",
        ],
    )
    def test_anything_else_is_not_guessed_at(self, text: str):
        with pytest.raises(ValueError, match=r".+"):
            parse_gpus(text)

    @pytest.mark.parametrize("body", [f"cat <<EOF\n{LISTING}EOF\nexit 9", "echo no devices were found", "exit 1"])
    def test_a_failing_nvidia_smi_is_no_gpu(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, body: str):
        write_nvidia_smi(tmp_path, body)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert find_gpus() == ()

    def test_none_is_no_gpu(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_gpus() == ()


class TestChoice:
    def test_the_first_of_equals(self):
        chosen = choose((dataclasses.replace(FREE, index=3), dataclasses.replace(FREE, index=2)), 0.85, {})
        assert chosen.gpu is not None and chosen.gpu.index == 2
        assert "of 2 GPUs number 2 has the most free memory" in chosen.why

    def test_several_are_of_one_kind_and_the_fullest_decides(self):
        other = dataclasses.replace(FREE, index=5, uuid="GPU-other", name="NVIDIA A100", free_bytes=FREE.total_bytes)
        chosen = choose((other, FREE, BUSY), 0.85, {}, 2)
        assert chosen.gpu == BUSY
        assert chosen.environment[nvidia_smi.VISIBLE] == ",".join(
            gpu.uuid for gpu in sorted((FREE, BUSY), key=lambda gpu: gpu.index)
        )
        assert chosen.environment[device.FRACTION] == choose((BUSY,), 0.85, {}).environment[device.FRACTION]
        named = choose((other, FREE, BUSY), 0.85, {nvidia_smi.VISIBLE: f"{FREE.uuid},{BUSY.uuid}"}, 2)
        assert named.gpu == BUSY and named.environment[device.FRACTION] == chosen.environment[device.FRACTION]
        assert choose((FREE, BUSY), 0.85, {nvidia_smi.VISIBLE: f"{FREE.uuid},MIG-1"}, 2).gpu is None

    def test_people_are_told_which_memory_is_meant(self):
        one = Device(platform="gpu", kind="NVIDIA H200", gpu=FREE, why="chosen")
        assert str(one) == "gpu: NVIDIA H200, 140.0 GiB, 139.0 GiB free; chosen"
        several = dataclasses.replace(one, gpu=BUSY, count=2)
        assert str(several) == "gpu: 2 x NVIDIA H200, 140.0 GiB, 40.0 GiB free on the fullest; chosen"

    def test_memory_that_others_hold_is_not_reserved(self):
        chosen = choose((BUSY,), 0.85, {})
        assert float(chosen.environment[device.FRACTION]) == pytest.approx((40 - 1) / 140, abs=1e-4)
        assert "0.28 of its memory is free to reserve, not the 0.85" in chosen.why

    def test_a_gpu_without_free_memory_is_refused(self):
        with pytest.raises(MemoryPlanError, match=r"500 of 143360 MiB free.*CUDA_VISIBLE_DEVICES"):
            choose((dataclasses.replace(BUSY, free_bytes=500 * 2**20),), 0.85, {})

    @pytest.mark.parametrize(("visible", "gpu"), [("GPU-bbbb", FREE), ("GPU-bbbb-2,GPU-aaaa-1", FREE), ("1", FREE)])
    def test_a_gpu_that_the_user_names_is_known(self, visible: str, gpu: Gpu):
        chosen = choose((BUSY, FREE), 0.5, {nvidia_smi.VISIBLE: visible})
        assert chosen.gpu == gpu and chosen.environment == {device.FRACTION: "0.5000"}

    def test_a_number_is_known_where_cuda_counts_as_nvidia_smi_does(self):
        mixed = (dataclasses.replace(BUSY, name="NVIDIA L4"), FREE)
        assert choose(mixed, 0.5, {nvidia_smi.VISIBLE: "1"}).gpu is None, "CUDA counts the faster one first"
        assert choose(mixed, 0.5, {nvidia_smi.VISIBLE: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).gpu == FREE
        assert choose((BUSY, FREE), 0.5, {nvidia_smi.VISIBLE: "7"}).gpu is None

    def test_a_limit_of_the_users_is_kept_and_named(self):
        chosen = choose((FREE,), 0.85, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})
        assert chosen.environment == {nvidia_smi.VISIBLE: FREE.uuid}
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION limits its memory" in chosen.why


class TestNumberTypes:
    @pytest.mark.parametrize(
        ("text", "capability"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", None), ("9", None), ("", None)]
    )
    def test_what_jax_says_of_a_card_is_read(self, text: str, capability: tuple[int, int] | None):
        assert device._capability(text) == capability

    A100, L4, H100, BLACKWELL, CPU = (8, 0), (8, 9), (9, 0), (12, 0), None

    @pytest.mark.parametrize(
        ("capability", "options", "remedy"),
        [
            (A100, {"kv_cache_dtype": "fp8_e4m3"}, "needs compute capability 8.9, but the X has .* 8.0; use fp8_e5m2"),
            (A100, {"quantization": "fp8"}, "needs compute capability 8.9, but the X has .* 8.0; use int8"),
            (L4, {"quantization": "fp8", "fp8_products": "off"}, "off needs .* 9.0, but the X has .* 8.9; use auto"),
            (A100, {"fp8_products": "on"}, "on needs a CPU or .* 8.9, but this is the X with .* 8.0; use auto"),
            (CPU, {"fp8_products": "on"}, "on needs a CPU or compute capability 8.9, but this is the X; use auto"),
        ],
    )
    def test_what_a_card_cannot_run_is_refused_with_a_remedy(self, capability, options: dict, remedy: str):
        card = Device(platform="gpu", kind="X", gpu=None, why="", capability=capability)
        with pytest.raises(ConfigError, match=remedy):
            check_number_types(card, **NO_OPTIONS | options)

    @pytest.mark.parametrize(
        ("capability", "kv_cache_dtype", "quantization"),
        [
            (A100, "fp8_e5m2", "int8"),
            (L4, "fp8_e4m3", "fp8"),
            (H100, "fp8_e4m3", "fp8"),
            (BLACKWELL, "fp8_e4m3", "fp8"),
            (CPU, "fp8_e4m3", "fp8"),
        ],
    )
    def test_what_it_can_run_is_not(self, capability, kv_cache_dtype: str, quantization: str):
        card = Device(platform="gpu", kind="X", gpu=None, why="", capability=capability)
        options = {"kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
        check_number_types(card, **NO_OPTIONS | options)

    @pytest.mark.parametrize(
        ("platform", "capability", "taken"),
        [
            ("gpu", A100, "off"),
            ("gpu", L4, "auto on"),
            ("gpu", H100, "auto on"),
            ("gpu", CPU, "off"),  # of another maker
            ("cpu", CPU, "on"),
        ],
    )
    def test_rows_are_rounded_where_the_card_multiplies_e4m3_or_on_a_cpu_that_is_told_to(
        self, platform: str, capability, taken: str
    ):
        card = Device(platform=platform, kind="X", gpu=None, why="", capability=capability)
        found = [name for name in ("auto", "off") if multiplies_e4m3(card, name)]
        with contextlib.suppress(ConfigError):
            found += ["on"] if multiplies_e4m3(card, "on") else []
        assert found == [name for name in taken.split() if name != "off"]
