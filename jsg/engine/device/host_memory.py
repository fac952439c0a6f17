"""How much memory of the host is left for an engine: by the kernel, and by the limits of its control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that this process may still use.

    The kernel says what the host has available. A container or a service may have less: each memory control group above
    the process has a limit of its own, and what its processes use together counts against it. Files in the page cache
    that nobody has used lately count too, but the kernel drops them where memory is short.

    Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.

    Args:
        root: The directory below which `proc` and `sys` lie.
    """
    try:
        fields = _fields((root / "proc/meminfo").read_text())
        host = fields["MemAvailable:"] * 1024
    except (OSError, KeyError):
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min([host, *_left_of_groups(root)]), 0)


def _left_of_groups(root: Path) -> Iterator[int]:
    """The bytes that each control group of this process with a limit has left."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host, and then only the mount itself exists.
        group = Path(path.lstrip("/"))
        for directory in [mount / group, *(mount / parent for parent in group.parents if parent != group)]:
            try:
                limit, used = ((directory / name).read_text().strip() for name in names[:2])
                if limit != "max":
                    yield int(limit) - int(used) + _fields((directory / "memory.stat").read_text()).get(names[2], 0)
            except (OSError, ValueError):  # a root has no limit, and not every group has its files where we may read
                continue


def _fields(text: str) -> dict[str, int]:
    """The numbers of a file that has a name and a number in each line."""
    return {words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) >= 2}
