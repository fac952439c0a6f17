"""The helpers that programs for SGLang's front end import beside `sglang` itself, and every public name of `jsg`.

`from sglang.utils import ...`, `from sglang.test.test_utils import ...`, `from sglang.test.doc_patch import ...`,
`from sglang.srt.utils import ...`, `from sglang.api import ...` and `from sglang.lang.ir import ...` all become
`from jsg.compat import ...`.
"""

import argparse
import base64
import contextlib
import html
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import jsg
from jsg.errors import BackendError, ConfigError
from jsg.free_ports import free_ports
from jsg.lang.http.endpoint import RuntimeEndpoint
from jsg.lang.program.defaults import default_backend
from jsg.lang.program.reading import is_in_notebook
from jsg.lang.program.state import ProgramState
from jsg.lang.remote.openai import OpenAI
from jsg.lang.words.media import image_of
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model

__all__ = [
    "add_common_sglang_args_and_parse",
    "download_and_cache_file",
    "dump_state_text",
    "encode_image_base64",
    "execute_shell_command",
    "get_tokenizer",
    "global_config",
    "is_in_ci",
    "kill_process_tree",
    "launch_server_cmd",
    "load_image",
    "print_highlight",
    "read_jsonl",
    "select_sglang_backend",
    "terminate_process",
    "wait_for_server",
]

DOWNLOAD_TIMEOUT_S = 60.0
"""Seconds for which a server may be silent during a download."""


class _GlobalConfig:
    """Has the default backend. What else SGLang's `global_config` has are arguments of runs and engines here."""

    __slots__ = ()

    @property
    def default_backend(self) -> Any:
        """The backend of programs that name none, as it was set. Raises ConfigError where none is set."""
        return default_backend()


global_config = _GlobalConfig()
"""Stands for SGLang's `global_config`, whose default backend programs read."""


_ABSENT = {
    **dict.fromkeys(
        ("get_chat_template", "get_chat_template_by_model_path", "chat_templates", "ChatTemplate"),
        "templates are the model's own: use system(), user() and assistant(), or GET /get_chat_template of a server",
    ),
    **dict.fromkeys(
        ("FunctionCallParser", "ReasoningParser", "Tool"), "POST /v1/chat/completions reads calls and thoughts itself"
    ),
    **dict.fromkeys(
        ("ServerArgs", "PortArgs", "prepare_server_args"),
        "the options of engines and servers are arguments of jsg.Engine, jsg.Runtime and `jsg serve`",
    ),
    **dict.fromkeys(
        ("stream_and_merge", "async_stream_and_merge"),
        "iterate over jsg.Engine.generate(..., stream=True), or read the text of a program by text_iter()",
    ),
}
"""Names that published notebooks import, and what takes their place."""


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ImportError(f"jsg.compat has no {name}: {_ABSENT[name]}", name=__name__)
    return getattr(jsg, name)


def execute_shell_command(command: str) -> "subprocess.Popen[str]":
    """Starts a command line and returns at once. A line break behind a backslash goes on; no shell reads it."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[1:3] == ["-m", "sglang.launch_server"]:
        words[:3] = [sys.executable, "-m", "jsg.cli", "serve"]
    return subprocess.Popen(words, text=True, start_new_session=True)


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> "tuple[subprocess.Popen[str], int]":
    """Starts a server by a command line; gives its process and its port, which is a free one where None.

    `python -m sglang.launch_server` becomes `jsg serve`, which takes the options of its own and names others.
    """
    port = free_ports(host) if port is None else port
    return execute_shell_command(f"{command} --port {port}"), port


def wait_for_server(
    base_url: str, timeout: float | None = None, process: "subprocess.Popen[str] | None" = None
) -> None:
    """Waits until a server takes requests.

    Raises:
        TimeoutError: It did not within `timeout` seconds.
        BackendError: The process of the server has ended.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base_url.rstrip('/')}/v1/models", timeout=5.0).status_code in (200, 401, 403):
                return
        if process is not None and process.poll() is not None:
            raise BackendError(f"the server at {base_url} must run, but its process has ended; read what it printed")
        time.sleep(0.1)
    raise TimeoutError(f"the server at {base_url} did not take requests within {timeout} s")


