"""The security rules of docs/architecture.md that can be read off the source: no line of the package breaks one."""

import ast
import functools
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.test_layout import ROOT, dotted, imports_of, name_of, names_of, nodes_of, tree_of

FILES = sorted(path for folder in ("jsg", "examples") for path in (ROOT / folder).rglob("*.py"))

IMMUTABLE = "templates run in jinja2.sandbox.ImmutableSandboxedEnvironment only"

BANNED_IMPORTS = {
    "cloudpickle": "unpickling runs code",
    "dill": "unpickling runs code",
    "joblib": "it pickles",
    "marshal": "unmarshalling runs code",
    "multiprocessing": "it pickles, and forks threads; use subprocess with JSON arguments",
    "pickle": "unpickling runs code",
    "shelve": "it pickles",
    "torch": "a checkpoint is safetensors",
}
BANNED_CALLS = {
    "eval": "it runs text as code",
    "exec": "it runs text as code",
    "compile": "it turns text into code",
    "__import__": "it imports by name; the import system's own functions are visible",
    "os.popen": "it starts a shell",
    "os.system": "it starts a shell",
    "subprocess.getoutput": "it starts a shell",
    "subprocess.getstatusoutput": "it starts a shell",
    "concurrent.futures.ProcessPoolExecutor": "it pickles",
    "jinja2.Environment": IMMUTABLE,
    "jinja2.Template": IMMUTABLE,
    "jinja2.environment.Environment": IMMUTABLE,
    "jinja2.environment.Template": IMMUTABLE,
    "jinja2.nativetypes.NativeEnvironment": IMMUTABLE,
    "jinja2.nativetypes.NativeTemplate": IMMUTABLE,
    "jinja2.sandbox.SandboxedEnvironment": IMMUTABLE,
    "yaml.load": "it builds any object; use safe_load",
    "yaml.full_load": "it builds objects; use safe_load",
    "yaml.unsafe_load": "it builds any object; use safe_load",
}
BANNED_METHODS = {
    "recv_pyobj": "it unpickles",
    "send_pyobj": "it pickles",
    "recv_serialized": "encode with msgspec and a fixed schema",
    "send_serialized": "encode with msgspec and a fixed schema",
}
BANNED_ARGUMENTS = {
    "allow_pickle": "unpickling runs code",
    "shell": "a shell reads its text as code",
    "trust_remote_code": "a model directory is data",
}
BANNED_STRINGS = {
    re.compile(r"0\.0\.0\.0|\[?::\]?"): "nothing listens on every interface",
    re.compile(r"tcp://.*", re.DOTALL): "processes of one machine talk over Unix-domain sockets",
}
TELLING = ast.Call, ast.ClassDef, ast.Constant
"""Nodes that can break a rule."""


PUBLISHES = "jsg/engine/front/kv_addresses.py"
"""Reads the address at which the operator lets others read events: `--kv-events-endpoint`."""
UNPICKLES = "jsg/engine/device/program_store.py"
"""Reads executables, which are code anyhow, from a folder to which nobody else can write."""


def violations(tree: ast.Module) -> Iterator[str]:
    """Every broken rule, as `line: what: reason`."""
    for line, name in imports_of(tree):
        for banned, reason in BANNED_IMPORTS.items():
            if name == banned or name.startswith(f"{banned}."):
                yield f"{line}: import {name}: {reason}"
    aliases = aliases_of(tree)
    compared = {id(part) for node in nodes_of(tree, ast.Compare) for part in node.comparators}
    for node in nodes_of(tree, *TELLING):
        if isinstance(node, ast.Call):
            yield from call_violations(node, aliases)
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if reason := BANNED_CALLS.get(full_name(dotted(base), aliases)):
                    yield f"{node.lineno}: class {node.name}: {reason}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in compared:
            for pattern, reason in BANNED_STRINGS.items():
                if pattern.fullmatch(node.value):
                    yield f"{node.lineno}: {node.value!r}: {reason}"


