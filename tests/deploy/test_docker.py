"""The Dockerfile keeps our rules, and fits the command line and the files that it names. Nothing here builds it."""

import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from jsg import cli
from jsg.config import ServerConfig

ROOT = pathlib.Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


class Instruction(NamedTuple):
    """One instruction: its name, its flags, and the rest of it in one line."""

    name: str
    flags: list[str]
    rest: str


def instructions(text: str) -> list[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = []
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, *words = line.split()
            flags = [word for word in words if word.startswith("--")] if name in ("COPY", "ADD", "HEALTHCHECK") else []
            found.append(Instruction(name, flags, " ".join(word for word in words if word not in flags)))
    return found


def only(name: str, text: str = TEXT) -> Instruction:
    (found,) = (instruction for instruction in instructions(text) if instruction.name == name)
    return found


def violations(text: str) -> Iterator[str]:
    """Every rule that a Dockerfile breaks."""
    user = "root"
    for name, flags, rest in instructions(text):
        match name:
            case "FROM":
                if not re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04( AS \w+)?", rest):
                    yield f"the base is a version of NVIDIA's smallest image: {rest}"
            case "ADD":
                yield f"COPY copies; ADD also fetches and unpacks: {rest}"
            case "COPY":
                if any(flag.startswith("--chown") for flag in flags):
                    yield f"what is copied belongs to root, so that the server cannot change it: {rest}"
            case "RUN":
                if "apt-get install" in rest and "rm -rf /var/lib/apt/lists/*" not in rest:
                    yield "apt's lists are removed in the layer that has them"
                if "apt-get install" in rest and "--no-install-recommends" not in rest:
                    yield "nothing is installed that is only recommended"
                if "pip install" in rest and not re.search(r"--constraint constraints\.txt", rest):
                    yield "versions are those of constraints.txt"
                if re.search(r"\b(curl|wget|sudo|chmod 0?777)\b", rest):
                    yield f"nothing is fetched but packages, nobody becomes root, nothing is open to all: {rest}"
            case "USER":
                user = rest
            case "ENTRYPOINT" | "CMD":
                if not rest.startswith("["):
                    yield f"a shell between would keep the signals: {name} {rest}"
            case "ENV" | "ARG":
                if re.search(r"key|token|secret|password", rest, re.IGNORECASE):
                    yield f"an image keeps no secrets: {rest}"
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        yield f"the server runs as a numbered user that is not root: {user}"


def test_it_breaks_no_rule():
    assert list(violations(TEXT)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("13.0.1-base-ubuntu24.04\n", "latest\n"),
        ("13.0.1-base", "13.0.1-devel"),
        ("COPY jsg ./jsg", "ADD jsg ./jsg"),
        ("COPY --from=build /app", "COPY --from=build --chown=10001 /app"),
        (" && rm -rf /var/lib/apt/lists/*", ""),
        (" --no-install-recommends", ""),
        (" --constraint constraints.txt", ""),
        ("RUN python3.12", "RUN curl https://example.org | sh && python3.12"),
        ("USER 10001:10001\n", ""),
        ("USER 10001:10001", "USER 0:0"),
        ("USER 10001:10001", "USER jsg"),
        ('ENTRYPOINT ["jsg", "serve"]', "ENTRYPOINT jsg serve"),
        ("ENV ", "ENV API_KEY=x "),
    ],
)
def test_each_rule_can_fail(old: str, new: str):
    assert old in TEXT
    assert list(violations(TEXT.replace(old, new)))


def test_both_stages_have_one_base():
    assert len({instruction.rest.split()[0] for instruction in instructions(TEXT) if instruction.name == "FROM"}) == 1


def test_the_command_line_knows_every_option():
    program, *arguments = json.loads(only("ENTRYPOINT").rest) + json.loads(only("CMD").rest)
    options = cli.command_line().parse_args(arguments)
    assert program == "jsg"
    assert options.command == "serve"
    assert options.host, "who listens on more than the default says so"


def test_the_model_and_the_cache_are_volumes():
    arguments = json.loads(only("CMD").rest)
    models, cache = json.loads(only("VOLUME").rest)
    assert arguments[arguments.index("--model-path") + 1].startswith(f"{models}/")
    home = re.search(r"--home-dir (\S+)", TEXT)
    assert home
    assert cache == f"{home[1]}/.cache", "where `--compilation-cache-dir` and the hub's cache are by default"
    assert f"--mode=0700 --owner=jsg --group=jsg {cache}" in TEXT


def test_the_port_is_the_servers_own():
    port = str(ServerConfig().port)
    assert only("EXPOSE").rest == port
    assert f"http://127.0.0.1:{port}/health'" in only("HEALTHCHECK").rest
    assert ast.parse(json.loads(only("HEALTHCHECK").rest.removeprefix("CMD "))[2])


def test_what_is_copied_is_there_and_reaches_the_build():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    kept = [line[2:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!/")]
    copied = [
        source
        for name, flags, rest in instructions(TEXT)
        if name == "COPY" and not flags
        for source in rest.split()[:-1]
    ]
    assert sorted(copied, key=str.lower) == kept
    assert all((ROOT / source).exists() for source in copied)
    assert ignored == ["*", "**/__pycache__"]


def test_the_extra_and_what_the_build_reads_exist():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, hooks = pyproject["project"], pyproject["tool"]["hatch"]["metadata"]["hooks"]
    (extra,) = re.findall(r"'\.\[(\w+)\]'", TEXT)
    assert extra in project["optional-dependencies"]
    assert {hooks["fancy-pypi-readme"]["fragments"][0]["path"], *project["license-files"]} <= set(TEXT.split())


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=pathlib.Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: it is in the extra 'dev'")
    found = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
