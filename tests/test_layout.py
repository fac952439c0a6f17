"""The sizes and places of the style guide (sections 2, 5 and 8), held by a walk over the source."""

import ast
import collections
import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

import jsg
from tests.conftest import ELSEWHERE

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jsg"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 600
MAX_KERNEL_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
MAX_KERNEL_FUNCTION_LINES = 150
MAX_ATTRIBUTES = 15
MAX_PROTOCOL_METHODS = 6

FLAT_RECORDS = {
    # Records as long as what they describe, which is somebody else's format.
    "EngineConfig": "one field per command-line option",
    "ServerConfig": "one field per command-line option",
    "GenerateBody": "one field per parameter a client may send",
    "OpenAIBody": "one field per parameter a client may send",
    "ChatBody": "one field per parameter a client may send",
    "ResponsesBody": "one field per parameter a client may send",
    "LogLine": "one field per fact of a request",
    "RequestFields": "one field per fact that an engine must know of a sequence",
    "SamplingParams": "one field per sampling parameter a client may send",
    "RunArgs": "one field per argument of gen that a run may give for all",
    "ModelSpec": "one field per property of a decoder that a checkpoint's config.json gives",
    "VisionConfig": "one field per property of the vision half of a checkpoint's config.json",
}

UNPINNED_EXTRAS = ("cuda", "cuda12", "tpu", "bench-constrained", "dspy", "ray")
"""Extras that bring libraries of one kind of machine, torch, or others than the tests have."""


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


@functools.cache
def _by_kind(tree: ast.Module) -> dict[type[ast.AST], list[Any]]:
    found = collections.defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def nodes_of(tree: ast.Module, *kinds: type[ast.AST]) -> list[Any]:
    """The nodes of these kinds of a file. The tree is walked once for all checks, which takes longest."""
    return [node for kind in kinds for node in _by_kind(tree).get(kind, ())]


@functools.cache
def names_of(tree: ast.Module) -> list[tuple[int, str]]:
    """The line and text of each `a` and `a.b.c` of a file."""
    return [(node.lineno, text) for node in nodes_of(tree, ast.Name, ast.Attribute) if (text := dotted(node))]


