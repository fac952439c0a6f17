"""`Runtime`: a server of one's own that starts, says why it does not, and never outlives who started it."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from jsg.errors import BackendError, ConfigError
from jsg.lang.http import runtime as module
from jsg.lang.http.runtime import Runtime, serve_arguments
from tests.lang.conftest import SMALL

ROOT = Path(__file__).parents[2]


def is_listening(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_options_of_jsg_serve():
    flags = {
        "model_path": "tiny",
        "page_size": 4,
        "deterministic": True,
        "log_requests": False,
        "max_total_tokens": None,
    }
    arguments = ["serve", "--model-path=tiny", "--page-size=4", "--deterministic"]
    assert serve_arguments(flags) == (arguments, [])
    flags = {"api_key": ["-a", "b"], "cors_allow_origin": ["x", "y"], "admin_api_key": "c"}
    open_to_all = ["serve", "--cors-allow-origin=x", "--cors-allow-origin=y"]
    assert serve_arguments(flags) == (open_to_all, ["--api-key=-a", "--api-key=b", "--admin-api-key=c"])


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({}, None),
        ({"api_key": "a"}, "a"),
        ({"api_key": ["a", "b"], "api_key_file": True}, "a"),
        ({"api_key_file": True}, "from-file"),
        ({"api_key": ["a"], "admin_api_key": "admin", "api_key_file": True}, "admin"),
    ],
)
def test_s2_the_backend_has_a_key_of_its_server(tmp_path, flags, key):
    if flags.get("api_key_file"):
        (tmp_path / "keys").write_text("# ours\n\n  from-file \nother\n")
        flags = flags | {"api_key_file": str(tmp_path / "keys")}
    assert module._own_key(flags) == key


def test_s2_a_file_of_keys_that_cannot_be_read_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_start", lambda *arguments: pytest.fail("started"))
    with pytest.raises(ConfigError, match="--api-key-file must be a file that can be read"):
        Runtime(api_key_file=str(tmp_path / "none"))


def test_s2_keys_go_through_a_pipe(monkeypatch):
    code = "import sys; print('got', sys.stdin.readline())"
    start = subprocess.Popen
    shown = []

    def popen(arguments, **options):
        shown.append(arguments)
        return start([sys.executable, "-c", code], **options)

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    with pytest.raises(BackendError, match=r'got \["--api-key=open", "--admin-api-key=master"\]'):
        Runtime(api_key="open", admin_api_key="master")
    assert not any("open" in argument or "master" in argument for argument in shown[0])


@pytest.mark.parametrize(
    ("flags", "through_pipe"),
    [({}, '["--api-key=open", "--admin-api-key=master"]'), ({"admin_api_key": None}, '["--api-key=open"]')],
)
def test_s2_keys_of_the_environment_go_the_same_way(monkeypatch, flags, through_pipe):
    """So an argument that takes one away takes it from the server too."""
    code = "import os, sys; print('got', sys.stdin.readline().strip(), [n for n in os.environ if n.startswith('JSG_')])"
    start = subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", code], **options))
    monkeypatch.setenv("JSG_API_KEY", "open")
    monkeypatch.setenv("JSG_ADMIN_API_KEY", "master")
    with pytest.raises(BackendError, match=re.escape(f"got {through_pipe} []")):
        Runtime(**flags)


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [False, True])
def test_s2_keys_work_and_nobody_else_sees_them(tmp_path, has_file):
    (tmp_path / "keys").write_text("file-key\n")
    flags = {"api_key_file": str(tmp_path / "keys")} if has_file else {"api_key": "open", "admin_api_key": "master"}
    with Runtime(**SMALL, **flags) as runtime:
        assert runtime.generate("a", {"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1
        assert runtime.flush_cache() is True
        assert httpx.post(f"{runtime.url}/generate", json={"text": "a"}).status_code == 401
        shown = (Path("/proc") / str(runtime._process.pid) / "cmdline").read_bytes()
        environment = (Path("/proc") / str(runtime._process.pid) / "environ").read_bytes()
    assert b"jsg.lang.http.watched" in shown
    for key in (b"open", b"master", b"file-key"):
        assert b"=" + key not in shown and b"key=" + key not in environment


@pytest.mark.parametrize(
    ("flags", "why"), [({"pagesize": 4}, "unknown option 'pagesize'"), ({"page_size": -1}, "--page-size must be in")]
)
def test_a_wrong_option_is_refused_before_anything_starts(monkeypatch, flags, why):
    monkeypatch.setattr(module, "_start", lambda *arguments: pytest.fail("started"))
    with pytest.raises(ConfigError, match=why):
        Runtime(**flags)


def test_a_start_that_fails_shows_why(tmp_path):
    with pytest.raises(BackendError, match=r"ended with status 2 before it was ready(?s:.*) ERROR front: .*nowhere"):
        Runtime(model_path=str(tmp_path / "nowhere"))


class _Sleeper:
    """In place of `jsg serve`: a process that says what it is told to and is never ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str):
        self.process: subprocess.Popen[str] | None = None
        start = subprocess.Popen

        def popen(arguments, **options):
            self.process = start([sys.executable, "-c", code], **options)
            return self.process

        monkeypatch.setattr(module.subprocess, "Popen", popen)


