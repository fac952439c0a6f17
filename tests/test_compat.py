"""A benchmark written as SGLang's are runs with the helpers of `jsg.compat`."""

import argparse
import base64
import json
import sys
from pathlib import Path

import PIL.Image
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jsg as sgl
from jsg import compat
from jsg.errors import BackendError, ConfigError
from tests.lang.scripted import ScriptedBackend
from tests.lang.wire_servers import serving


def test_a_benchmark_reads_runs_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    questions, texts = tmp_path / "questions.jsonl", tmp_path / "texts.txt"
    questions.write_text('# a remark\n{"question": "Who?"}\n{"question": "When?"}\n')
    monkeypatch.setattr(sys, "argv", ["bench", "--parallel", "2", "--num-questions", "1"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-questions", type=int)
    args = compat.add_common_sglang_args_and_parse(parser)
    assert (args.parallel, args.host, args.port, args.backend) == (2, "http://127.0.0.1", 30000, "srt")

    @compat.function
    def ask(s, question):
        s += question + compat.gen("answer", max_tokens=4)

    arguments = compat.read_jsonl(questions)[: args.num_questions]
    states = ask.run_batch(arguments, backend=ScriptedBackend(" Nobody"), num_threads=args.parallel)
    compat.dump_state_text(texts, [*states, "as it is"])
    lines = texts.read_text().splitlines()
    assert [line for line in lines if line.strip("=")] == [
        f"{'=' * 40} 0 {'=' * 40}",
        "Who? Nobody",
        f"{'=' * 40} 1 {'=' * 40}",
        "as it is",
    ]


def test_a_backend_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch):
    args = argparse.Namespace(backend="srt", host="http://127.0.0.1", port=1)
    with compat.select_sglang_backend(args) as endpoint:
        assert endpoint.base_url == "http://127.0.0.1:1"
        monkeypatch.setattr("jsg.lang.program.defaults._default", endpoint)
        assert compat.global_config.default_backend is endpoint
    with sgl.OpenAI("m", base_url="http://127.0.0.1:1/v1") as remote:
        sgl.set_default_backend(remote)
        assert compat.global_config.default_backend.model_info == {"model_path": "m"}
    monkeypatch.setattr("jsg.lang.program.defaults._default", None)
    with pytest.raises(ConfigError, match="a program needs a backend"):
        _ = compat.global_config.default_backend
    with pytest.raises(AttributeError):
        compat.global_config.verbosity = 2  # pyright: ignore[reportAttributeAccessIssue]
    args.backend = "srt-no-parallel"
    with pytest.raises(ConfigError, match="must be srt or begin with gpt-"):
        compat.select_sglang_backend(args)


def test_a_notebook_starts_a_server_waits_for_it_and_ends_it(tmp_path: Path):
    serving_models = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=int(__import__('sys').argv[-1]))"
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("{}")
    script = tmp_path / "server.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r}); {serving_models}")
    process, port = compat.launch_server_cmd(f"{sys.executable} \\\n {script}")
    try:
        compat.wait_for_server(f"http://127.0.0.1:{port}", process=process, timeout=60)
    finally:
        compat.terminate_process(process)
    assert process.poll() is not None
    with pytest.raises(BackendError, match="its process has ended"):
        compat.wait_for_server(f"http://127.0.0.1:{port}", process=process)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        compat.wait_for_server(f"http://127.0.0.1:{port}", timeout=0.01)


def test_the_server_of_sglang_becomes_that_of_jsg(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(compat.subprocess, "Popen", lambda words, **_: started.append(words))
    compat.launch_server_cmd("python3 -m sglang.launch_server --model-path tiny \\\n --host 0.0.0.0", port=7)
    assert started == [
        [sys.executable, "-m", "jsg.cli", "serve", "--model-path", "tiny", "--host", "0.0.0.0", "--port", "7"]
    ]


def test_what_notebooks_import_is_there_or_says_what_takes_its_place(capsys: pytest.CaptureFixture[str]):
    from jsg.compat import print_highlight

    print_highlight("<b>")
    assert capsys.readouterr().out == "<b>\n" and compat.is_in_ci() is False
    for name in ("get_chat_template", "ReasoningParser", "ServerArgs", "async_stream_and_merge"):
        with pytest.raises(ImportError, match=f"jsg.compat has no {name}: "):
            exec(f"from jsg.compat import {name}")


def test_a_picture_of_a_notebook(tmp_path: Path):
    path = tmp_path / "red.png"
    PIL.Image.new("RGB", (3, 2), "red").save(path)
    picture, size = compat.load_image(str(path))
    assert size == (3, 2) and picture.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    assert base64.b64decode(compat.encode_image_base64(str(path))) == path.read_bytes()


def test_all_public_names_are_there():
    assert all(
        getattr(compat, name) is getattr(sgl, name)
        for name in ("gen", "function", "CompiledFunction", "REGEX_INT", "set_default_backend")
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = compat.no_such_name


def test_a_tokenizer_by_the_name_of_its_model():
    assert compat.get_tokenizer("tiny").encode("Hello")


async def lines(request: Request) -> Response:
    return Response(json.dumps({"a": 1}))


class TestDownload:
    def test_a_file_is_downloaded_once(self, tmp_path: Path):
        target = str(tmp_path / "lines.jsonl")
        with serving(Starlette(routes=[Route("/data/lines.jsonl", lines)])) as url:
            assert compat.download_and_cache_file(f"{url}/data/lines.jsonl", target) == target
            assert compat.read_jsonl(target) == [{"a": 1}]
            assert compat.download_and_cache_file(f"{url}/gone.jsonl", target) == target
            with pytest.raises(ConfigError, match="did not give the file"):
                compat.download_and_cache_file(f"{url}/gone.jsonl", str(tmp_path / "gone.jsonl"))
        assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]

    def test_an_address_without_a_name_is_refused(self):
        with pytest.raises(ConfigError, match="must end with its name"):
            compat.download_and_cache_file("http://127.0.0.1/")
