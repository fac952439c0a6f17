"""The files below `deploy`, and the command lines of jsg that they contain."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jsg import cli
from jsg.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for kind in ("yaml", "yml") for path in DEPLOY.rglob(f"*.{kind}"))
IMAGE = re.compile(r"(.*/)?jsg:[\d.]+")  # its entry point is `jsg serve`


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a file.

    Attributes:
        file: The file's name below `deploy`.
        content: What it says.
    """

    file: str
    content: dict[str, Any]

    @property
    def kind(self) -> str | None:
        """The kind of a Kubernetes object."""
        return self.content.get("kind")

    def __str__(self) -> str:
        return f"{self.file}:{self.kind or ''}"


DOCUMENTS = [
    Document(path.relative_to(DEPLOY).as_posix(), content)
    for path in FILES
    for content in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


def of_kind(kind: str) -> list[Document]:
    """The Kubernetes objects of a kind."""
    return [document for document in DOCUMENTS if document.kind == kind]


def of_file(file: str) -> dict[str, Any]:
    """The only document of a file."""
    [document] = [document for document in DOCUMENTS if document.file == file]
    return document.content


def mappings(content: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a document but Compose's extensions, which others take in; the outer ones first."""
    if isinstance(content, dict):
        yield content
        for name, value in content.items():
            if not str(name).startswith("x-"):
                yield from mappings(value)
    elif isinstance(content, list):
        for value in content:
            yield from mappings(value)


def pods(document: Document) -> list[dict[str, Any]]:
    """The templates of pods in a Kubernetes object."""
    return [each for each in mappings(document.content) if "containers" in each.get("spec", {})]


def commands(document: Document) -> list[list[str]]:
    """The arguments of each `jsg serve` in a document."""
    found = []
    for each in mappings(document.content):
        if IMAGE.fullmatch(str(each.get("image"))):
            found.append(each.get("args") or each.get("command"))
        if isinstance(script := each.get("run"), str):
            lines = [shlex.split(line) for line in script.splitlines()]
            found += [line[line.index("serve") + 1 :] for line in lines if "serve" in line]
    return found


def configured(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """What the command line makes of arguments, all its checks included."""
    options = cli.command_line().parse_args(["serve", *arguments])
    return cli._engine_config(options), ServerConfig(**cli._given(options, ServerConfig))


def hosted(arguments: list[str], size: int, index: int) -> list[str]:
    """Arguments with the variables that LeaderWorkerSet sets on pod `index` of a group."""
    values = {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": index, "LWS_LEADER_ADDRESS": "jsg-large-0.jsg-large.default"}
    return [re.sub(r"\$\((\w+)\)", lambda name: str(values[name[1]]), argument) for argument in arguments]
