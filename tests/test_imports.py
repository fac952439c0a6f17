"""Which imports load JAX, seen at run time: the linter reads import statements, this reads `sys.modules`."""

import os
import pathlib
import subprocess
import sys

import pytest

import jsg

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jsg"

HOST_PACKAGES = ("cache", "lang", "sched", "constrained", "processing", "server", "engine/child", "engine/front")
HOST_MODULES = (
    "jsg",
    "jsg.errors",
    "jsg.types",
    "jsg.checks",
    "jsg.fields",
    "jsg.parameters",
    "jsg.config",
    "jsg.sources",
    "jsg.cli",
    "jsg.compat",
    "jsg.testing",
    "jsg.ray.child",
    "jsg.ray.directory",
    "jsg.ray.options",
    "jsg.ray.relay",
    "jsg.ray.scaling",
    "jsg.engine.byte_cache",
    "jsg.engine.media_reader",
    "jsg.engine.nvidia_smi",
    "jsg.engine.private_directory",
    "jsg.models.find",
    "jsg.models.image_layout",
)
DEVICE_FILES = ("cache/pool.py",)  # in a host package, but on the device side
DEVICE_LIBRARIES = ("jax", "jaxlib", "flax", "orbax")
SERVER_LIBRARIES = ("fastapi", "zmq", "msgspec", "interegular")


def host_modules() -> list[str]:
    """Every module that must not load JAX: the ones named above and all of the host packages."""
    found = set(HOST_MODULES)
    for package in HOST_PACKAGES:
        for path in (PACKAGE / package).rglob("*.py"):
            if path.relative_to(PACKAGE).as_posix() not in DEVICE_FILES:
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return sorted(found)


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed; fails with its traceback."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stderr, pytrace=False)
    return done.stdout.strip()


PROBE = """
import importlib, sys
seen = set()
for name in {modules!r}:
    importlib.import_module(name)
    for library in {libraries!r}:
        if library in sys.modules and library not in seen:
            print(f"{{name}} loads {{library}}")
            seen.add(library)
"""


def test_host_modules_load_no_jax():
    """In one process, which loads such a library itself at its end: the probe sees that."""
    said = run_python(PROBE.format(modules=[*host_modules(), "jaxlib"], libraries=DEVICE_LIBRARIES)).splitlines()
    assert said == ["jaxlib loads jaxlib"], "a host module loads a device library"


def test_import_jsg_is_free():
    loaded = run_python("import sys; before = set(sys.modules); import jsg; print(*sorted(set(sys.modules) - before))")
    assert {name for name in loaded.split() if name.partition(".")[0] not in sys.stdlib_module_names} == {"jsg"}


def test_every_public_name_loads():
    assert [name for name in jsg.__all__ if getattr(jsg, name) is None] == []


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = jsg.nothing


def test_engine_needs_no_server_libraries():
    block = f"import sys; sys.modules.update(dict.fromkeys({SERVER_LIBRARIES!r}))"
    assert run_python(f"{block}; import jsg; print(jsg.Engine.__module__)") == "jsg.engine.offline.engine"


def test_a_front_that_fetches_and_traces_nothing_loads_nothing_for_it():
    """FastAPI imports OpenTelemetry's API where that is there; the API exports nothing."""
    names = ("httpx", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    assert run_python(f"import sys, jsg.server.run; print([n for n in sys.modules if n.startswith({names})])") == "[]"
