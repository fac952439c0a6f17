"""Nothing that is sent with a picture or a video gives a 5xx: bodies close to valid ones, on an engine that sees."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.processing.test_media_decode import BOMBS, FILES
from tests.server.battery import GREEDY, engine_pid
from tests.server.running import RunningServer
from tests.server.test_fuzz import check_damaged, check_spoiled, damages, junk, send, spoiled
from tests.server.vision_model import base64_of, data_url, png, write_vision_model
from tests.server.vision_server import IMAGE_WAYS, VIDEO_WAYS, image_part, path_of, video_part, vision_server

pytestmark = pytest.mark.slow

PNG = png(0, (3, 4))
FILE, URL = base64_of(PNG), data_url(PNG)
FRAMES = f"{FILE},{FILE}"  # one alone has too few tokens
RICH: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": ["<image>a<image>", "<video>b"],
        "image_data": [[FILE, URL], None],
        "video_data": [None, FRAMES],
        "num_frames": 2,
        "sampling_params": {"max_new_tokens": 2, "n": 2, "temperature": 0.5},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": True,
    },
    "/select": {
        "prompt": ["a", image_part(FILE), {"markup": "<image>"}, video_part(FRAMES), {"template": "b"}],
        "choices": ["yes", "no"],
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "a"},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                    {"type": "text", "text": "<image>"},
                    {"type": "video_url", "video_url": {"url": f"{URL},{FILE}", "num_frames": 2}},
                ],
            },
        ],
        "max_completion_tokens": 2,
        "stream": True,
    },
}
"""Larger bodies, of which there is more to spoil."""
BODIES: dict[str, list[dict[str, Any]]] = {path_of(way): [] for way in (*IMAGE_WAYS, *VIDEO_WAYS)}
for ways, file in ((IMAGE_WAYS, FILE), (VIDEO_WAYS, FRAMES)):
    for way, body in ways.items():
        BODIES[path_of(way)].append(body(file))
for path, rich in RICH.items():
    BODIES[path].append(rich)

files = st.sampled_from(
    [*FILES.values(), *BOMBS.values(), b"", b"hello", b"GIF89a", *(data[:30] for data in FILES.values())]
)
written = st.builds(base64_of, files) | st.builds(data_url, files)
sources = written | st.builds(",".join, st.lists(written, max_size=3)) | st.sampled_from(
    ["data:", "data:,", "data:;base64,", "data:;base64,A", "http://127.0.0.1:1/a.png", "file:///etc/passwd", "=", ","]
)  # fmt: skip
any_source = sources | st.lists(sources | st.none(), max_size=3) | st.builds(image_part, sources) | junk
placed = [(path, body) for path, bodies in BODIES.items() for body in bodies]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[RunningServer]:
    """Requests are short: a picture takes some 80 tokens."""
    model_dir = write_vision_model(tmp_path_factory.mktemp("vision") / "model", "llava_next_video")
    options = ["--context-length", "200", "--max-running-requests", "32"]
    with vision_server(model_dir, compile_cache_dir, *options) as server:
        pid = engine_pid(server)
        yield server
        assert server.process.poll() is None
        assert engine_pid(server) == pid, "the engine process was lost"
        server.wait_for_stats(num_running=0)
        good = {"text": "a", "image_data": FILE, "sampling_params": GREEDY | {"max_new_tokens": 2}}
        assert len(server.http.post("/generate", json=good).json()["output_ids"]) == 2


@pytest.mark.parametrize(("path", "body"), placed, ids=range(len(placed)))
def test_what_is_spoiled_is_right_before(server: RunningServer, path, body):
    response = send(server, path, json.dumps(body).encode())
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("num_examples", [100, pytest.param(300, marks=pytest.mark.long)])
class TestMutated:
    """Three hundred examples are long."""

    def test_spoiled_bodies(self, server: RunningServer, num_examples: int):
        @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(spoilt=spoiled(BODIES, any_source), as_utf8=st.booleans())
        def run(spoilt, as_utf8):
            check_spoiled(server, spoilt, as_utf8)

        run()

    def test_damaged_bytes(self, server: RunningServer, num_examples: int):
        """Most bytes of these bodies are those of a picture in base64."""

        @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(where=st.sampled_from(placed), cuts=damages)
        def run(where, cuts):
            check_damaged(server, *where, cuts)

        run()
