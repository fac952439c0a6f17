"""`python -m tests.mutants`: breaks the core of each package once, and says which breaks the fast tests find.

Each mutation is made in a copy of the checkout, never in the checkout itself, and the fast tests that it names run
there until the first failure. A mutation that survives is a seam without a fast test. The whole list takes about half
an hour on two cores and is no part of `make test`. Exit status 1 where more than `MOST_SURVIVORS` survive.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutants.mutation import Mutation
from tests.mutants.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parents[2]
COPIED = (
    "jsg",
    "tests",
    "bench",
    "examples",
    "docs",
    "deploy",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "constraints.txt",
)
MOST_SURVIVORS = 2
TIMEOUT_S = 1200.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only the mutations whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutations that are tried at a time; default 2")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or any(name in m.name for name in options.names)]
    with tempfile.TemporaryDirectory(prefix="jsg-mutants-") as directory:
        folders = [make_copy(pathlib.Path(directory) / str(job)) for job in range(options.jobs)]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            survivors = [name for name in pool.map(lambda m: try_one(m, folders), chosen) if name]
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were found"
        + "".join(f"\n  not {s}" for s in survivors)
    )
    return len(survivors) > MOST_SURVIVORS


def make_copy(folder: pathlib.Path) -> pathlib.Path:
    """What the tests need, copied; the cache of compiled programs is shared with the checkout."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / ".cache").mkdir()
    (ROOT / ".cache" / "jax").mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / ".cache" / "jax").symlink_to(ROOT / ".cache" / "jax")
    return folder


def try_one(mutation: Mutation, folders: list[pathlib.Path]) -> str | None:
    """The name of a mutation that nothing found; None for one that was found. Takes a folder and gives it back."""
    folder = folders.pop()
    path = folder / mutation.path
    original = path.read_text()
    begin_s = time.monotonic()
    try:
        path.write_text(mutation.applied(original))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        is_found = done.returncode in (1, 2)  # a test failed, or the broken code could not even be loaded
    except subprocess.TimeoutExpired:
        first, is_found = "it hung", True
    finally:
        path.write_text(original)
        folders.append(folder)
    word = "found" if is_found else "SURVIVED"
    print(f"{word:9}{time.monotonic() - begin_s:6.0f} s  {mutation.name}: {first[:110]}", flush=True)
    return None if is_found else mutation.name


if __name__ == "__main__":
    sys.exit(main())
