"""`jsg serve tiny-vision` over a real socket: what the README of the example has people paste works as it says."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import ROOT, RunningServer, running

pytestmark = pytest.mark.slow

README = ROOT / "examples" / "tiny_vision" / "README.md"
PORT = 30000


@pytest.fixture(scope="module")
def server(compile_cache_dir: str) -> Iterator[RunningServer]:
    options = ("--max-running-requests", "4", "--chunked-prefill-size", "64", "--max-total-tokens", "4096")
    command = ["-m", "jsg.cli", "serve", "tiny-vision", "--port", "0", "--compilation-cache-dir", compile_cache_dir]
    with running([*command, *options]) as made:
        yield made


@pytest.fixture(scope="module")
def pasted() -> str:
    """The command of the README, as it stands there."""
    (command,) = re.findall(r"^```\n(curl .*?)\n```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return command


@pytest.fixture(scope="module")
def stated() -> str:
    """The answer that the README says it gives."""
    (answer,) = re.findall(r"^The answer is \"(.*?)\"", README.read_text(), re.MULTILINE)
    return answer


def content_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("own", [False, True], ids=["as it is", "with a file"])
def test_the_command_of_the_readme_works_when_pasted(server, pasted, stated, tmp_path, own):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    default = f"http://127.0.0.1:{PORT}/"
    assert pasted.count(default) == 1
    command = pasted.replace(default, f"{server.http.base_url}/")
    if own:
        (picture,) = re.findall(r"base64,([\w+/=]+)", command)
        (tmp_path / "picture.png").write_bytes(base64.b64decode(picture))
        (of_file,) = re.findall(r"`base64,(.*?)`", README.read_text())
        command = command.replace(picture, of_file)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert content_of(json.loads(done.stdout)) == stated


def test_questions_about_one_picture_share_it(server, pasted, stated):
    """The body of that command, without curl; then other questions, which encode nothing."""
    body = json.loads(pasted[pasted.index("{") : pasted.rindex("}") + 1])
    picture, question = body["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert server.http.post("/flush_cache").status_code == 200
    before = server.stats()["num_encoded_tiles"]
    answers = {}
    for text in (question["text"], "Which shape is blue?", "Where is the star?", "Is there a red ring?"):
        asked = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
        response = server.http.post("/v1/chat/completions", json=body | {"messages": asked})
        assert response.status_code == 200, response.text
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 36) is bool(answers), "the picture's 36 tokens, from the second question on"
        answers[text] = content_of(response.json())
    assert list(answers.values()) == [stated, "A star.", "In the top right.", "No."]
    assert server.stats()["num_encoded_tiles"] == before + 1


def test_the_model_says_that_it_sees(server):
    info = server.http.get("/get_model_info").json()
    assert info["modalities"] == ["text", "image"] and info["model_path"] == "tiny-vision"