def terminate_process(process: "subprocess.Popen[Any]", timeout: float = 30.0) -> None:
    """Ends a process that `execute_shell_command` or `launch_server_cmd` started, and those that it started."""
    kill_process_tree(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill_process_tree(process.pid)
        process.wait()


def kill_process_tree(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to the group of a process, or to the process where it leads none. Does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def print_highlight(html_content: object) -> None:
    """Shows a text: highlighted in a notebook, and by `print` elsewhere."""
    if is_in_notebook():
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        text = html.escape(str(html_content)).replace("\n", "<br>")
        display(HTML(f"<strong style='color: #00008B;'>{text}</strong>"))
    else:
        print(html_content)


def is_in_ci() -> bool:
    """Says whether the tests of SGLang's own repository run, which never is so here."""
    return False


def load_image(image_file: str | bytes) -> "tuple[Any, tuple[int, int]]":
    """Gives the picture of a file, a `data:` URL, an http address or bytes as PIL reads it, and its size."""
    from PIL import Image

    data: str | bytes = image_file
    if isinstance(image_file, str) and urllib.parse.urlsplit(image_file).scheme in ("http", "https"):
        answer = httpx.get(image_file, follow_redirects=True, timeout=DOWNLOAD_TIMEOUT_S)
        data = answer.raise_for_status().content
    picture = Image.open(io.BytesIO(image_of(data).data))
    return picture, picture.size


def encode_image_base64(image_path: str | bytes) -> str:
    """Gives the file of a picture, or its bytes, in base64."""
    return base64.b64encode(image_of(image_path).data).decode()


def get_tokenizer(tokenizer_name: str) -> Tokenizer:
    """Gives the tokenizer of a model: an embedded one, a directory or a hub name. Raises ModelError."""
    return load_tokenizer(resolve_model(tokenizer_name, load_format="dummy"))


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Adds the options of SGLang's benchmarks (`--parallel`, `--host`, ...) and parses the command line."""
    parser.add_argument("--parallel", type=int, default=64, help="programs that run at the same time")
    parser.add_argument("--host", default="http://127.0.0.1", help="the address of the server, without its port")
    parser.add_argument("--port", type=int, default=30000, help="the port of the server")
    parser.add_argument("--backend", default="srt", help="srt for a jsg server, or the name of a model of OpenAI's")
    parser.add_argument("--result-file", default="result.jsonl", help="the file to which a line of results is added")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> RuntimeEndpoint | OpenAI:
    """Gives the backend that `--backend`, `--host` and `--port` name.

    Raises:
        ConfigError: The backend is neither `srt` nor a model whose name begins with `gpt-`.
    """
    if args.backend == "srt":
        return RuntimeEndpoint(f"{args.host}:{args.port}")
    if args.backend.startswith("gpt-"):
        return OpenAI(args.backend)
    raise ConfigError(
        f"--backend must be srt or begin with gpt-, but got {args.backend!r}; make another backend yourself"
    )


def read_jsonl(filename: str | os.PathLike[str]) -> list[Any]:
    """Reads a file of JSON lines; a line that begins with # is left out."""
    with open(filename, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if not line.startswith("#")]


def dump_state_text(filename: str | os.PathLike[str], states: Sequence[Any], mode: str = "w") -> None:
    """Writes the text of each state, with its number above it; what is no state is written as `str` shows it.

    Raises:
        JsgError: A program of one of the states failed.
    """
    with open(filename, mode, encoding="utf-8") as file:
        for number, state in enumerate(states):
            text = state.text() if isinstance(state, ProgramState) else str(state)
            file.write(f"{'=' * 40} {number} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Downloads a file, unless it is there already; gives its path.

    Args:
        url: The http or https address.
        filename: The path; by default the last part of the address, in the working directory.

    Raises:
        ConfigError: The address names no file, or it did not give it.
    """
    path = Path(filename or urllib.parse.urlsplit(url).path.rpartition("/")[2])
    if not path.name:
        raise ConfigError(f"the address of a file must end with its name, but got {url!r}; give filename=")
    if path.exists():
        return str(path)
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=DOWNLOAD_TIMEOUT_S) as response:
            response.raise_for_status()
            # A download that breaks must not leave a file that looks whole.
            with tempfile.TemporaryDirectory(dir=path.parent) as directory:
                part = Path(directory, path.name)
                with part.open("wb") as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
                part.replace(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} did not give the file: {error}; download it yourself to {path}") from error
    return str(path)