def dotted(node: ast.expr) -> str:
    """The text of `a.b.c`; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports: `from a import b` gives `a` and `a.b`."""
    for node in nodes_of(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        else:
            yield node.lineno, node.module or ""
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_kernel_file(path: pathlib.Path) -> bool:
    return "kernels_pallas" in path.parts


def long_files(sizes: dict[pathlib.Path, int]) -> list[str]:
    return [
        f"{name_of(path)}: {lines} lines, at most {limit}"
        for path, lines in sizes.items()
        if lines > (limit := MAX_KERNEL_FILE_LINES if is_kernel_file(path) else MAX_FILE_LINES)
    ]


def long_functions(path: pathlib.Path, tree: ast.Module) -> list[str]:
    limit = MAX_KERNEL_FUNCTION_LINES if is_kernel_file(path) else MAX_FUNCTION_LINES
    return [
        f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines, at most {limit}"
        for node in nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    ]


def stored_on_self(node: ast.ClassDef) -> set[str]:
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and dotted(inner.value) == "self"
    }


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names of annotated fields in the class body and of everything its methods assign on `self`."""
    fields = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return fields | stored_on_self(node)


def large_classes(path: pathlib.Path, tree: ast.Module) -> list[str]:
    return [
        f"{name_of(path)}:{node.lineno} {node.name}: {count} attributes, at most {MAX_ATTRIBUTES}"
        for node in nodes_of(tree, ast.ClassDef)
        if (count := len(attributes_of(node))) > MAX_ATTRIBUTES and node.name not in FLAT_RECORDS
    ]


def large_protocols(path: pathlib.Path, tree: ast.Module) -> list[str]:
    found = []
    for node in nodes_of(tree, ast.ClassDef):
        if any(dotted(base).endswith("Protocol") for base in node.bases):
            methods = [s for s in node.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > MAX_PROTOCOL_METHODS:
                found.append(f"{name_of(path)}:{node.lineno} {node.name}: {len(methods)} methods")
    return found


def jit_uses(tree: ast.Module) -> list[int]:
    """Lines that name `jax.jit`, `jax.pmap`, `pjit` or `nnx.jit`, however they were imported."""
    named = [line for line, name in imports_of(tree) if re.search(r"\b(jax|nnx|pjit)\.(jit|pjit|pmap)$", name)]
    used = [line for line, name in names_of(tree) if name in ("jax.jit", "jax.pmap")]
    return named + used + nnx_transforms(tree)


def nnx_transforms(tree: ast.Module) -> list[int]:
    """Lines that name an `nnx.` transform that splits and merges the module at each call."""
    names = {f"nnx.{name}" for name in ("jit", "grad", "scan", "vmap", "remat", "pmap")}
    return [line for line, name in names_of(tree) if name.removeprefix("flax.") in names]


def test_files_are_short():
    assert long_files({path: path.read_text(encoding="utf-8").count("\n") for path in FILES}) == []


def test_functions_are_short():
    assert [line for path in FILES for line in long_functions(path, tree_of(path))] == []


def test_classes_are_small():
    assert [line for path in FILES for line in large_classes(path, tree_of(path))] == []


def test_protocols_are_small():
    assert [line for path in FILES for line in large_protocols(path, tree_of(path))] == []


def test_exempt_records_need_it_and_only_hold_fields():
    classes = {node.name: node for path in FILES for node in nodes_of(tree_of(path), ast.ClassDef)}
    for name in FLAT_RECORDS:
        assert name in classes, f"{name} is exempt from a limit but is not in the package"
        assert len(attributes_of(classes[name])) > MAX_ATTRIBUTES, f"{name} is exempt but small enough"
        assert not stored_on_self(classes[name]), f"{name} is exempt as a record, but its methods assign on self"


def test_package_init_files_are_empty():
    offers = (PACKAGE, PACKAGE / "ray")  # names that users write: `import jsg`, `serve run jsg.ray:build`
    inits = [path for path in FILES if path.name == "__init__.py" and path.parent not in offers]
    assert inits
    assert [name_of(path) for path in inits if path.read_text(encoding="utf-8").strip()] == []


def test_jit_has_one_home():
    home = PACKAGE / "engine" / "device" / "executables.py"
    uses = {path: lines for path in FILES if path != home and (lines := jit_uses(tree_of(path)))}
    inner = uses.pop(PACKAGE / "models" / "decoder.py", [])
    assert uses == {}
    assert len(inner) == 1, "one more, inside the trace of a step: layers that are alike are traced once"


def test_no_nnx_transform():
    assert {name_of(path): lines for path in FILES if (lines := nnx_transforms(tree_of(path)))} == {}


def test_pallas_has_one_home():
    outside = [path for path in FILES if not is_kernel_file(path)]
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in outside
        for line, name in imports_of(tree_of(path))
        if name.startswith("jax.experimental.pallas")
    ]
    assert found == []


def test_modules_read_no_environment():
    """Every knob is a field of `jsg/config.py`. tests/test_option_sources.py looks at the variables that give keys."""
    reads = ("os.getenv", "os.environ.get", "os.environb")
    found = [f"{name_of(path)}:{line}" for path in FILES for line, name in names_of(tree_of(path)) if name in reads]
    assert found == []


def test_tests_mirror_the_package():
    tests = ROOT / "tests"
    written = {path.parent.name for path in PACKAGE.glob("*/*.py") if path.name != "__init__.py"}
    tested = {path.parent.name for path in tests.glob("*/test_*.py")}
    assert written - tested == set(), "a package without a folder of tests"
    assert (
        tested - written - {"assets", "bench", "clients", "deploy", "docs", "examples", "golden", "page", *ELSEWHERE}
        == set()
    ), "a folder of tests without a package"
    assert {name for name in tested if not (tests / name / "__init__.py").exists()} == set(), "no __init__.py"


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == jsg.__version__
    assert re.search(rf"^## {re.escape(jsg.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_names_and_versions():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line)] == []
    names = [canonical(line.split("==")[0]) for line in lines]
    assert [name for name, times in collections.Counter(names).items() if times > 1] == []
    assert [name for name in names if name.startswith(("torch", "nvidia", "triton", "jax-cuda"))] == []


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        if extra not in UNPINNED_EXTRAS:
            wanted += names
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line.split("==")[0]) for line in pins}
    missing = {canonical(re.split(r"[^A-Za-z0-9._-]", text)[0]) for text in wanted} - pinned
    assert missing == set(), "run `make constraints`"


LONG_BODY = "\n".join(["    pass"] * MAX_FUNCTION_LINES)
WIDE_CLASS = "class C:\n    def f(self):\n" + "\n".join(f"        self.a{i} = 0" for i in range(MAX_ATTRIBUTES + 1))


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (long_functions, f"def f():\n{LONG_BODY}\n"),
        (large_classes, WIDE_CLASS),
        (large_protocols, "class P(Protocol):\n" + "\n".join(f"    def f{i}(self): ..." for i in range(7))),
        (lambda path, tree: jit_uses(tree), "import jax\nf = jax.jit(g)\n"),
        (lambda path, tree: jit_uses(tree), "from jax import jit\n"),
        (
            lambda path, tree: jit_uses(tree),
            "import jax\n@functools.partial(jax.jit, static_argnums=0)\ndef f(): ...\n",
        ),
        (lambda path, tree: nnx_transforms(tree), "from flax import nnx\nf = nnx.jit(g)\n"),
    ],
)
def test_each_check_can_fail(check, source):
    assert check(PACKAGE / "example.py", ast.parse(source))


def test_the_length_check_can_fail():
    assert long_files({PACKAGE / "a.py": MAX_FILE_LINES, PACKAGE / "b.py": MAX_FILE_LINES + 1}) == [
        f"jsg/b.py: {MAX_FILE_LINES + 1} lines, at most {MAX_FILE_LINES}"
    ]
