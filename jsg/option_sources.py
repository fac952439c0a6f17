"""Options that are not on the command line: the file of `--config`, files of keys, and keys in the environment."""

import argparse
import dataclasses
import difflib
import os
import re
import stat
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jsg.config import KEY_VARIABLES, EngineConfig, ServerConfig, check_value, option, value_type
from jsg.errors import ConfigError

MAX_BYTES = 2**20
_KEY_LINE = re.compile(r"(?:([A-Za-z0-9._@-]{1,64}):[ \t]+)?(.*)")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
YAML_TAG = "tag:yaml.org,2002:"
TEXTS = frozenset({"str", "int", "float", "bool", "timestamp", "value"})
"""What YAML sees in a text without quotes. Whether it is one is a question of the option's type."""
KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a text or a list of texts",
}
MAX_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class OptionFile:
    """A file that an option names.

    Attributes:
        name: The option, and the name of the file where that helps, for messages.
        text: What the file holds.
        mode: Its permissions.
    """

    name: str
    text: str
    mode: int

    @classmethod
    def read(cls, name: str, path: Path, encoding: str, content: str) -> Self:
        """Reads a file.

        Args:
            name: How messages call it.
            path: The file.
            encoding: The encoding of its text.
            content: What its text must be, for a message.

        Raises:
            ConfigError: It cannot be read, has more than `MAX_BYTES`, or is no such text.
        """
        try:
            with path.open("rb") as file:
                mode, content_bytes = os.fstat(file.fileno()).st_mode, file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{name} must be a file that can be read, but: {error.strerror}; correct it") from None
        except ValueError:  # a zero byte
            raise ConfigError(
                f"{name} must be a file that can be read, but no file has such a name; correct it"
            ) from None
        if len(content_bytes) > MAX_BYTES:
            raise ConfigError(f"{name} must have at most {MAX_BYTES} bytes, but it has more; is it the right file?")
        try:
            return cls(name, content_bytes.decode(encoding), mode)
        except UnicodeDecodeError:
            raise ConfigError(f"{name} must be {content}, but it is not; correct it") from None

    def require_that_only_its_owner_writes(self) -> None:
        """Raises ConfigError if others may write the file, in which there are keys."""
        if self.mode & WRITABLE_BY_OTHERS:
            raise ConfigError(
                f"{self.name} must be writable by its owner only, because others could add their own keys; run 'chmod "
                "go-w' on it"
            )


