"""The tools of the Berkeley Function Calling Leaderboard, version 4: which of their schemas compile, in each dialect.

`PYTHONPATH=.venv/bfcl python -m tests.constrained.bfcl` prints the counts that docs/packages/constrained.md tells; with
`--write` it renews `bfcl.json` beside this file, which `test_bfcl.py` compares with. The data is in the package
`bfcl-eval` (Apache-2.0); `make test-long` installs it without its dependencies, and nothing of it is imported.

The leaderboard's schemas name types of Python, Java and JavaScript. They are read as its own handlers read them: `dict`
is an object, `tuple` an array, `float` a number, and `any` and whatever is unknown a string; a property without a type
is a string too. A dot in the name of a tool becomes an underscore.
"""

import collections
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsg.constrained.compiler import compile_tables
from jsg.errors import GrammarError
from jsg.speech.dialects import DIALECTS, Dialect
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag

BOARD = pathlib.Path(__file__).with_name("bfcl.json")
TYPES = {
    **dict.fromkeys(("object", "dict", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "Array", "ArrayList", "Queue", "Stack"), "array"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}


def data() -> pathlib.Path | None:
    """The folder of the package's data; None where it is not installed."""
    found = importlib.util.find_spec("bfcl_eval")
    folders = found.submodule_search_locations if found else None
    return pathlib.Path(folders[0], "data") if folders else None


def tools(folder: pathlib.Path) -> list[Tool]:
    """The tools of all categories, each name and schema once."""
    files = set(folder.glob("BFCL_v4_*.json")) - {folder / "BFCL_v4_format_sensitivity.json"}
    files |= set((folder / "multi_turn_func_doc").glob("*.json"))
    found: dict[str, Tool] = {}
    for function in (function for file in sorted(files) for function in _functions(file)):
        tool = Tool(function["name"].replace(".", "_"), None, _schema(function["parameters"], is_property=False))
        found.setdefault(json.dumps([tool.name, tool.parameters]), tool)
    return list(found.values())


def _functions(file: pathlib.Path) -> Iterator[Mapping[str, Any]]:
    for entry in map(json.loads, filter(None, file.read_text(encoding="utf-8").split("\n"))):
        functions = [entry] if "parameters" in entry else entry.get("function", [])
        yield from functions if isinstance(functions, list) else [functions]


def _schema(schema: Any, *, is_property: bool = True) -> Any:
    """A schema with JSON Schema's types."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if is_property or "type" in made:
        made["type"] = TYPES.get(made.get("type", ""), "string")
    if isinstance(properties := made.get("properties"), Mapping):
        made["properties"] = {name: _schema(each) for name, each in properties.items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in made:
            made[keyword] = _schema(made[keyword])
    return made


def refusal(tool: Tool, dialect: Dialect) -> str | None:
    """Why the grammar of a call of a tool is refused; None where it compiles."""
    try:
        spec = tools_to_structural_tag([tool], "required", dialect)
        compile_tables(spec)
    except GrammarError as error:
        return str(error)
    return None


def styles() -> list[Dialect]:
    """The first dialect of each style of arguments: others write the same arguments between other marks."""
    found: dict[str | None, Dialect] = {}
    for dialect in (DIALECTS["hermes"], *DIALECTS.values()):
        found.setdefault(dialect.call_style, dialect)
    return list(found.values())


def counts(all_tools: Sequence[Tool], dialect: Dialect) -> dict[str, int]:
    """The tools that compile in a dialect, and those that are refused, by the keyword that is to blame."""
    reasons = [refusal(tool, dialect) for tool in all_tools]
    found = collections.Counter("compiled" if reason is None else keyword(reason) for reason in reasons)
    return dict(sorted(found.items()))


def keyword(reason: str) -> str:
    """The keyword that a refusal names, or what else it blames."""
    if "contradicts itself" in reason:
        return "contradicts itself"
    found = re.search(r": ([$\w]+) at #", reason)
    return found[1] if found else "other"


def main() -> None:
    folder = data()
    assert folder is not None, "install bfcl-eval first: make test-long does"
    all_tools = tools(folder)
    found = {"tools": len(all_tools)} | {dialect.name: counts(all_tools, dialect) for dialect in styles()}
    print(json.dumps(found, indent=2))
    if "--write" in sys.argv:
        BOARD.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
