"""The tables of docs/options.md: every option of every command, as the command line itself knows them."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

from docs.tables.made import cell
from jsg.cli import command_line
from jsg.config import EngineConfig, ServerConfig, option

FILE = "--config"
HEAD = ["| option | value | |", "|---|---|---|"]
type Config = type[EngineConfig | ServerConfig]


def commands() -> dict[str, argparse.ArgumentParser]:
    """The words of each command → its parser."""

    def visit(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        inner = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for name, each in ((name, each) for choices in inner for name, each in choices.items()):
            yield from visit((*words, name), each)
        if not inner:
            yield " ".join(words), parser

    return dict(visit((), command_line()))


def configured(config: Config) -> str:
    """One row for each field of a record of options; the file that may give them is the engine's first row."""
    names = {option(field.name) for field in dataclasses.fields(config)} | ({FILE} if config is EngineConfig else set())
    return _table(action for action in commands()["serve"]._actions if names & set(action.option_strings))


def own() -> str:
    """A table for each command that has arguments or options of its own."""
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    shared = {"-h", "model", FILE, *(option(field.name) for field in fields)}
    parts: list[str] = []
    for words, parser in commands().items():
        rows = [action for action in parser._actions if not shared & {*action.option_strings, action.dest}]
        if rows:
            parts.append(f"### `jsg {words}`\n\n{_sentence(parser.description)}\n\n{_table(rows)}")
    return "\n\n".join(parts)


def _table(actions: Iterable[argparse.Action]) -> str:
    bounds = {option(name): text for config in (EngineConfig, ServerConfig) for name, text in _bounds(config)}
    rows = []
    for action in actions:
        longs = (name for name in action.option_strings if name.startswith("--"))
        name = next(longs, str(action.metavar))
        text = _sentence((action.help or "").replace("%%", "%"))
        rows.append(f"| `{name}` | {cell(_value(action) + bounds.get(name, ''))} | {cell(text)} |")
    return "\n".join([*HEAD, *rows])


def _sentence(text: str | None) -> str:
    return "" if not text else f"{text[0].upper()}{text[1:].removesuffix('.')}."


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "a switch"
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return f"`{action.metavar}`" if action.option_strings else ""


def _bounds(config: Config) -> Iterator[tuple[str, str]]:
    """Fields with the least and the largest value that they take."""
    for name, hint in typing.get_type_hints(config, include_extras=True).items():
        parts: tuple[Any, ...] = (hint,) if typing.get_origin(hint) is Annotated else typing.get_args(hint)
        for part in parts:
            if typing.get_origin(part) is Annotated:
                low, high = (_number(value) for value in part.__metadata__[0])
                yield name, f", {low} to {high}"


def _number(value: float) -> str:
    """Powers of two as people know them."""
    for power in (30, 31):
        if value in (2**power, 2**power - 1):
            return f"2^{power}" + (" - 1" if value % 2 else "")
    return f"{int(value) if value == int(value) else value:,}".replace(",", " ")


TABLES: dict[str, Callable[[], str]] = {
    "engine": lambda: configured(EngineConfig),
    "server": lambda: configured(ServerConfig),
    "commands": own,
}
