"""`jsg grammar check`: no model, no server."""

import io

import pytest

from jsg import cli

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
    assert "text:     matches" in out
    assert "next:     'a' to 'z' or the end" in out


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