def read_keys(path: Path) -> list[tuple[str, str]]:
    """The names and keys of a file: `KEY` or `NAME: KEY` on each line. Without a name it is empty.

    Empty lines and lines that begin with # are skipped.

    Raises:
        ConfigError: The file cannot be read, holds no key, or may be written by others.
    """
    file = OptionFile.read("--api-key-file", path, "ascii", "text of printable ASCII")
    file.require_that_only_its_owner_writes()
    keys = [line.strip() for line in file.text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError("--api-key-file must hold at least one key, but there is none; write one on each line")
    return [(found[1] or "", found[2]) for line in keys if (found := _KEY_LINE.fullmatch(line))]


def environment_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The values of options that the variables of `KEY_VARIABLES` give.

    Raises:
        ConfigError: One is empty. A server without a key that was meant to have one would be open to everybody.
    """
    for name, variable in KEY_VARIABLES.items():
        if environment.get(variable) == "":
            raise ConfigError(
                f"{variable} must have a key for {option(name)}, but it is empty; give it one or unset it"
            )
    return {name: environment[variable] for name, variable in KEY_VARIABLES.items() if variable in environment}


def near_options(name: str, known: Collection[str]) -> str:
    """The part of a message that asks which options were meant; "" where none is like the given one."""
    longer = [each for each in sorted(known) if each.startswith(name)]
    near = longer[:3] or difflib.get_close_matches(name, sorted(known), n=2, cutoff=0.75)
    return f"did you mean {' or '.join(near)}? " if near else ""


def read_options(path: Path) -> dict[str, Any]:
    """The values that a YAML file gives for fields of `EngineConfig` and `ServerConfig`.

    A text without quotes is read as on the command line, by the type of its option, and not by the rules of YAML: the
    value of `jump-forward: off` is no switch, and that of `served-model-name: 1.10` is no number.

    Raises:
        ConfigError: The file cannot be read or is no mapping; a key is unknown or given twice; a value is wrong; or
            others may write the file, in which there are keys.
    """
    file = OptionFile.read(f"--config {path.name}", path, "utf-8-sig", "text in UTF-8")
    fields = {field.name: field for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    aliases = {alias: field.name for field in fields.values() for alias in field.metadata["aliases"]}
    hints = _hints(EngineConfig) | _hints(ServerConfig)
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for line, key, node in _entries(file):
        where = f"{file.name}, line {line}: "
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in fields:
            known = [option(each).removeprefix("--") for each in fields]
            hint = near_options(key.lstrip("-").replace("_", "-"), known)
            raise ConfigError(
                f"{where}there is no option {key[:MAX_SHOWN]!r} of 'jsg serve'; {hint}'jsg serve --help' lists all"
            )
        if name in lines:
            raise ConfigError(f"{where}{key} is given again after line {lines[name]}; leave one out")
        lines[name] = line
        found[name] = _value(node, hints[name], where + key)
        if (read := fields[name].metadata["read"]) is not None:
            try:
                found[name] = read(found[name])
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{where}{key} {error}") from None
        check_value(where + key, found[name], fields[name], hints[name])
    if found.keys() & KEY_VARIABLES.keys():
        file.require_that_only_its_owner_writes()
    return found


def _hints(config: type[EngineConfig | ServerConfig]) -> dict[str, Any]:
    return typing.get_type_hints(config, include_extras=True)


def _entries(file: OptionFile) -> Iterator[tuple[int, str, Any]]:
    """The entries of the mapping in a file: the line, the key, and the node of the value."""
    import yaml  # no other start needs it

    try:
        root = yaml.compose(file.text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:  # its text would repeat a part of the file, and so perhaps a key
        at = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file.name} must be YAML, but{at}: {error.problem}; correct it") from None
    except yaml.YAMLError:
        raise ConfigError(f"{file.name} must be YAML, but it has characters that YAML forbids; correct it") from None
    except RecursionError:
        raise ConfigError(f"{file.name} must be a mapping of options to values, but it is nested; correct it") from None
    if not isinstance(root, yaml.MappingNode):
        got = "it is empty" if root is None else f"got {_kind(root)}"
        raise ConfigError(
            f"{file.name} must be a mapping of options to values, such as 'page-size: 16', but {got}; correct it"
        )
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(
                f"{file.name}, line {line}: a key must be an option's name, but got {_kind(key)}; correct it"
            )
        yield line, key.value, value


def _value(node: Any, hint: Any, shown: str) -> Any:
    """The value of an option. Raises ConfigError if it is not of the option's type."""
    kind, given = value_type(hint), _kind(node)
    if given == "null" and type(None) in typing.get_args(hint):
        return None
    items = [node]
    if kind is tuple and given == "a list":
        items, given = node.value, "a list with something else"
    if kind is int and node.value == "auto" and type(None) in typing.get_args(hint):
        return None
    try:
        values = [_scalar(item, str if kind is tuple else kind) for item in items]
    except ValueError:
        raise ConfigError(f"{shown} must be {KINDS[kind]}, but got {given}; correct it") from None
    return tuple(values) if kind is tuple else values[0]


def _scalar(node: Any, kind: type) -> Any:
    """A text, a number or a switch. Raises ValueError if it is another kind of value."""
    tag = node.tag.removeprefix(YAML_TAG)
    if tag not in TEXTS or (kind is not str and node.style is not None):  # a style is one of quotes
        raise ValueError
    if kind is not bool:
        return kind(node.value)
    if tag != "bool":
        raise ValueError
    return node.value.lower() in ("true", "yes", "on")


def _kind(node: Any) -> str:
    """What a node is, for a message."""
    if not isinstance(node.value, str):
        return "a list" if node.id == "sequence" else "a mapping"
    tag = node.tag.removeprefix(YAML_TAG)
    if tag == "null":
        return "null"
    if tag not in TEXTS:
        return "a value with a tag"
    return f"the text {node.value[:MAX_SHOWN]!r}" if tag == "str" else node.value[:MAX_SHOWN]
