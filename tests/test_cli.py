"""The command line: options from the configuration, messages, and the commands around a scripted engine."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jsg
from jsg import cli
from jsg.config import EngineConfig, ServerConfig, option
from jsg.engine.child.protocol import ModelInfo
from jsg.errors import RequestError
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from tests.server.log_lines import read_records

ROOT = Path(__file__).parent.parent
FEW_PROGRAMS = ("--deterministic", "--max-running-requests", "4")


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jsg.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **options)


def parse(*arguments: str):
    return cli.command_line().parse_args(arguments)


class TestOptions:
    def test_every_knob_is_an_option_under_its_name(self):
        text = run("serve", "--help").stdout
        for config in (EngineConfig, ServerConfig):
            for field in dataclasses.fields(config):
                assert option(field.name) in text

    def test_values_have_the_types_of_the_fields(self):
        options = parse(
            *("serve", "some/model", "--page-size", "16", "--mem-fraction-static", "0.5", "--deterministic"),
            *("--context-length", "99", "--port", "0", "--schedule-policy", "fcfs"),
        )
        assert cli._engine_config(options) == EngineConfig(
            model_path="some/model",
            page_size=16,
            mem_fraction_static=0.5,
            deterministic=True,
            context_length=99,
            schedule_policy="fcfs",
        )
        assert cli._given(options, ServerConfig) == {"port": 0}

    @pytest.mark.parametrize(
        ("name", "value", "meant"),
        [
            ("--speculative", "off", "off"),
            ("--speculative-algorithm", "NGRAM", "NGRAM"),
            ("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 9}', "suffix"),
        ],
    )
    def test_drafts_have_the_names_of_other_servers_too(self, name: str, value: str, meant: str):
        assert cli._engine_config(parse("serve", name, value)).speculative == meant

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("EAGLE3", "invalid choice: 'EAGLE3'"),
            ('{"method": "eagle"}', "invalid choice: 'eagle'"),
            ('{"method": "ngram", "model": "some/model"}', "without a model of its own, but has model"),
            ("{}", "must name a method"),
            ('{"method":', "must be a JSON object"),
        ],
    )
    def test_drafts_of_another_model_are_refused(self, value: str, said: str, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            parse("serve", "--speculative-config", value)
        assert said in capsys.readouterr().err

    def test_what_may_be_several_is_repeated(self):
        keys = ("--api-key", "one", "--api-key", "two", "--cors-allow-origin", "https://a.example.com")
        given = cli._given(parse("serve", *keys), ServerConfig)
        assert ServerConfig(**given) == ServerConfig(
            api_key=("one", "two"), cors_allow_origin=("https://a.example.com",)
        )

    def test_without_options_the_fields_have_their_defaults(self):
        assert cli._engine_config(parse("check")) == EngineConfig()

    @pytest.mark.parametrize(
        "arguments",
        [
            ("serve", "--no-such-option"),
            ("serve", "--page", "16"),
            ("serve", "--page-size", "many"),
            ("serve", "--schedule-policy", "best"),
            ("generate",),
            (),
        ],
    )
    def test_what_is_no_option_is_refused(self, arguments, capsys):
        with pytest.raises(SystemExit) as caught:
            parse(*arguments)
        assert caught.value.code == 2

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("check", "--page-size", "0"), "--page-size must be in [1, 1024], but got 0"),
            (("serve", "tiny", "--model-path", "tiny"), "MODEL and --model-path are the same"),
            (("serve", "no/such-model-here"), "no/such-model-here"),
            (("serve", "--shutdown-timeout", "nan"), "--shutdown-timeout must be in"),
            (("compile", "--out", "x", "--target", "h100,b9"), "b200, h100, h200, l4, l40s, rtx4090, rtx5090, "),
            (("compile", "--out", "x", "--programs", "y"), "--programs is for a start"),
            (
                ("compile", "--out", "x", "--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "a:1"),
                "'jsg compile' compiles for one host",
            ),
        ],
    )
    def test_an_error_is_one_line_without_a_trace(self, arguments, said):
        done = run(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
        if arguments[0] in ("serve", "compile"):
            [record] = read_records("text", done.stderr)
            assert record[1:3] == ("ERROR", "compile" if arguments[0] == "compile" else "front")
        else:
            assert done.stderr.startswith("jsg: error: ")

    @pytest.mark.parametrize(
        ("arguments", "command", "said"),
        [
            (("serve", "--prot", "80"), "jsg serve", "'--prot'; did you mean --port?"),
            (("serve", "--page=3"), "jsg serve", "'--page'; did you mean --page-size?"),
            (("generate", "--promt", "x"), "jsg generate", "'--promt'; did you mean --prompt?"),
            (("chat", "--modle-path", "x"), "jsg chat", "did you mean --model-path?"),
            (("check", "-p", "3"), "jsg check", "option '-p'; jsg check --help"),
            (("check", "--tensor-parallel-size", "3"), "jsg check", "'--tensor-parallel-size'; jsg check --help"),
            (("compile", "--ot", "x"), "jsg compile", "did you mean --out?"),
            (("convert", "a", "b", "--tp", "2"), "jsg convert", "did you mean --tp-size?"),
            (("grammar", "check", "--rgx", "x"), "jsg grammar check", "did you mean --regex?"),
            (("grammar", "--rgx", "x"), "jsg grammar", "option '--rgx'"),
            (("--port", "80", "serve"), "jsg", "option '--port'"),
            (("--vesion",), "jsg", "did you mean --version?"),
            (("serve", "a", "b"), "jsg serve", "argument 'b'"),
        ],
    )
    def test_an_unknown_option_gets_its_nearest_name_and_the_usage_of_its_command(
        self, arguments, command, said, capsys
    ):
        with pytest.raises(SystemExit):
            parse(*arguments)
        usage, *_, error = capsys.readouterr().err.splitlines()
        assert usage.startswith(f"usage: {command} [")
        assert error.startswith(f"{command}: error: ") and said in error

    def test_version(self):
        assert run("--version").stdout == f"jsg {jsg.__version__}\n"


class FakeEngine:
    """Answers with the last characters of what it is asked, and remembers how it was asked."""

    def __init__(self, tokenizer, cached_tokens: int = 5, changes: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.media = None
        self.info = ModelInfo(
            model_path="fake",
            context_length=200,
            vocab_size=300,
            eos_token_ids=(257,),
            dtype="float32",
            kv_dtype="float32",
            device="fake",
            max_running_requests=1,
            max_total_tokens=195,
            max_request_tokens=195,
            page_size=1,
        )
        self.calls: list[dict] = []
        self.knobs: dict = {}
        self.interrupted_calls: set[int] = set()
        self.texts = ("an", "answer")
        self._cached_tokens = cached_tokens
        self._changes = changes
        self.is_closed = False

    def generate(self, prompt=None, sampling_params=None, *, input_ids=None, stream=False, **fields):
        self.calls.append({"prompt": prompt, "input_ids": input_ids, "sampling": sampling_params, **fields})
        if input_ids and len(input_ids) > 190:
            raise RequestError("prompt and new tokens must be at most 200")
        return self._stream(len(self.calls)) if stream else self._answer("whole answer")

    def _stream(self, number: int):
        for text in self.texts:
            yield self._answer(text)
            if number in self.interrupted_calls:
                raise KeyboardInterrupt

    def _answer(self, text: str) -> dict:
        logprob = -1.0 - self._changes * len(self.calls)
        meta = {
            "prompt_tokens": 6,
            "cached_tokens": self._cached_tokens if len(self.calls) > 1 else 0,
            "output_token_logprobs": [[logprob, 7, None]],
            "output_top_logprobs": [[[logprob, 7, None], [-5.0, 8, None]]],
        }
        return {"text": text, "output_ids": [7], "meta_info": meta}

    def flush_cache(self) -> bool:
        return True

    def selfcheck(self) -> str:
        return "decode steps beside their floor"

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine(tmp_path, monkeypatch) -> FakeEngine:
    from jsg.processing.tokenizer import load_tokenizer

    write_byte_tokenizer(tmp_path, CHAT_TEMPLATE)
    fake = FakeEngine(load_tokenizer(tmp_path))

    def make(model_path, *, report, **knobs):
        fake.knobs = {"model_path": model_path, **knobs}
        return fake

    monkeypatch.setattr("jsg.engine.offline.engine.Engine", make)
    return fake


class TestGenerate:
    def test_text(self, engine, capsys):
        assert cli.main(["generate", "--prompt", "hi", "--max-new-tokens", "5", "--temperature", "0"]) == 0
        assert capsys.readouterr().out == "whole answer\n"
        assert engine.calls[0]["prompt"] == "hi"
        assert engine.calls[0]["sampling"] == {"max_new_tokens": 5, "temperature": 0.0}
        assert EngineConfig(**engine.knobs) == EngineConfig()
        assert engine.is_closed

    def test_json(self, engine, capsys):
        assert cli.main(["generate", "--prompt", "hi", "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)) == {"text", "output_ids", "meta_info"}

    def test_prompt_from_stdin(self, engine, capsys, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO("from\nstdin"))
        cli.main(["generate", "--prompt", "-"])
        assert engine.calls[0]["prompt"] == "from\nstdin"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--prompt", "hi", "--max-new-tokens", "-1"), "max_new_tokens must be"),
            (("--prompt", "hi", "--temperature", "nan"), "temperature must be"),
            (("--prompt", "hi", "--max-new-tokens", "4096"), "at most 4096, but got 1 + 4096"),
            (("--prompt", "hi", "--max-new-tokens", "64", "--context-length", "64"), "at most 64, but got 1 + 64"),
            (("--prompt", "x" * 9000), "at most 4096"),
            (("--prompt", ""), "at least one token"),
            (("--prompt", "\udcff"), "--prompt must be UTF-8, but byte 0xff at position 0"),
            (("--prompt", "hi", "--task", "embed"), "embeds texts and generates none"),
        ],
    )
    def test_arguments_are_judged_before_an_engine_is_made(self, monkeypatch, capsys, arguments, said):
        monkeypatch.setattr("jsg.engine.offline.engine.Engine", None)
        assert cli.main(["generate", *arguments]) == cli.FAILED
        assert said in capsys.readouterr().err


class TestChat:
    def chat(self, monkeypatch, *lines: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return cli.main(["chat"])

    def asked(self, engine: FakeEngine, call: int) -> str:
        return engine.tokenizer.decode(engine.calls[call]["input_ids"], skip_special_tokens=False)

    def test_the_conversation_is_kept(self, engine, capsys, monkeypatch):
        assert self.chat(monkeypatch, "one", "two") == 0
        assert capsys.readouterr().out == "answer\nanswer\n"
        assert self.asked(engine, 1) == (
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n"
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
        )
        assert engine.calls[0]["sampling"] == {"max_new_tokens": 195 - len(engine.calls[0]["input_ids"])}
        assert engine.is_closed

    def test_an_answer_begins_without_the_space_of_a_continued_text(self, engine, capsys, monkeypatch):
        engine.texts = (" ", " an", " an answer")
        self.chat(monkeypatch, "one")
        assert capsys.readouterr().out == " an answer\n"
        engine.tokenizer.strips_leading_space = True
        self.chat(monkeypatch, "one", "two")
        assert capsys.readouterr().out == "an answer\nan answer\n"
        assert "assistant\nan answer<|im_end|>" in self.asked(engine, 2)

    def test_ctrl_c_ends_the_answer_only(self, engine, capsys, monkeypatch):
        engine.interrupted_calls = {1}
        assert self.chat(monkeypatch, "one", "two") == 0
        assert capsys.readouterr().out == "an\nanswer\n"
        assert "assistant\nan<|im_end|>" in self.asked(engine, 1)

    def test_a_question_that_does_not_fit_is_dropped(self, engine, capsys, monkeypatch):
        assert self.chat(monkeypatch, "x" * 300, "short") == 0
        captured = capsys.readouterr()
        assert "at most 200" in captured.err
        assert "x" not in self.asked(engine, 1)


class TestCheck:
    def test_equal_answers_pass(self, engine, capsys):
        assert cli.main(["check"]) == 0
        said = capsys.readouterr().out
        assert "cold = warm: yes" in said and "5 of 6 prompt tokens" in said
        assert "decode steps beside their floor" in said and "jaxlib" in said

    def test_other_logprobs_fail(self, engine, capsys):
        engine._changes = 0.01
        assert cli.main(["check"]) == 1
        assert "cold = warm: NO" in capsys.readouterr().out

    def test_an_unused_cache_fails_unless_there_is_none(self, engine, capsys):
        engine._cached_tokens = 0
        assert cli.main(["check"]) == 1
        engine.info = dataclasses.replace(engine.info, caches_prefixes=False)
        assert cli.main(["check"]) == 0


def answer(*entries: tuple[int, float, float]) -> dict:
    """Entries of (token, its logprob, the second best logprob)."""
    meta = {
        "output_token_logprobs": [[logprob, token, None] for token, logprob, _ in entries],
        "output_top_logprobs": [[[logprob, token, None], [second, 0, None]] for token, logprob, second in entries],
    }
    return {"meta_info": meta}


def difference(cold: dict, warm: dict) -> str | None:
    return cli.find_difference(cold, warm, cli.MAX_LOGPROB_CHANGE["float32"])


class TestDifference:
    def test_rounding_is_none(self):
        assert difference(answer((5, -1.0, -2.0)), answer((5, -1.00005, -2.0))) is None

    def test_a_changed_logprob_is_one(self):
        assert "log-probability" in str(difference(answer((5, -1.0, -2.0)), answer((5, -1.001, -2.0))))

    def test_another_token_is_one(self):
        assert "token 0" in str(difference(answer((5, -1.0, -2.0)), answer((6, -1.0, -2.0))))

    def test_what_follows_a_tie_is_not_compared(self):
        cold, warm = answer((5, -1.0, -1.0001), (5, -1, -9)), answer((6, -1.0, -1.0001), (8, -2, -9))
        assert difference(cold, warm) is None

    def test_another_length_is_one(self):
        assert difference(answer((5, -1.0, -2.0)), answer()) is not None

    def test_sixteen_bits_round_more(self):
        cold, warm = answer((5, -1.0, -2.0), (5, -1.0, -1.01)), answer((5, -1.02, -2.0), (6, -1.0, -1.01))
        assert "log-probability" in str(difference(cold, warm))
        assert cli.find_difference(cold, warm, cli.MAX_LOGPROB_CHANGE["bfloat16"]) is None


@pytest.mark.slow
class TestEndToEnd:
    """`jsg serve` on the embedded model, through the real engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls):
        import httpx

        process = subprocess.Popen(
            [sys.executable, "-m", "jsg.cli", "serve", "--port", "0", "--max-total-tokens", "4096", *FEW_PROGRAMS],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        with process:
            line = process.stdout.readline()
            address = line.split(" is ready at ")[1].split()[0]
            with httpx.Client(base_url=address, timeout=60) as http:
                yield http
            process.terminate()
            assert process.wait(30) == 0
            process.stdout.read()

    def test_the_second_time_is_cached_and_equal(self, server):
        body = {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
        cold, warm = (server.post("/generate", json=body).json() for _ in range(2))
        assert cold["output_ids"] == warm["output_ids"]
        assert warm["meta_info"]["cached_tokens"] == warm["meta_info"]["prompt_tokens"] - 1
        assert server.post("/flush_cache").status_code == 200
        assert server.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0

    def test_a_stream_gives_what_the_whole_gives(self, server):
        body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
        whole = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        with server.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        deltas = [json.loads(item)["choices"][0]["delta"] for item in data[:-1]]
        assert data[-1] == "[DONE]"
        assert "".join(delta.get("content", "") for delta in deltas) == whole

    def test_logprobs_of_a_prompt(self, server):
        body = {"prompt": "one two three", "max_tokens": 0, "echo": True, "logprobs": 2}
        shown = server.post("/v1/completions", json=body).json()["choices"][0]
        assert shown["text"] == "one two three" and shown["logprobs"]["token_logprobs"][0] is None
        assert all(value < 0 for value in shown["logprobs"]["token_logprobs"][1:])

    def test_check_times_the_step(self):
        done = run("check", "--max-total-tokens", "4096", "--max-running-requests", "4")
        assert done.returncode == 0
        assert done.stderr.startswith("device: cpu: cpu; JAX has no other device\nprograms: float32, attention by")
        assert "; --quantization int8 would be faster for few requests at a time\n" in done.stderr
        assert "memory plan: weights" in done.stderr
        steps = [line for line in done.stdout.splitlines() if line.endswith(tuple("0123456789")) and "cached" in line]
        assert len(steps) == 2
        assert "this device copies" in done.stdout

    def test_refusals_of_the_engine_arrive(self, server):
        response = server.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 10**6}})
        assert response.status_code == 400 and "at most 4096" in response.json()["error"]["message"]
