"""Bad pictures and videos at every endpoint of a real server: a refusal that helps, and nobody else notices.

Beside them streams look at a good picture. Every step has one shape, so their tokens must be the same each time.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.processing.test_media_decode import BOMBS
from tests.server.battery import GREEDY, RAW, VALID, Battery, encode, unnoticed
from tests.server.films import write_film
from tests.server.test_images_bad import BAD
from tests.server.vision_model import base64_of, data_url, png, saved, write_vision_model
from tests.server.vision_server import (
    FEW,
    IMAGE_WAYS,
    VIDEO_WAYS,
    image_part,
    path_of,
    program,
    video_part,
    vision_server,
)

pytestmark = pytest.mark.slow

MAX_BYTES = 2**20  # of the files of a request
MAX_PIXELS = 2**25
STREAM_LEN = 200
NO_BASE64 = ["", "a", "AAÄA", "iVBO Rw0=", "iVBO\nRw0=", "AAA=AAAA", "AA-_", "\u202e", "%s", "\0", "data:,", "file:a"]
SHADES = range(0, 240, 20)
GOOD_FILE = base64_of(png())
WATCHED = {"text": "What is in <image>?", "image_data": GOOD_FILE}

image_ways = pytest.mark.parametrize("way", IMAGE_WAYS)
video_ways = pytest.mark.parametrize("way", VIDEO_WAYS)


@pytest.fixture(scope="module")
def battery(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[Battery]:
    model_dir = write_vision_model(tmp_path_factory.mktemp("vision") / "model", "llava_next_video")
    with vision_server(model_dir, compile_cache_dir, "--max-media-bytes", str(MAX_BYTES)) as server:
        made = Battery(server)
        for path, body in VALID.items():
            made.post(path, body)
        for way, body in IMAGE_WAYS.items():
            assert made.post(path_of(way), body(GOOD_FILE)).status_code == 200
        made.post("/generate", IMAGE_WAYS["/generate"](large(0)))
        sampling = GREEDY | {"max_new_tokens": STREAM_LEN}
        tokens = made.post("/generate", WATCHED | {"sampling_params": sampling}).json()["output_ids"]
        assert len(tokens) == STREAM_LEN
        with unnoticed(made, model_dir, WATCHED, tokens):
            yield made


def large(shade: int) -> str:
    """A file of less than `MAX_BYTES` whose pixels take 75 MB."""
    data = saved(Image.new("RGB", (5000, 5000), (shade, 9, 9)))
    assert len(data) < MAX_BYTES
    return base64_of(data)


def refused(battery: Battery, way: str, body: dict[str, Any], *said: str) -> str:
    """The message. Of a program only the call that was to be shown the file ends, and the answer tells of it."""
    path = path_of(way)
    if path != "/v1/programs":
        return battery.refused(path, body, *said)["message"]
    response = battery.post(path, body)
    answer = response.json()
    if response.status_code == 200:
        battery.bodies.append(response.text)
        (error,) = answer["errors"]
        assert error["type"] == "RequestError", "what nobody foresaw is a JsgError"
    else:
        assert response.status_code == 400
        error = answer["error"]
    assert all(words in error["message"] for words in said), error
    return error["message"]


class TestFiles:
    @image_ways
    @pytest.mark.parametrize("name", BAD)
    def test_bad_pictures_are_refused(self, battery: Battery, way, name):
        data, said = BAD[name]
        refused(battery, way, IMAGE_WAYS[way](base64_of(data)), *([said] if data else []))

    @pytest.mark.parametrize("kind", BOMBS)
    def test_bombs_are_refused(self, battery: Battery, kind):
        for way, body in IMAGE_WAYS.items():
            refused(battery, way, body(base64_of(BOMBS[kind])), f"at most {MAX_PIXELS} pixels")

    @image_ways
    def test_what_is_no_base64_is_refused(self, battery: Battery, way):
        for text in NO_BASE64 if way == "/generate" else NO_BASE64[:3]:
            refused(battery, way, IMAGE_WAYS[way](text))

    @pytest.mark.parametrize("shade", range(1, 6))
    def test_what_a_large_picture_took_is_given_back(self, battery: Battery, shade):
        """Kept, they would be more than the battery allows."""
        assert battery.post("/generate", IMAGE_WAYS["/generate"](large(shade))).status_code == 200

    @video_ways
    @pytest.mark.parametrize("cut", [12, 9 / 10])
    def test_videos_that_are_cut_off_are_refused(self, battery: Battery, way, cut):
        data = write_film(SHADES)
        data = data[: cut if isinstance(cut, int) else int(len(data) * cut)]
        refused(battery, way, VIDEO_WAYS[way](base64_of(data)))

    @video_ways
    def test_what_is_no_video_is_refused(self, battery: Battery, way):
        assert battery.post(path_of(way), VIDEO_WAYS[way](base64_of(write_film(SHADES)))).status_code == 200
        for data in (
            b"",
            b"hello, this is no film",
            np.random.default_rng(0).bytes(2000),
            b"\0\0\0\x18ftypmp42" + bytes(2000),
        ):
            refused(battery, way, VIDEO_WAYS[way](base64_of(data)))


class TestTotals:
    def test_of_bytes(self, battery: Battery):
        data = base64_of(np.random.default_rng(0).bytes(MAX_BYTES + 1))
        for way, body in IMAGE_WAYS.items():
            refused(battery, way, body(data), f"at most {MAX_BYTES} bytes")
        half = base64_of(png(0, (500, 400)))
        assert len(half) < MAX_BYTES * 4 // 3 < 2 * len(half)
        battery.refused("/generate", {"text": "a", "image_data": [half, base64_of(png(1, (500, 400)))]}, "bytes")

    def test_of_pictures(self, battery: Battery):
        files = [base64_of(png(seed, (2, 2))) for seed in range(65)]
        battery.refused("/generate", {"text": "a", "image_data": files}, "at most 64 pictures")
        battery.refused("/generate", {"prompt": [image_part(file) for file in files]}, "at most")
        content = [{"type": "image_url", "image_url": {"url": f"data:;base64,{file}"}} for file in files]
        battery.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}, "at most 64")

    def test_of_the_context(self, battery: Battery):
        files = [base64_of(png(seed)) for seed in range(20)]
        battery.refused("/generate", {"text": "a", "image_data": files}, "prompt and new tokens")
        battery.refused("/generate", {"text": "a", "image_data": files[:1] * 20}, "prompt and new tokens")

    @pytest.mark.parametrize("value", [0, -1, 4097, 10**30, 1.5, "2", True, [2], {}])
    def test_of_frames(self, battery: Battery, value):
        for body in ({"text": "a", "video_data": TWO_FRAMES, "num_frames": value}, {"prompt": [shown(value)]}):
            assert "num_frames" in battery.refused("/generate", body)["message"]

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, [2], {}])
    def test_of_frames_in_a_program(self, battery: Battery, value):
        refused(battery, "/v1/programs", {"graph": program("video", shown(value))}, "num_frames")
        assert battery.post("/v1/programs", {"graph": program("video", shown(4096))}).json()["errors"] == []


TWO_FRAMES = f"{GOOD_FILE},{GOOD_FILE}"


def shown(num_frames: Any) -> dict[str, Any]:
    return video_part(TWO_FRAMES) | {"num_frames": num_frames}


DEEP = [[["a"]]]
BAD_OF_ONE = {
    "number": 5, "float": 1.5, "bool": True, "object": {}, "URL in an object": {"url": GOOD_FILE}, "empty": "",
    "list of number": [5], "list of bool": [True], "list of object": [{}], "list of null": [None],
    "list of empty": [""], "list of list": [[GOOD_FILE]], "list of empty list": [[]], "deep": DEEP,
    "good and null": [GOOD_FILE, None], "many": ["a"] * 2049, "many nulls": [None] * 2049,
    "many in one": [["a"] * 2049], "object deep": {"a": DEEP},
}  # fmt: skip
BAD_OF_TWO = {
    "none": [], "too few": [GOOD_FILE], "too many": [None] * 3, "number": [GOOD_FILE, 5], "object": [{}, None],
    "null in a list": [GOOD_FILE, [None]], "number in a list": [[GOOD_FILE, 5], None], "empty": ["", None],
    "empty in a list": [[""], None], "deep": [DEEP, None], "many in one": [["a"] * 2049, None], "bool": False,
}  # fmt: skip
BAD_URLS = {
    "number": 5, "bool": True, "text": data_url(png()), "list": [data_url(png())], "empty object": {},
    "number inside": {"url": 5}, "null inside": {"url": None}, "list inside": {"url": [data_url(png())]},
    "object inside": {"url": {"url": data_url(png())}}, "another name": {"uri": data_url(png())},
    "one name more": {"url": data_url(png()), "x": 1}, "detail": {"url": data_url(png()), "detail": "huge"},
    "number in detail": {"url": data_url(png()), "detail": 5}, "deep": {"url": DEEP},
}  # fmt: skip
BAD_PARTS = {
    "number": {"image": 5}, "list": {"image": [GOOD_FILE]}, "object": {"image": {"url": GOOD_FILE}},
    "no type": {"image": GOOD_FILE}, "number as type": {"image": GOOD_FILE, "media_type": 5},
    "long type": {"image": GOOD_FILE, "media_type": "x" * 65}, "null": {"image": None, "media_type": "image/png"},
    "two kinds": {"image": GOOD_FILE, "video": GOOD_FILE, "media_type": "image/png"},
    "frames of a picture": {"image": GOOD_FILE, "media_type": "image/png", "num_frames": 2},
    "frames as a list": {"video": [GOOD_FILE], "media_type": "video/mp4"},
    "one name more": {"image": GOOD_FILE, "media_type": "image/png", "x": 1}, "type alone": {"media_type": "a"},
}  # fmt: skip
BAD_SOURCES = {
    "number": 5, "text": GOOD_FILE, "list": [GOOD_FILE], "empty": {}, "no data": {"type": "base64"},
    "another type": {"type": "file", "file_id": "a"}, "number inside": {"type": "base64", "data": 5},
    "other file": {"type": "base64", "data": GOOD_FILE, "media_type": "image/bmp"},
    "list inside": {"type": "url", "url": [data_url(png())]}, "null": None,
}  # fmt: skip


class TestTypes:
    """Wrong kinds of JSON where a picture or video should stand."""

    @pytest.mark.parametrize("kind", ["image_data", "video_data"])
    @pytest.mark.parametrize("name", BAD_OF_ONE)
    def test_of_one_prompt(self, battery: Battery, kind, name):
        for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
            battery.refused(path, {field: "a", kind: BAD_OF_ONE[name]}, kind)

    @pytest.mark.parametrize("kind", ["image_data", "video_data"])
    @pytest.mark.parametrize("name", BAD_OF_TWO)
    def test_of_several_prompts(self, battery: Battery, kind, name):
        for path, field in (("/generate", "text"), ("/v1/completions", "prompt")):
            battery.refused(path, {field: ["a", "b"], kind: BAD_OF_TWO[name]}, kind)

    @pytest.mark.parametrize("field", ["image_url", "video_url"])
    @pytest.mark.parametrize("name", BAD_URLS)
    def test_in_a_conversation(self, battery: Battery, field, name):
        messages = [{"role": "user", "content": [{"type": field, field: BAD_URLS[name]}]}]
        is_unknown = "name" in name or ("detail" in name and field == "video_url")
        for path in ("/v1/chat/completions", "/tokenize"):
            battery.refused(path, {"messages": messages}, "unknown field" if is_unknown else field)
            without = battery.post(path, {"messages": [{"role": "user", "content": [{"type": field, field: None}]}]})
            assert (without.status_code, field in without.text) == (400, True)

    @pytest.mark.parametrize("name", sorted(BAD_URLS.keys() - {"text"}))
    def test_in_a_response(self, battery: Battery, name):
        content = [{"type": "input_image", "image_url": BAD_URLS[name]}]
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            battery.refused(path, {"input": [{"role": "user", "content": content}]}, "image_url")

    @pytest.mark.parametrize("name", BAD_SOURCES)
    def test_in_a_message(self, battery: Battery, name):
        content = [{"type": "image", "source": BAD_SOURCES[name]}]
        for path, others in (("/v1/messages", {"max_tokens": 2}), ("/v1/messages/count_tokens", {})):
            battery.refused(path, {"messages": [{"role": "user", "content": content}], **others})

    @pytest.mark.parametrize("name", BAD_PARTS)
    def test_in_parts(self, battery: Battery, name):
        said = "unknown field" if name == "one name more" else "prompt"
        battery.refused("/generate", {"prompt": ["a", BAD_PARTS[name]]}, said)
        battery.refused("/select", {"prompt": ["a", BAD_PARTS[name]], "choices": ["c", "d"]}, said)

    @pytest.mark.parametrize("name", sorted(BAD_PARTS.keys() - {"long type"}))
    def test_in_programs(self, battery: Battery, name):
        part: dict[str, Any] = BAD_PARTS[name]
        kind = "video" if "video" in part else "image"
        refused(battery, "/v1/programs", {"graph": program(kind, part)})
        graph = program(kind, {"argument": "q"})
        for wrong in (part, GOOD_FILE, 5, None, [part]):
            refused(battery, "/v1/programs", {"graph": graph, "arguments": {"q": wrong}})

    @pytest.mark.parametrize("opening", ["[", '{"a":'])
    def test_deep_ones(self, battery: Battery, opening):
        for name in ("image_data", "video_data"):
            for depth in (65, 60_000):
                body = encode({"text": "a", name: RAW}, opening * depth)
                battery.refused("/generate", body)
        closed = encode({"text": "a", "image_data": RAW}, "[" * 65 + "]" * 65)
        battery.refused("/generate", closed, "at most 64")

    def test_a_small_body_around_a_bad_picture_is_answered_without_it(self, battery: Battery):
        """So what was refused above was the picture."""
        assert battery.post("/generate", {"text": "a", "image_data": None, **FEW}).status_code == 200
        assert battery.post("/generate", {"text": "a", "image_data": [], **FEW}).status_code == 200
        assert battery.post("/generate", {"text": ["a", "b"], "image_data": [None, []], **FEW}).status_code == 200
