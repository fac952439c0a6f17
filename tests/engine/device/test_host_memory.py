"""What a container's or a service's control groups leave of the host's memory, in both versions of control groups."""

from pathlib import Path

import pytest

from jsg.engine.device.host_memory import available_bytes

MIB = 2**20


def write(root: Path, path: str, text: str | int) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal: {9000 * 1024} kB\nMemAvailable:   {8000 * 1024} kB")
    return tmp_path


def test_without_groups_it_is_what_the_host_has(root: Path):
    assert available_bytes(root) == 8000 * MIB


@pytest.mark.parametrize(("limit", "left"), [("max", 8000 * MIB), (1000 * MIB, 750 * MIB), (100 * MIB, 0)])
def test_version_2_with_the_limit_of_any_group_above(root: Path, limit: str | int, left: int):
    write(root, "proc/self/cgroup", "0::/system.slice/jsg.service")
    for group, most in [("system.slice", limit), ("system.slice/jsg.service", "max")]:
        write(root, f"sys/fs/cgroup/{group}/memory.max", most)
        write(root, f"sys/fs/cgroup/{group}/memory.current", 300 * MIB)
        write(root, f"sys/fs/cgroup/{group}/memory.stat", f"anon 7\ninactive_file {50 * MIB}")
    assert available_bytes(root) == left


def test_version_1_in_a_container_that_sees_only_its_own_mount(root: Path):
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2000 * MIB)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 500 * MIB)
    write(root, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0")
    assert available_bytes(root) == 1500 * MIB
