"""Options of a file and keys of the environment: what a value is, who wins, and what an error says."""

import re

import pytest

from jsg import cli
from jsg.config import KEY_VARIABLES, EngineConfig, ServerConfig
from jsg.errors import ConfigError
from jsg.option_sources import environment_keys, read_options
from tests.conftest import ROOT

SECRET = "sk-not-to-be-shown"


@pytest.fixture
def written(tmp_path):
    def write(text: str | bytes, mode: int = 0o600):
        path = tmp_path / "serve.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    return write


def started(monkeypatch, *arguments: str) -> dict:
    """The records with which a command would run its engine and its server."""
    got = {}

    def serve(engine, server, started_at, log):
        got.update(engine=engine, server=server)
        return 0

    monkeypatch.setattr(cli, "ServerLog", lambda log_format, source: None)
    monkeypatch.setattr(cli, "_serve", serve)
    monkeypatch.setattr(cli, "_check", lambda engine, _: got.update(engine=engine) or 0)
    monkeypatch.setattr(cli, "_compile", lambda engine, out, target, log: got.update(engine=engine) or 0)
    assert cli.main(arguments) == 0
    return got


class TestValues:
    @pytest.mark.parametrize(
        ("line", "value"),
        [
            ("page-size: 16", {"page_size": 16}),
            ("page_size: 016", {"page_size": 16}),  # YAML 1.1 would say 14
            ("context-length: null", {"context_length": None}),
            ("queue-timeout: 5", {"queue_timeout": 5.0}),
            ("queue-timeout: 1e3", {"queue_timeout": 1000.0}),  # YAML 1.1 would say a text
            ("jump-forward: off", {"jump_forward": "off"}),  # YAML 1.1 would say false
            ("speculative: off", {"speculative": "off"}),
            ('speculative-config: \'{"method": "ngram"}\'', {"speculative": "ngram"}),
            ("reasoning-parser: none", {"reasoning_parser": "none"}),
            ("served-model-name: 1.10", {"served_model_name": "1.10"}),
            ("served-model-name: 2026-11-29", {"served_model_name": "2026-11-29"}),
            ("served-model-name: ''", {"served_model_name": ""}),
            ("api-key: 0123", {"api_key": ("0123",)}),
            ("api-key: [one, '2']", {"api_key": ("one", "2")}),
            ("api-key:\n- one\n- two", {"api_key": ("one", "two")}),
            ("api-key: []", {"api_key": ()}),
            ("deterministic: true", {"deterministic": True}),
            ("deterministic: No", {"deterministic": False}),
            ("host: &here a\nserved-model-name: *here", {"host": "a", "served_model_name": "a"}),
            ("{}", {}),
            ("\N{BYTE ORDER MARK}port: 0  # any\r\n", {"port": 0}),
        ],
    )
    def test_a_value_is_read_by_the_type_of_its_option(self, written, line, value):
        assert read_options(written(line)) == value

    def test_it_is_the_value_that_the_command_line_gives(self, written):
        words = ["--mem-fraction-static", "0.5", "--metrics-alias", "vllm", "--max-bypass-tokens", "1_000"]
        lines = "mem-fraction-static: 0.5\nmetrics-alias: vllm\nmax-bypass-tokens: 1_000\n"
        given = vars(cli.command_line().parse_args(["serve", *words]))
        assert read_options(written(lines)).items() <= given.items()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 1\npage-sze: 4", "line 2: there is no option 'page-sze' of 'jsg serve'; did you mean page-size?"),
        ("--page-size: 4", "there is no option '--page-size' of 'jsg serve'; did you mean page-size?"),
        ("model: x", "there is no option 'model' of 'jsg serve'; did you mean model-path?"),
        ("out: x", "line 1: there is no option 'out' of 'jsg serve'; 'jsg serve --help' lists all"),
        ("page-size: 4\n\npage_size: 5", "line 3: page_size is given again after line 1; leave one out"),
        ("[a]: 4", "line 1: a key must be an option's name, but got a list"),
        ("page-size: many", "line 1: page-size must be a whole number, but got the text 'many'"),
        ("page-size: '16'", "page-size must be a whole number, but got the text '16'"),
        ("page-size: 1.5", "page-size must be a whole number, but got 1.5"),
        ("page-size: true", "page-size must be a whole number, but got true"),
        ("page-size: [16]", "page-size must be a whole number, but got a list"),
        ("page-size: 0", r"serve.yaml, line 1: page-size must be in [1, 1024], but got 0"),
        ("queue-timeout: soon", "queue-timeout must be a number, but got the text 'soon'"),
        ("queue-timeout: nan", "queue-timeout must be in [0.001, 1000000.0], but got nan"),
        ("port: null", "port must be a whole number, but got null"),
        ("port:", "port must be a whole number, but got null"),
        ("schedule-policy: sjf", "line 1: schedule-policy must be one of lpm, fcfs, but got 'sjf'"),
        ("host: null", "host must be a text, but got null"),
        ("host: {a: 1}", "host must be a text, but got a mapping"),
        ("host: !!binary aGVsbG8=", "host must be a text, but got a value with a tag"),
        ("host: !!python/object:os.system x", "host must be a text, but got a value with a tag"),
        ("deterministic: 1", "deterministic must be true or false, but got 1"),
        ("deterministic: 'true'", "deterministic must be true or false, but got the text 'true'"),
        ("api-key: null", "api-key must be a text or a list of texts, but got null"),
        (f"api-key: [{SECRET}, null]", "api-key must be a text or a list of texts, but got a list with something else"),
        (f"api-key: {{{SECRET}: 1}}", "api-key must be a text or a list of texts, but got a mapping"),
        ("- page-size", "must be a mapping of options to values, such as 'page-size: 16', but got a list"),
        ("page-size", "must be a mapping of options to values, such as 'page-size: 16', but got the text 'page-size'"),
        ("# page-size: 16\n", "must be a mapping of options to values, such as 'page-size: 16', but it is empty"),
        ("a: 1\n---\nb: 1\n", "--config serve.yaml must be YAML, but in line 2: but found another document"),
        (
            f"port: 1\napi-key: {SECRET}: x",
            "--config serve.yaml must be YAML, but in line 2: mapping values are not allowed",
        ),
        (f"api-key: '{SECRET}\n", "--config serve.yaml must be YAML, but in line 2: found unexpected end of stream"),
        ("host: \x01", "must be YAML, but it has characters that YAML forbids"),
        ("host: " + "[" * 2_000, "must be a mapping of options to values, but it is nested"),
        (b"host: \xff", "--config serve.yaml must be text in UTF-8, but it is not"),
        (b"#" * (2**20 + 1), "must have at most 1048576 bytes, but it has more"),
    ],
    ids=lambda value: ascii(value[:24]),
)
def test_an_error_names_file_line_key_and_rule_and_no_secret(written, text, said):
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        read_options(path)
    assert said in str(caught.value) and str(caught.value).startswith("--config serve.yaml")
    assert str(path.parent) not in str(caught.value) and SECRET not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, said in ((tmp_path / "none.yaml", "--config none.yaml must be a file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=said):
            read_options(path)
    with pytest.raises(ConfigError, match="no file has such a name"):
        read_options(tmp_path / "a\0b")


def test_only_its_owner_may_write_a_file_with_keys(written):
    assert read_options(written("port: 1", 0o664)) == {"port": 1}
    for key in ("api-key", "admin_api_key"):
        with pytest.raises(ConfigError, match="run 'chmod go-w' on it"):
            read_options(written(f"{key}: a", 0o664))


class TestWhoWins:
    def test_the_command_line_wins_over_the_file(self, monkeypatch, written):
        path = written("page-size: 4\nport: 1\nhost: a\napi-key: [file]\ndeterministic: true\nmodel-path: x\n")
        got = started(monkeypatch, "serve", "tiny", "--config", str(path), "--port", "2", "--api-key", "line")
        assert got["engine"] == EngineConfig(model_path="tiny", page_size=4, deterministic=True)
        assert got["server"] == ServerConfig(port=2, host="a", api_key=("line",))

    def test_the_file_gives_the_model(self, monkeypatch, written):
        got = started(monkeypatch, "serve", "--config", str(written("model-path: x\n")))
        assert got["engine"] == EngineConfig(model_path="x")

    def test_options_that_exclude_each_other_do_so_wherever_they_come_from(self, monkeypatch, written, caplog):
        monkeypatch.setattr(cli, "ServerLog", lambda log_format, source: None)
        path = str(written("ep-size: 2\n"))
        assert cli.main(["serve", "--config", path, "--tp-size", "3"]) == 2
        assert "--ep-size must divide --tp-size, which is 3" in caplog.text

    def test_one_file_serves_all_commands(self, monkeypatch, written):
        """A command without a server leaves out its options, and `compile` the folder that it makes itself."""
        path = str(written("page-size: 4\nport: 1\nprograms: folder\n"))
        assert started(monkeypatch, "check", "--config", path)["engine"] == EngineConfig(page_size=4, programs="folder")
        got = started(monkeypatch, "compile", "--config", path, "--out", "folder")
        assert got["engine"] == EngineConfig(page_size=4)

    def test_keys_of_the_environment_come_last(self, monkeypatch, written):
        monkeypatch.setenv("JSG_API_KEY", "variable")
        monkeypatch.setenv("JSG_ADMIN_API_KEY", "admin")
        got = started(monkeypatch, "serve")
        assert got["server"] == ServerConfig(api_key=("variable",), admin_api_key="admin")
        got = started(monkeypatch, "serve", "--config", str(written("api-key: file\n")))
        assert got["server"] == ServerConfig(api_key=("file",), admin_api_key="admin")
        assert started(monkeypatch, "serve", "--api-key", "line")["server"].api_key == ("line",)

    def test_an_empty_key_of_the_environment_is_no_open_server(self):
        with pytest.raises(ConfigError, match="JSG_API_KEY must have a key for --api-key, but it is empty"):
            environment_keys({"JSG_API_KEY": ""})


def test_variables_of_ours_are_for_keys_only():
    """The style guide's rule: each name that begins with JSG_ in the package's Python is in `KEY_VARIABLES`."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "jsg").rglob("*.py")]
    found = {name for text in texts if "JSG_" in text for name in re.findall(r"\bJSG_\w+", text)}
    assert found == set(KEY_VARIABLES.values())
    assert all(name.endswith("_KEY") for name in found)
