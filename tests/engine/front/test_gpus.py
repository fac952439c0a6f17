"""Which devices each of several engines is shown, with a real `nvidia-smi` on the path and folders for PCI devices."""

import importlib.machinery
import importlib.util
import pathlib
import re
import tomllib

import pytest

from jsg.config import EngineConfig
from jsg.engine import tpu_chips
from jsg.engine.front.gpus import VISIBLE, device_groups, engine_configs
from jsg.engine.nvidia_smi import has_cuda_plugin
from jsg.errors import ConfigError
from tests.conftest import ROOT
from tests.engine.device.test_devices import write_nvidia_smi

LISTING = "\n".join(
    f"{index}, GPU-{index}, {name}, 143360, {free}"
    for index, (name, free) in enumerate(
        [("NVIDIA H200", 100_000), ("NVIDIA L4", 143_360), ("NVIDIA H200", 143_000), ("NVIDIA H200", 90_000)]
    )
)


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with JAX for CUDA, and without JAX for TPUs, whose nvidia-smi lists this."""

    def make(listing: str = LISTING, *packages: str) -> None:
        def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
            return importlib.machinery.ModuleSpec(name, None) if name in packages else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        write_nvidia_smi(tmp_path, f"cat <<EOF\n{listing}\nEOF" if listing else "exit 9")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


CUDA = "jax_cuda13_plugin"


def test_the_plugin_of_each_extra_is_found(machine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in ("cuda", "cuda12"):
        (version,) = re.findall(r"^jax\[cuda(\d+)\]$", *project["optional-dependencies"][extra])
        machine(LISTING, f"jax_cuda{version}_plugin")
        assert has_cuda_plugin()
    machine()
    assert not has_cuda_plugin()


def test_each_group_has_gpus_of_its_own_and_of_one_kind(machine):
    machine(LISTING, CUDA)
    assert device_groups(2, 1, {}) == [{VISIBLE: "GPU-0"}, {VISIBLE: "GPU-2"}], "those with the most free memory"
    assert device_groups(3, 1, {}) == [{VISIBLE: "GPU-0"}, {VISIBLE: "GPU-2"}, {VISIBLE: "GPU-3"}]


def test_groups_of_several(machine):
    machine(LISTING.replace("L4", "H200"), CUDA)
    assert device_groups(2, 2, {}) == [{VISIBLE: "GPU-0,GPU-1"}, {VISIBLE: "GPU-2,GPU-3"}]


def test_one_engine_chooses_for_itself(machine):
    machine(LISTING, CUDA)
    assert device_groups(1, 2, {}) == [{}]


def test_what_the_user_has_named_is_shared_out(machine):
    machine("", CUDA)
    assert device_groups(2, 2, {VISIBLE: "3, 1,GPU-7,0,2"}) == [{VISIBLE: "3,1"}, {VISIBLE: "GPU-7,0"}]


def test_too_few_are_an_error_that_says_what_to_lower(machine):
    machine(LISTING, CUDA)
    with pytest.raises(ConfigError, match=r"--dp-size 2 with --tp-size 2 needs 4 GPUs .* machine has 3; lower one"):
        device_groups(2, 2, {})
    with pytest.raises(ConfigError, match=f"{VISIBLE} names 1"):
        device_groups(2, 1, {VISIBLE: "5"})


def test_a_list_ends_where_it_ends_for_cuda_and_names_nothing_twice(machine):
    machine("", CUDA)
    assert device_groups(2, 1, {VISIBLE: "3,1,-1,0"}) == [{VISIBLE: "3"}, {VISIBLE: "1"}]
    with pytest.raises(ConfigError, match=f"{VISIBLE} names 2"):
        device_groups(3, 1, {VISIBLE: "3,1,-1,0"})
    with pytest.raises(ConfigError, match=f"{VISIBLE} names 0"):
        device_groups(2, 1, {VISIBLE: " "})
    with pytest.raises(ConfigError, match=r"must name each device once, but names GPU-0 several"):
        device_groups(2, 1, {VISIBLE: "GPU-0,1,GPU-0"})


def test_gpus_that_nobody_lists_are_an_error(machine):
    machine("", CUDA)
    with pytest.raises(ConfigError, match=f"name them in {VISIBLE}"):
        device_groups(2, 1, {})


@pytest.mark.parametrize("environment", [{"JAX_PLATFORMS": "cpu"}, {VISIBLE: ""}, {VISIBLE: "-1"}])
def test_engines_share_a_cpu(machine, environment: dict[str, str]):
    machine(LISTING, CUDA, "libtpu")
    assert device_groups(3, 1, environment | {"JAX_PLATFORMS": "cpu"}) == [{}, {}, {}]
    machine(LISTING)
    assert device_groups(2, 4, {}) == [{}, {}], "JAX cannot use the GPUs"


@pytest.fixture
def chips(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this a machine with TPU chips of this PCI device, and the network card of such a machine."""

    def make(count: int, device: str = "0x0063") -> None:
        for number, name in enumerate([*[device] * count, "0x0042"]):
            folder = tmp_path / "pci" / str(number)
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text(f"{name}\n")
        monkeypatch.setattr(tpu_chips, "PCI_DEVICES", tmp_path / "pci")

    return make


