"""`jsg grammar check` and `jsg grammar export`: no server, and no more of a model than its tokenizer."""

import io
import shutil
from pathlib import Path

import pytest

from jsg import cli
from jsg.constrained.compiler import compile_tables
from jsg.constrained.grammar import CompiledGrammar
from jsg.constrained.tables import StaticTables
from jsg.engine.model_tokens import ModelTokens
from jsg.sources import EMBEDDED
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import read_vocabulary

SUM = 'root ::= expr\nexpr ::= expr "+" term | term\nterm ::= [0-9]+ | "(" expr ")"\n'


def check(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["grammar", "check", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_regex_and_what_it_forces(capsys):
    status, out, _ = check(capsys, "--regex", "hello (world|there)")
    assert status == 0
    assert "compiles: yes" in out and "positions, 1 rules" in out
    assert "forced:   'hello '" in out


def test_a_text_that_matches(capsys):
    status, out, _ = check(capsys, "--regex", "[a-z]+", "--text", "abc")
    assert status == 0
    assert "text:     matches" in out and "next:     'a' to 'z' or the end" in out


def test_a_text_that_is_a_beginning(capsys):
    status, out, _ = check(capsys, "--regex", "hello (world|there)", "--text", "hello wo")
    assert status == 1
    assert "is a beginning, but may not end here" in out and "'rld' is forced" in out


def test_a_text_that_leaves_the_grammar(capsys):
    status, out, _ = check(capsys, "--ebnf", SUM, "--text", "1+(2\n")
    assert status == 1
    assert "line 1, column 5: after '1+(2' '\\n' may not come" in out
    assert "next:     ')', '+', '0' to '9'" in out


def test_a_file_has_the_kind_of_its_ending(capsys, tmp_path):
    path = tmp_path / "sum.gbnf"
    path.write_text(SUM)
    status, out, _ = check(capsys, str(path), "--text", "1+(2+3)")
    assert status == 0 and "matches" in out
    (tmp_path / "word.regex").write_text("[a-z]+\n")  # an editor ends a file with a line break
    assert check(capsys, str(tmp_path / "word.regex"), "--text", "abc")[0] == 0


def test_a_schema_with_its_options(capsys, tmp_path):
    path = tmp_path / "point.json"
    path.write_text('{"properties": {"x": {"const": 1}, "y": {"const": 2}}, "required": ["x", "y"], "type": "object"}')
    assert check(capsys, str(path), "--text", '{"x": 1, "y": 2}')[0] == 0
    assert check(capsys, str(path), "--text", '{"y":2,"x":1}')[0] == 1
    free = ("--whitespace", "flexible", "--property-order", "free")
    assert check(capsys, str(path), "--text", '{"y":2,"x":1}', *free)[0] == 0
    assert check(capsys, str(path), "--text", '{"x": 1, "y": 2, "z": 3}')[0] == 1
    assert check(capsys, str(path), "--text", '{"x": 1, "y": 2, "z": 3}', "--open")[0] == 0


def test_the_text_may_come_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert check(capsys, "--regex", "[a-z]+", "--text", "-")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--regex", "(?=a)b"), "look"),
        (("--ebnf", "root ::= nobody"), "nobody"),
        (("grammar.txt",), "must end in"),
        (("nowhere.gbnf",), "nowhere.gbnf"),
    ],
)
def test_what_does_not_compile_is_an_error_of_one_line(capsys, arguments, said):
    status, out, err = check(capsys, *arguments)
    assert status == 2 and not out
    assert said in err and err.count("\n") == 1


def test_one_grammar_is_needed(capsys):
    with pytest.raises(SystemExit):
        check(capsys)
    with pytest.raises(SystemExit):
        check(capsys, "--regex", "a", "--ebnf", SUM)


