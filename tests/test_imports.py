"""Which imports load JAX, seen at run time: the linter reads import statements, this reads `sys.modules`."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import jsg
from jsg.lang import function
from jsg.lang.program.run_args import RunArgs
from tests.lang.fake_server import LAST, Reply, answer, fake_server

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jsg"

HOST_PACKAGES = "cache lang sched constrained processing speech server engine/child engine/front".split()
HOST_MODULES = (
    "jsg jsg.errors jsg.extras jsg.types jsg.sources jsg.parameters jsg.config jsg.option_sources jsg.cli jsg.compat "
    "jsg.testing jsg.ray.child jsg.ray.directory jsg.ray.options jsg.ray.relay jsg.ray.scaling jsg.byte_cache "
    "jsg.engine.media_reader jsg.engine.nvidia_smi jsg.engine.private_directory jsg.engine.tpu_chips jsg.engine.find "
    "jsg.models.image_layout"
).split()
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


def run_python(code: str, *arguments: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed; fails with its traceback."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
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


PROGRAM = """
import sys, jsg
@jsg.function
def program(s):
    s += "a" + jsg.gen("b", max_tokens=2)
assert program.run(backend=jsg.RuntimeEndpoint(sys.argv[1]))["b"] == "ab"
"""
COMPUTING = ("jax", "jaxlib", "flax", "orbax", "numpy", "numba", "transformers", "torch")
SERVING = ("fastapi", "pydantic", "starlette", "uvicorn", "msgspec", "zmq", "interegular", "huggingface_hub")
WRITING = ("httpx", "rich", "yaml", "jinja2", "tokenizers", "sentencepiece", "PIL", "asyncio")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from jsg import cli; cli.command_line().format_help()", (*COMPUTING, *SERVING, *WRITING)),
        (
            "from jsg import cli; assert cli.main(['serve', '/none']) == 2; import jsg.engine.front.children",
            (*COMPUTING, *SERVING, *WRITING),
        ),
        (PROGRAM, (*COMPUTING, *SERVING, "yaml", "jinja2", "tokenizers", "sentencepiece", "PIL", "openai")),
        (
            "import jsg; jsg.OpenAI, jsg.Anthropic, jsg.separate_reasoning",
            (*COMPUTING, *SERVING, *WRITING[:-1], "openai"),
        ),
    ],
    ids=["help", "serve", "program", "remote"],
)
def test_nothing_heavy_is_imported_before_it_is_used(code, heavy):
    """`serve` reads its arguments, finds the model and starts the engine; a program asks a server and has no turns."""
    with fake_server() as server:
        server.replies["/generate"] = [Reply(events=[answer("a", finish=None), answer("ab", **LAST)])]
        found = f"print('loaded', *[name for name in {heavy!r} if name in sys.modules])"
        assert run_python(f"import sys\n{code}\n{found}", server.url).splitlines()[-1] == "loaded"


def test_every_public_name_loads():
    assert [name for name in jsg.__all__ if getattr(jsg, name) is None] == []


def test_type_checkers_see_every_public_name_where_it_is():
    stub = ast.parse(pathlib.Path(jsg.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {name.asname: node.module for node in imports for name in node.names} == jsg._PUBLIC
    assert all(name.name == name.asname for node in imports for name in node.names)


def test_type_checkers_see_the_arguments_that_a_run_gives_to_its_gens():
    """Each is a form of its own, since a signature cannot add them to the parameters of a program."""
    stub = ast.parse(pathlib.Path(function.__file__).with_suffix(".pyi").read_text())
    [runs] = [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Runs"]
    forms = [node for node in runs.body if isinstance(node, ast.FunctionDef)]
    seen = {form.args.kwonlyargs[0].arg: ast.unparse(form.args.kwonlyargs[0].annotation or form) for form in forms[1:]}
    assert seen.keys() == {"stream", "backend", *RunArgs.__annotations__}
    assert seen["temperature"] == "float" and seen["stop"] == "str | Sequence[str]"


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