def test_it_keeps_what_the_server_prints(monkeypatch):
    lines = ["loading", "small is ready at http://127.0.0.1:1 after 2 s", "GET /health"]
    _Sleeper(monkeypatch, f"import time; print(*{lines!r}, sep='\\n', flush=True); time.sleep(600)")
    with Runtime() as runtime:
        assert runtime.url == "http://127.0.0.1:1"
        wait_until(lambda: runtime.log == "\n".join(lines))


def test_a_start_that_takes_too_long_is_ended(monkeypatch):
    sleeper = _Sleeper(monkeypatch, "import time; print('loading', flush=True); time.sleep(600)")
    with pytest.raises(BackendError, match=r"must be ready within 0.5 s(?s:.*)raise start_timeout_s"):
        Runtime(start_timeout_s=0.5)
    assert sleeper.process is not None and sleeper.process.returncode == -signal.SIGTERM


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch):
    sleeper = _Sleeper(monkeypatch, "import time; time.sleep(600)")

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runtime, "_wait_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Runtime()
    assert sleeper.process is not None and sleeper.process.stdout is not None
    sleeper.process.stdout.close()
    assert sleeper.process.returncode == -signal.SIGTERM


def test_a_watched_program_ends_with_its_stdin(tmp_path):
    (tmp_path / "sleeper.py").write_text("import sys, time; print(sys.argv[1:], __name__, flush=True); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "jsg.lang.http.watched", "sleeper", "--a", "b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write('["--key=c"]\n')
        process.stdin.flush()
        assert process.stdout.readline() == "['--a', 'b', '--key=c'] __main__\n" and process.poll() is None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGTERM


def test_a_watched_program_does_not_begin_when_its_owner_has_died():
    done = subprocess.run(
        [sys.executable, "-m", "jsg.lang.http.watched", "no_such_module"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_n8_a_forked_process_does_not_end_its_parents_server():
    program = """
import os, subprocess, sys, weakref
from jsg.lang.http import runtime

server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE)
end = weakref.finalize(server, runtime._end, server, 5.0, os.getpid())
if (child := os.fork()) == 0:
    sys.exit(0)  # which calls the finalizers
os.waitpid(child, 0)
print(server.poll(), flush=True)
end()
print(server.poll())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["None", str(-signal.SIGTERM)], "")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit", "shutdown"])
def test_the_server_ends_with_whoever_started_it(end):
    program = f"""
import jsg.lang.http.runtime, sys
runtime = jsg.lang.http.runtime.Runtime(**{SMALL!r})
print(runtime.url, flush=True)
sys.stdin.readline()
if {end == "shutdown"}:
    runtime.shutdown()
    runtime.shutdown()
    print("status", runtime._process.returncode, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        url = process.stdout.readline().strip()
        assert is_listening(url)
        if end == "kill":
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        said = process.stdout.read()
        process.wait(60)
        assert said == ("status 0\n" if end == "shutdown" else "")
    wait_until(lambda: not is_listening(url))
