"""What `/metrics` says of pictures is what a real engine did with them."""

from collections.abc import Iterator
from typing import Any

import pytest

from jsg.engine.device.memory import IMAGES_KEPT
from tests.server.battery import GREEDY
from tests.server.running import RunningServer
from tests.server.scrape import scrape_until
from tests.server.vision_model import base64_of, png, write_vision_model
from tests.server.vision_server import vision_server

pytestmark = pytest.mark.slow

TILES, TILE_ROWS, FRAME_ROWS = 3, 25, 4  # of a picture; of a tile and of a frame
ROW_BYTES = 64 * 4  # float32, as wide as the text model
NAMES = ("encoder_calls_total", "encoded_tiles_total", "encoded_images_found_total", "encoded_images_evicted_total")
PICTURE_BYTES = TILES * TILE_ROWS * ROW_BYTES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[RunningServer]:
    """Its encoder takes four tiles or frames at a time, its steps 64 tokens."""
    model_dir = write_vision_model(tmp_path_factory.mktemp("vision") / "model", "llava_next_video")
    with vision_server(model_dir, compile_cache_dir) as made:
        yield made


@pytest.fixture
def told(server: RunningServer) -> "Told":
    assert server.http.post("/flush_cache").status_code == 200
    return Told(server)


class Told:
    """Asks, and looks at what the metrics told of it."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._before = self._read()

    def ask(self, text: str, *seeds: int, **fields: Any) -> None:
        images = [base64_of(png(seed)) for seed in seeds]
        body = {"text": text, "image_data": images, "sampling_params": GREEDY | {"max_new_tokens": 1}, **fields}
        response = self._server.http.post("/generate", json=body)
        assert response.status_code == 200, response.text

    def check(self, calls: int, tiles: int, found: int, evicted: int, *, num_bytes: int) -> None:
        """These have been added since the beginning, and so many bytes are used now."""
        wanted = dict(zip(NAMES, (calls, tiles, found, evicted), strict=True)) | {"vision_cache_bytes": num_bytes}
        now = self._read()
        assert {name: now[name] - self._before.get(name, 0) for name in wanted} == wanted

    def _read(self) -> dict[str, float]:
        """All of them, from an engine that has answered at once."""
        result = scrape_until(self._server.http, lambda each: each.get("jsg:engine_stats_age_seconds") < 1)
        return {name: result.get(f"jsg:{name}") for name in (*NAMES, "vision_cache_bytes")}


def test_a_picture_is_counted_when_it_is_encoded_and_when_it_is_found(told: Told):
    told.check(0, 0, 0, 0, num_bytes=0)
    told.ask("<image>a", 0)
    told.check(1, TILES, 0, 0, num_bytes=PICTURE_BYTES)
    told.ask("<image>b", 0)
    told.check(1, TILES, 0, 0, num_bytes=PICTURE_BYTES)  # it is found in the KV cache, and asked for nowhere else
    told.ask("b<image>", 0)
    told.check(1, TILES, 1, 0, num_bytes=PICTURE_BYTES)
    told.ask("b<image>", 0, cache_salt="of another")
    told.check(2, 2 * TILES, 1, 0, num_bytes=2 * PICTURE_BYTES)


def test_so_are_the_frames_of_a_video(told: Told):
    frames = ",".join(base64_of(png(seed)) for seed in range(6))
    told.ask("<video>a", video_data=frames)
    told.check(2, 6, 0, 0, num_bytes=6 * FRAME_ROWS * ROW_BYTES)  # four at a time


def test_those_that_gave_way_are_counted(told: Told):
    """The pool holds `IMAGES_KEPT` pictures of the largest size, which these have."""
    for seed in range(IMAGES_KEPT):
        told.ask("<image>", seed)
    told.check(IMAGES_KEPT, TILES * IMAGES_KEPT, 0, 0, num_bytes=IMAGES_KEPT * PICTURE_BYTES)
    for seed in range(IMAGES_KEPT, IMAGES_KEPT + 3):
        told.ask("<image>", seed)
    num_seen = IMAGES_KEPT + 3
    told.check(num_seen, TILES * num_seen, 0, 3, num_bytes=IMAGES_KEPT * PICTURE_BYTES)
    told.ask("a<image>", 0)
    told.check(num_seen + 1, TILES * (num_seen + 1), 0, 4, num_bytes=IMAGES_KEPT * PICTURE_BYTES)


def test_a_picture_that_is_refused_is_not_counted(told: Told, server: RunningServer):
    body = {"text": "a", "image_data": base64_of(png()[:-100])}
    assert server.http.post("/generate", json=body).status_code == 400
    told.check(0, 0, 0, 0, num_bytes=0)