def test_each_engine_has_chips_of_its_own_that_form_a_box(machine, chips):
    machine(LISTING, "libtpu")
    chips(8)
    first, second = device_groups(2, 4, {})
    port = int(first["TPU_PROCESS_PORT"])
    assert first == {
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    assert (second["TPU_VISIBLE_CHIPS"], second["TPU_PROCESS_PORT"]) == ("4,5,6,7", str(port + 1))
    pairs = device_groups(4, 2, {"JAX_PLATFORMS": "tpu,cpu"})
    assert [each["TPU_VISIBLE_CHIPS"] for each in pairs] == ["0,1", "2,3", "4,5", "6,7"]
    assert len({each["TPU_PROCESS_PORT"] for each in pairs}) == 4
    assert [each["TPU_VISIBLE_CHIPS"] for each in device_groups(2, 1, {"TPU_VISIBLE_CHIPS": "5,3"})] == ["5", "3"]
    assert device_groups(1, 4, {}) == [{}]


def test_engines_share_out_whole_chips(machine, chips):
    machine(LISTING, "libtpu")
    chips(4, "0x0076")  # v7x: JAX sees two devices of a chip
    assert [each["TPU_VISIBLE_CHIPS"] for each in device_groups(2, 4, {})] == ["0,1", "2,3"]
    assert [each["TPU_VISIBLE_CHIPS"] for each in device_groups(2, 1, {})] == ["0", "1"]


def test_chips_that_no_engine_could_use_are_refused(machine, chips):
    machine(LISTING, "libtpu")
    chips(4)
    with pytest.raises(ConfigError, match=r"each engine 1, 2 or 4 chips of a TPU, but --tp-size 3 needs 3; change it"):
        device_groups(2, 3, {})
    with pytest.raises(ConfigError, match=r"needs 8 chips of a TPU, but this machine has 4; lower one"):
        device_groups(2, 4, {})
    with pytest.raises(ConfigError, match="but TPU_VISIBLE_CHIPS names 1; lower one"):
        device_groups(2, 1, {"TPU_VISIBLE_CHIPS": "2"})


def test_libtpu_alone_is_no_tpu(machine, chips):
    chips(0)
    machine(LISTING, CUDA, "libtpu")
    assert device_groups(2, 1, {}) == [{VISIBLE: "GPU-0"}, {VISIBLE: "GPU-2"}]
    machine(LISTING, "libtpu")
    assert device_groups(2, 1, {}) == [{}, {}]
    with pytest.raises(ConfigError, match="this machine has 0"):
        device_groups(2, 1, {"JAX_PLATFORMS": "tpu"})


def test_engines_on_one_cpu_share_its_memory_and_nobody_shares_a_trace():
    config = EngineConfig(mem_fraction_static=0.8, profile_dir="traces")
    assert engine_configs(config, [{}]) == [config]
    for groups, fraction in (([{}, {}], 0.4), ([{VISIBLE: "0"}, {VISIBLE: "1"}], 0.8)):
        own = engine_configs(config, groups)
        assert [each.mem_fraction_static for each in own] == [fraction] * 2
        assert [each.profile_dir for each in own] == ["traces/engine-0", "traces/engine-1"]
    assert engine_configs(EngineConfig(), [{}, {}])[1].profile_dir is None