@functools.cache
def aliases_of(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a file stands for: `from os import system as s` gives `s: os.system`."""
    aliases = {}
    for node in nodes_of(tree, ast.ImportFrom, ast.Import):
        if isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return aliases


def full_name(name: str, aliases: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return aliases.get(first, first) + dot + rest


def call_violations(node: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    name = full_name(dotted(node.func), aliases)
    if reason := BANNED_CALLS.get(name.removeprefix("builtins.")):
        yield f"{node.lineno}: {name}(): {reason}"
    if isinstance(node.func, ast.Attribute) and (reason := BANNED_METHODS.get(node.func.attr)):
        yield f"{node.lineno}: .{node.func.attr}(): {reason}"
    for argument in node.keywords:
        is_false = isinstance(argument.value, ast.Constant) and argument.value.value is False
        if (reason := BANNED_ARGUMENTS.get(argument.arg or "")) and not is_false:
            yield f"{node.lineno}: {argument.arg}=...: {reason}"
        if argument.arg == "host" and isinstance(argument.value, ast.Constant) and argument.value.value == "":
            yield f"{node.lineno}: host='': an empty address means every interface"


def test_the_package_breaks_no_rule():
    assert [
        f"{name_of(path)}:{line}"
        for path in FILES
        for line in violations(tree_of(path))
        if not (name_of(path) == UNPICKLES and "pickle" in line)
        if not (name_of(path) == PUBLISHES and ("Unix-domain" in line or "every interface" in line))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import multiprocessing.pool",
        "from jinja2 import Environment as E\nE()",
        "import jinja2\nclass Mine(jinja2.Environment): ...",
        "import jinja2\njinja2.Template('')",
        "from jinja2 import sandbox\nsandbox.SandboxedEnvironment()",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "yaml.load(text, yaml.SafeLoader)",
        "os.system('ls')",
        "from os import system\nsystem('ls')",
        "import builtins\nbuiltins.eval(text)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "numpy.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "socket.send_pyobj(message)",
        "uvicorn.run(app, host='0.0.0.0')",
        "uvicorn.run(app, host='')",
        "socket.bind('tcp://127.0.0.1:1')",
        "socket.bind(f'tcp://{host}:{port}')",
    ],
)
def test_each_rule_can_fail(source):
    assert list(violations(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')",
        "lowered.compile()",
        "model.eval()",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "from jinja2 import Template\ndef render(template: Template): ...",
        "yaml.safe_load(text)",
        "numpy.load(path, allow_pickle=False)",
        "socket.bind('ipc://socket')",
        "uvicorn.run(app, host='127.0.0.1')",
        "if host == '0.0.0.0': host = '127.0.0.1'",
        "import typing\nx: 'pickle' = 'import pickle'",
    ],
)
def test_what_is_allowed_passes(source):
    assert list(violations(ast.parse(source))) == []


WALL_CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.datetime.now"} | {
    "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"
}  # fmt: skip
SHOWS_THE_TIME = {
    "jsg/cache/eviction_log.py": "a client is told when its prefix was evicted",
    "jsg/cache/use_clock.py": "people are shown when a node was used",
    "jsg/server/native/radix.py": "they are shown the time of each event",
    "jsg/cache/radix.py": "it gives the log of evictions its clock",
    "jsg/lang/remote/retry.py": "a server may ask to wait until a date, and may not say what time it is",
    "jsg/speech/prompts/template_sandbox.py": "templates write the date into prompts",
    "jsg/server/front.py": "OpenAI's `created` of the model",
    "jsg/server/openai/common.py": "OpenAI's `created` of an answer",
    "jsg/server/openai/responses.py": "OpenAI's `created_at`",
    "jsg/server/openai/responses_reply.py": "OpenAI's `completed_at`",
    "jsg/engine/child/log_relay.py": "lines of the log have the time of their arrival",
    "jsg/engine/child/kv_events.py": "the events say when they happened",
    "jsg/server/telemetry/metrics.py": "scrapers are shown when the server was started",
    "jsg/server/telemetry/exchange.py": "the request log and traces say when a request began",
}
"""The files that read the wall clock, which may jump, and why each needs it. Whatever waits or expires is elsewhere."""


def reads_wall_clock(tree: ast.Module) -> bool:
    aliases = aliases_of(tree)
    return any(full_name(name, aliases) in WALL_CLOCKS for _, name in names_of(tree))


def test_only_what_shows_the_time_reads_the_wall_clock():
    files = [path for path in FILES if name_of(path).startswith("jsg/")]
    assert {name_of(path) for path in files if reads_wall_clock(tree_of(path))} == set(SHOWS_THE_TIME)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.time()", True),
        ("from time import time as now\nnow()", True),
        ("import time\ndef f(clock=time.time): ...", True),
        ("import datetime\ndatetime.datetime.now()", True),
        ("from datetime import datetime\ndatetime.now()", True),
        ("import time\ntime.monotonic()", False),
        ("import datetime\ndatetime.datetime.fromtimestamp(0)", False),
    ],
)
def test_a_wall_clock_is_seen(source: str, expected: bool):
    assert reads_wall_clock(ast.parse(source)) == expected


MACHINE_TEXT = {
    # What a text has in any case where the pattern finds something: to look for it is fast in large files too.
    **{f"/{name}/": rf"(?<![\w./-])/{name}/[\w.\x80-\xff]" for name in ("work", "root", "opt")},  # paths of the machine
    **{f"/{name}/": rf"(?<![\w./-])/{name}/(?!(USER|user|you|x)\b)[\w.\x80-\xff]" for name in ("home", "Users")},
    ".org": r"\b(files\.pythonhosted|test\.pypi|pypi)\.org\b",  # a package registry
    "index-url": r"\b(extra-)?index-url\b",
    "find-links": r"\bfind-links\b",
    **{f"{name}.": rf"\b{name}\." for name in ("artifactory", "jfrog", "nexus")},
}


def machine_text(content: bytes) -> list[tuple[int, str]]:
    """Where a file names a machine or a registry: the lines, and what stands there. Bytes of no text are bytes."""
    return [
        (content.count(b"\n", 0, found.start()) + 1, found[0].decode(errors="replace"))
        for needed, pattern in MACHINE_TEXT.items()
        if needed.encode() in content
        for found in re.finditer(pattern.encode(), content)
    ]


def tracked_files() -> list[pathlib.Path]:
    """Every file that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked_files():
        if path == pathlib.Path(__file__):
            continue  # it names what it forbids
        found += [f"{name_of(path)}:{line}: {text}" for line, text in machine_text(path.read_bytes())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "/".join(["see ", "work", "main"]),
        'PATH="/root/.pyenv"',
        "--index-url x",
        "https://pypi.org/simple",
        "/home/alice/x",
    ],
)
def test_machine_text_is_seen(line):
    assert [number for number, _ in machine_text(f"another line\n{line}".encode())] == [2]


@pytest.mark.parametrize("line", ["https://example.org/work/x", "frame/root/x", "docs/opt/x", "/home/user/models"])
def test_other_paths_are_not(line):
    assert machine_text(line.encode()) == []


def test_no_file_looks_like_a_checkpoint_that_runs_code():
    suffixes = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
    assert [name_of(path) for path in tracked_files() if path.suffix in suffixes] == []
