"""Records the security advisories that are known for what constraints.txt pins: `python -m tests.advisories CHECKOUT`.

CHECKOUT is a clone of PyPA's advisory database (github.com/pypa/advisory-database), with or without a work tree.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("advisories.json")


def pins(text: str) -> dict[str, str]:
    """Normalised name → version, of the lines of a file of constraints."""
    found = {}
    for line in text.splitlines():
        name, _, version = line.partition("==")
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def pinned() -> dict[str, str]:
    """What constraints.txt pins."""
    return pins((ROOT / "constraints.txt").read_text())


def affects(advisory: dict[str, Any], name: str, version: str) -> bool:
    """Whether an advisory in the format of OSV is about this version: one that it lists, or one in a range."""
    for part in advisory.get("affected", ()):
        package = part["package"]
        if package["ecosystem"] != "PyPI" or package["name"].lower() != name:
            continue
        if version in map(str, part.get("versions", ())):
            return True
        ranges = [each["events"] for each in part.get("ranges", ()) if each["type"] == "ECOSYSTEM"]
        if any(_is_within(Version(version), events) for events in ranges):
            return True
    return False


def _is_within(version: Version, events: list[dict[str, Any]]) -> bool:
    is_affected = False
    for event in events:  # in the order of versions
        if "introduced" in event and version >= Version(str(event["introduced"])):
            is_affected = True
        if "fixed" in event and version >= Version(str(event["fixed"])):
            is_affected = False
        if "last_affected" in event and version > Version(str(event["last_affected"])):
            is_affected = False
    return is_affected


def advisories(checkout: str, name: str) -> Iterator[dict[str, Any]]:
    """The advisories of the database about a package, but for those that were withdrawn."""
    for path in _git(checkout, "ls-tree", "-r", "--name-only", "HEAD", f"vulns/{name}/").splitlines():
        advisory = yaml.safe_load(_git(checkout, "show", f"HEAD:{path}"))
        if "withdrawn" not in advisory:
            yield advisory


def record(checkout: str) -> dict[str, Any]:
    """The content of the recorded file."""
    known = {name: list(advisories(checkout, name)) for name in pinned()}
    return {
        "database": "github.com/pypa/advisory-database",
        "commit": _git(checkout, "rev-parse", "HEAD").strip(),
        "committed": _git(checkout, "log", "-1", "--format=%cs").strip(),
        "num_read": sum(map(len, known.values())),
        "pins": {
            name: {"version": version, "advisories": sorted(a["id"] for a in known[name] if affects(a, name, version))}
            for name, version in pinned().items()
        },
    }


def _git(checkout: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(sys.argv[1]), indent=1) + "\n")