TAG = (
    '{"type": "structural_tag", "format": '
    '{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}'
)
OLD_TAG = (
    '{"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {"const": 1}, "end": "</a>"}], '
    '"triggers": ["<a>"]}'
)
KINDS = {
    "word.regex": ("[a-z]+\r\n", "abc", "1"),
    "sum.gbnf": (SUM, "1+2", "+"),
    "sum.ebnf": ("\ufeff" + SUM, "1+2", "+"),
    "point.json": ('\ufeff{"const": 1}', "1", "2"),
    "any.json": ("true", "[1, {}]", "]"),
    "list.json": ('["yes", "no"]', "no", "maybe"),
    "tag.json": (TAG, "<a>b</a>", "<b>"),
    "old.JSON": (OLD_TAG, "go: <a>1</a>.", "<a>2"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_each_kind(capsys, tmp_path, name):
    grammar, right, wrong = KINDS[name]
    (tmp_path / name).write_bytes(grammar.encode())
    assert check(capsys, str(tmp_path / name), "--text", right)[0] == 0
    assert check(capsys, str(tmp_path / name), "--text", wrong)[0] == 1


def test_choices_and_a_structural_tag(capsys):
    assert check(capsys, "--choices", '["yes", "no"]', "--text", "yes")[0] == 0
    assert check(capsys, "--choices", '["yes", "no"]', "--text", "nothing")[0] == 1
    assert check(capsys, "--structural-tag", TAG, "--text", "<a>b</a>")[0] == 0
    spaced = OLD_TAG.replace('{"const": 1}', '{"type": "array", "items": {"const": 1}}')
    assert check(capsys, "--structural-tag", spaced, "--text", "<a>[1,1]</a>")[0] == 1
    assert check(capsys, "--structural-tag", spaced, "--text", "<a>[1,1]</a>", "--whitespace", "compact")[0] == 0


@pytest.mark.parametrize("option", [("--whitespace", "fixed"), ("--property-order", "free"), ("--open",)])
@pytest.mark.parametrize("grammar", [("--regex", "a"), ("--ebnf", SUM), ("--choices", '["a"]')])
def test_an_option_that_would_do_nothing_is_refused(capsys, option, grammar):
    status, out, err = check(capsys, *grammar, *option)
    assert status == 2 and not out
    assert option[0] in err and grammar[0] in err and err.count("\n") == 1


def test_bytes_that_are_no_text_are_refused(capsys, monkeypatch, tmp_path):
    status, out, err = check(capsys, "--regex", "[a-z]+", "--text", "ab\udcff")  # as Python hands them over
    assert status == 2 and not out and err.count("\n") == 1
    assert "--text must be UTF-8" in err and "byte 0xff" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert "--text must be UTF-8" in check(capsys, "--regex", "[a-z]+", "--text", "-")[2]
    (tmp_path / "a.regex").write_bytes(b"\xff")
    assert "FILE must be" in check(capsys, str(tmp_path / "a.regex"))[2]
    assert "surrogate" in check(capsys, "--regex", "ab\udcff")[2]


def test_it_says_when_a_text_can_be_read_in_too_many_ways(capsys):
    palindromes = 'root ::= "a" | "b" | "a" root "a" | "b" root "b"'
    assert "matches" in check(capsys, "--ebnf", palindromes, "--text", "ab" * 60 + "a")[1]
    status, _, said = check(capsys, "--ebnf", palindromes, "--text", "ab" * 600 + "a")
    assert status == 2 and "at most 256 ways at once" in said and "less ambiguous" in said


def test_what_is_an_annotation_is_named(capsys):
    schema = '{"properties": {"a": {"format": "colour"}}, "maxLenght": 3}'
    status, out, _ = check(capsys, "--json-schema", schema)
    assert status == 0
    assert "ignored:  format 'colour' at #/properties/a/format" in out
    assert "ignored:  maxLenght at #/maxLenght" in out


def export(capsys, *arguments: str | Path) -> tuple[int, str, str]:
    status = cli.main(["grammar", "export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_an_exported_grammar_allows_what_the_engine_allows(capsys, tmp_path):
    (tmp_path / "sum.gbnf").write_text(SUM)
    status, out, _ = export(capsys, tmp_path / "sum.grammar", "--grammar", tmp_path / "sum.gbnf", "--tokenizer", "tiny")
    grammar, vocabulary = ((tmp_path / name).read_bytes() for name in ("sum.grammar", "tiny.vocabulary"))
    assert status == 0 and [line.partition(":")[0] for line in out.splitlines()] == ["sum.grammar", "tiny.vocabulary"]
    assert f"{len(grammar)} bytes, sha256 {grammar[24:56].hex()}" in out
    own = CompiledGrammar(compile_tables(GrammarSpec("ebnf", SUM)), ModelTokens.read("tiny").vocabulary())
    read = CompiledGrammar(StaticTables.from_bytes(grammar), read_vocabulary(vocabulary))
    assert own.mask(own.start).key == read.mask(read.start).key is not None


def test_a_tokenizer_alone_has_a_row_for_each_token(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["tiny"] / name, tmp_path)
    alone, whole = ModelTokens.read(str(tmp_path)), ModelTokens.read("tiny")
    assert alone.size == alone.tokenizer.vocab_size <= whole.size and set(alone.eos_ids) <= set(whole.eos_ids)
    assert alone.vocabulary().eos_ids


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(capsys, tmp_path):
    tag = TAG.replace('"<a>"', '{"type": "token", "token": "<no_such>"}')
    source = tmp_path / "a.json"
    source.write_text("{}")
    for arguments, said in (
        (("a.json", "--grammar", source), "not be the file with the grammar"),
        (("a.grammar", "--regex", "(", "--tokenizer", "tiny"), "parenthesis"),
        (("a.grammar", "--regex", "a", "--tokenizer", tmp_path), "tokenizer"),
        (("a.grammar", "--structural-tag", tag, "--tokenizer", "tiny"), "<no_such>"),
        (("tiny.vocabulary", "--regex", "a", "--tokenizer", "tiny"), "choose another name"),
        (("no/folder", "--regex", "a"), "No such file or directory"),
    ):
        status, out, err = export(capsys, tmp_path / arguments[0], *arguments[1:])
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert [*tmp_path.iterdir()] == [source] and source.read_text() == "{}"
