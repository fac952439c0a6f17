"""`python -m tests.mutants`: breaks the core of each package once, and says which breaks the fast tests find.

`mutations.txt` lists the breaks: a name, a file and the fast tests that should find it, then the text that stands once
in the file and what stands there instead. Each is made in a copy of the checkout. One that survives is a seam without a
fast test. The whole list takes about half an hour on two cores. Exit status 1 where more than `MOST_SURVIVORS` survive.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__")
MOST_SURVIVORS = 2
TIMEOUT_S = 1200.0


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """One break of a file, with the arguments of pytest that should find it."""

    name: str
    path: str
    tests: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """The file with the break."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must stand once in {self.path}"
        return text.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """Those of the list."""
    found, name, path, tests = [], "", "", ""
    lines = (ROOT / "tests" / "mutations.txt").read_text().splitlines()
    for is_change, group in itertools.groupby(lines, lambda line: line[0] in "-+"):
        if is_change:
            changes = list(group)
            old, new = ("\n".join(line[1:] for line in changes if line[0] == sign) for sign in "-+")
            found.append(Mutation(name, path, tests, old, new))
        else:
            (head,) = group
            name, path, tests = head.split(" | ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only the mutations whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutations that are tried at a time; default 2")
    options = parser.parse_args()
    chosen = [m for m in mutations() if not options.names or any(name in m.name for name in options.names)]
    with tempfile.TemporaryDirectory(prefix="jsg-mutants-") as directory:
        folders = [make_copy(pathlib.Path(directory) / str(job)) for job in range(options.jobs)]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            survivors = [name for name in pool.map(lambda m: try_one(m, folders), chosen) if name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were found", *survivors, sep="\n  not ")
    return len(survivors) > MOST_SURVIVORS


def make_copy(folder: pathlib.Path) -> pathlib.Path:
    """The checkout, copied; the cache of compiled programs is shared with it."""
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    (folder / ".cache").mkdir()
    (ROOT / ".cache" / "jax").mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / ".cache" / "jax").symlink_to(ROOT / ".cache" / "jax")
    return folder


def try_one(mutation: Mutation, folders: list[pathlib.Path]) -> str | None:
    """The name of a mutation that nothing found; None for one that was found. Takes a folder and gives it back."""
    folder = folders.pop()
    path = folder / mutation.path
    original = path.read_text()
    begin_s, first, is_found = time.monotonic(), "it hung", True
    try:
        path.write_text(mutation.applied(original))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        is_found = done.returncode in (1, 2)  # a test failed, or the broken code could not even be loaded
    except subprocess.TimeoutExpired:
        pass
    finally:
        path.write_text(original)
        folders.append(folder)
    word = "found" if is_found else "SURVIVED"
    print(f"{word:9}{time.monotonic() - begin_s:6.0f} s  {mutation.name}: {first[:110]}", flush=True)
    return None if is_found else mutation.name


if __name__ == "__main__":
    sys.exit(main())
