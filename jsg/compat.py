"""The helpers that programs for SGLang's front end import beside `sglang` itself, and every public name of `jsg`.

`from sglang.utils import ...`, `from sglang.test.test_utils import ...`, `from sglang.api import ...` and
`from sglang.lang.ir import ...` all become `from jsg.compat import ...`.
"""

import argparse
import json
import os
import tempfile
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import jsg
from jsg.errors import ConfigError
from jsg.lang.backend import Backend, BackendSource
from jsg.lang.defaults import default_backend
from jsg.lang.http.endpoint import RuntimeEndpoint
from jsg.lang.remote.openai import OpenAI
from jsg.lang.state import ProgramState
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model

__all__ = [
    "add_common_sglang_args_and_parse",
    "download_and_cache_file",
    "dump_state_text",
    "get_tokenizer",
    "global_config",
    "read_jsonl",
    "select_sglang_backend",
]

DOWNLOAD_TIMEOUT_S = 60.0
"""Seconds for which a server may be silent during a download."""


class _GlobalConfig:
    """Has the default backend. What else SGLang's `global_config` has are arguments of runs and engines here."""

    __slots__ = ()

    @property
    def default_backend(self) -> Backend | BackendSource:
        """The backend of programs that name none, as it was set. Raises ConfigError where none is set."""
        return default_backend()


global_config = _GlobalConfig()
"""Stands for SGLang's `global_config`, whose default backend programs read."""


def __getattr__(name: str) -> Any:
    return getattr(jsg, name)


def get_tokenizer(tokenizer_name: str) -> Tokenizer:
    """Gives the tokenizer of a model: an embedded one, a directory or a hub name. Raises ModelError."""
    return load_tokenizer(resolve_model(tokenizer_name))


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
