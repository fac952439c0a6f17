"""`jsg grammar check` and `jsg grammar export`, which need no model that is loaded."""

import argparse
import contextlib
import json
import pathlib
import sys
import typing
from typing import Any

from jsg.config import option
from jsg.errors import ConfigError
from jsg.types import GRAMMAR_FIELDS, GRAMMAR_OPTIONS, GrammarKind, GrammarSpec, PropertyOrder, Whitespace

NO_MATCH = 1
GRAMMAR_ENDINGS: dict[str, GrammarKind] = {".json": "json_schema", ".gbnf": "ebnf", ".ebnf": "ebnf", ".regex": "regex"}
FILE_CONTENTS = "in a .json file a list means choices, and an object of type structural_tag means a structural tag"


def add_grammar_command(commands: Any) -> None:
    """Adds the command and its actions."""
    text = "check a grammar, or compile it for a browser"
    actions = commands.add_parser("grammar", help=text, description=text, allow_abbrev=False).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    text = "show whether a grammar compiles, how large it is, which text it forces, and where a text stops matching"
    check = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    _add_grammar_options(check, "file")
    check.add_argument("--text", metavar="T", help="a text to match; - reads it from stdin")
    text = "compile a grammar, and the vocabulary of a model, to files for a browser"
    export = actions.add_parser("export", help=text, description=text, allow_abbrev=False)
    export.add_argument("out", metavar="FILE", help="the file to write the compiled grammar to")
    _add_grammar_options(export, "--grammar")
    text = "a model or its tokenizer, as --model-path names it; NAME.vocabulary, which its grammars need, is made too"
    export.add_argument("--tokenizer", metavar="DIR", help=text)


def _add_grammar_options(command: argparse.ArgumentParser, file: str) -> None:
    """The ways to give a grammar; `file` is what gives the name of a file."""
    source = command.add_mutually_exclusive_group(required=True)
    endings = ", ".join(f"{ending} ({kind})" for ending, kind in GRAMMAR_ENDINGS.items())
    optional: dict[str, Any] = {"dest": "file"} if file.startswith("-") else {"nargs": "?"}
    about = f"a file with the grammar, whose ending tells its kind: {endings}; {FILE_CONTENTS}"
    source.add_argument(file, metavar="FILE", help=about, **optional)
    source.add_argument("--json-schema", metavar="S", help="a JSON Schema")
    source.add_argument("--regex", metavar="R", help="a regular expression")
    source.add_argument("--ebnf", metavar="G", help="an EBNF grammar")
    source.add_argument("--choices", metavar="L", help="a JSON list of texts; the output is one of them")
    source.add_argument("--structural-tag", metavar="S", help="a structural tag as JSON")
    command.add_argument(
        "--whitespace",
        choices=typing.get_args(Whitespace),
        help="the white space in the JSON of a schema or of a structural tag",
    )
    command.add_argument(
        "--property-order",
        choices=typing.get_args(PropertyOrder),
        help="the order of the members of objects: as the schema declares them, or any order ('free')",
    )
    command.add_argument(
        "--open",
        dest="additional_properties",
        action="store_const",
        const="open",
        help="read the schema as JSON Schema says: if an object's schema has no 'additionalProperties', the object may "
        "have members that are not declared",
    )


def run_grammar_command(options: argparse.Namespace) -> int:
    """Returns 0, or 1 where the grammar compiles and does not match the text that was given. Raises JsgError."""
    spec = _grammar_spec(options)
    return _export(spec, options) if options.action == "export" else _check(spec, options)


def _check(spec: GrammarSpec, options: argparse.Namespace) -> int:
    from jsg.constrained.report import check_grammar, describe_text

    text = text_to_read("--text", options.text)
    report = check_grammar(spec, text)
    print(report)
    if report.text is None or text is None:
        return 0
    print(describe_text(report.text, text.encode()))
    return 0 if report.text.is_match else NO_MATCH


def _export(spec: GrammarSpec, options: argparse.Namespace) -> int:
    from jsg.constrained.compiler import annotations, compile_tables
    from jsg.constrained.files import digest_of

    out = pathlib.Path(options.out)
    if options.file is not None and out.resolve() == pathlib.Path(options.file).resolve():
        raise ConfigError(f"FILE must not be the file with the grammar, but got {out.name!r}; choose another name")
    files = {out: compile_tables(spec).to_bytes()}
    if options.tokenizer is not None:
        from jsg.engine.model_tokens import ModelTokens

        tokens = ModelTokens.read(options.tokenizer)
        tokens.check(spec)
        beside = out.with_name(f"{pathlib.Path(options.tokenizer).resolve().name}.vocabulary")
        if beside == out:
            raise ConfigError(f"FILE must not be called as the vocabulary, but got {out.name!r}; choose another name")
        files[beside] = tokens.vocabulary().to_bytes()
    for path, data in files.items():
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ConfigError(
                f"FILE must be in a folder that can be written to, but {path.name!r} gave: {error.strerror}; choose "
                "another"
            ) from None
        print(f"{path.name}: {len(data)} bytes, sha256 {digest_of(data)}")
    for annotation in annotations(spec):
        print(f"ignored: {annotation}")
    return 0


def _grammar_spec(options: argparse.Namespace) -> GrammarSpec:
    """The grammar that an option or a file gives."""
    kind: GrammarKind
    if options.file is not None:
        kind, grammar = _grammar_file(pathlib.Path(options.file))
        source = f"the {kind} in {pathlib.Path(options.file).name}"
    else:
        kind = next(kind for kind in GRAMMAR_FIELDS if getattr(options, kind) is not None)
        grammar, source = getattr(options, kind), option(kind)
    given = {name: getattr(options, name) for name in GRAMMAR_OPTIONS if getattr(options, name) is not None}
    if given and kind not in ("json_schema", "structural_tag"):
        name = "--open" if "additional_properties" in given else option(next(iter(given)))
        raise ConfigError(f"{name} needs a JSON Schema or a structural tag, but got {source}; leave the option out")
    return GrammarSpec(kind, grammar, **given)


def _grammar_file(path: pathlib.Path) -> tuple[GrammarKind, str]:
    """The kind and the text of the grammar in a file."""
    ending = path.suffix.lower()
    if ending not in GRAMMAR_ENDINGS:
        raise ConfigError(f"FILE must end in {' or '.join(GRAMMAR_ENDINGS)}, but got {path.name!r}; rename the file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"FILE must be a text file that can be read, but {path.name!r} gave: {error}; correct it"
        ) from None
    kind = GRAMMAR_ENDINGS[ending]
    if kind == "regex":
        return kind, text.removesuffix("\n")  # an editor ends a file with one
    if kind == "json_schema":
        with contextlib.suppress(ValueError, RecursionError):  # its compiler says what is wrong with it
            value = json.loads(text)
            if isinstance(value, list):
                return "choices", text
            if isinstance(value, dict) and value.get("type") == "structural_tag":
                return "structural_tag", text
    return kind, text


def text_to_read(option_name: str, given: str | None) -> str | None:
    """The text of an option, which - reads from stdin."""
    try:
        text = sys.stdin.read() if given == "-" else given
        if text is not None:
            text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        wrong = error.object[error.start]
        byte = wrong if isinstance(wrong, int) else ord(wrong) & 0xFF  # Python hands a byte b over as U+DC00 + b
        raise ConfigError(
            f"{option_name} must be UTF-8, but byte {byte:#04x} at position {error.start} is not; correct it"
        ) from None
    return text
