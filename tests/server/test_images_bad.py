"""Pictures with every kind of fault: the answer is right or a 400, and the server keeps running."""

import http.server
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jsg.config import ServerConfig
from jsg.engine import media_reader
from jsg.engine.media_reader import ModelMediaReader
from jsg.errors import ConfigError, ContextLengthError
from jsg.processing.media.base64_files import write_base64, write_data_url
from jsg.processing.parts import MediaPart
from jsg.processing.tokenizer import load_tokenizer
from tests.server.running import check_discreet
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import PATCHES, base64_of, data_url, png, saved, write_vision_model

BODY_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def server(model_dir: Path) -> ScriptedServer:
    return ScriptedServer(model_dir, model_dir=model_dir)


def ask(server: ScriptedServer, *urls: str, field: str = "image_url"):
    content = [{"type": field, field: {"url": url}} for url in urls]
    return server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})


def refused(server: ScriptedServer, *urls: str, field: str = "image_url") -> str:
    """The message; the next good picture is answered."""
    response = ask(server, *urls, field=field)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    check_discreet(response.text)
    assert ask(server, data_url(png())).status_code == 200
    return error["message"]


def gif() -> bytes:
    frames = [Image.new("RGB", (8, 9), colour) for colour in ("red", "blue")]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def declared_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is that large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


GOOD = {
    "1 × 1": saved(Image.new("RGB", (1, 1), "red")),
    "CMYK": saved(Image.new("CMYK", (9, 7), (10, 200, 30, 40)), "JPEG"),
    "16 bits": saved(Image.fromarray(np.arange(63, dtype=np.uint16).reshape(7, 9) * 1000)),
    "palette": saved(Image.new("P", (9, 7), 3)),
    "transparent": saved(Image.new("RGBA", (9, 7), (1, 2, 3, 4))),
    "WebP": saved(Image.new("RGB", (9, 7), "green"), "WEBP"),
    "GIF": gif(),
    "another type than it says": saved(Image.new("RGB", (9, 7), "green"), "JPEG"),
}

BAD = {
    "1 × 10 000": (declared_png(1, 10_000), "as long as wide"),
    "bomb": (declared_png(60_000, 60_000), "pixels"),
    "truncated": (png()[:-200], "cut off or damaged"),
    "only a header": (declared_png(20, 20), "cut off or damaged"),
    "text": (b"hello, this is no picture", "PNG, JPEG, WebP or GIF"),
    "BMP": (saved(Image.new("RGB", (9, 7)), "BMP"), "PNG, JPEG, WebP or GIF"),
    "nothing": (b"", "empty"),
}


def rgb_png(data: bytes, name: str) -> bytes:
    """What a picture shows, as a plain PNG; by hand where libraries do not agree on what that is."""
    if name == "16 bits":
        wide = np.asarray(Image.open(io.BytesIO(data)))
        return saved(Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB"))
    if name == "transparent":  # 4 of 255 parts of the colour on white
        return saved(Image.new("RGB", (9, 7), (251, 251, 251)))
    return saved(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", GOOD)
def test_odd_pictures_are_seen(server, name):
    shown = []
    for data in (GOOD[name], rgb_png(GOOD[name], name)):
        response = ask(server, data_url(data))
        assert response.status_code == 200, response.text
        shown.append(server.request.media[0])
    odd, plain = shown
    assert np.array_equal(odd.pixels, plain.pixels) and odd.digest == plain.digest


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(server, name):
    data, said = BAD[name]
    assert said in refused(server, data_url(data))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,a", "base64"),
        ("data:image/png;base64,iVBO Rw0=", "base64"),
        ("data:image/png,plain", "data:TYPE;base64,DATA"),
        ("data:", "data:TYPE;base64,DATA"),
        ("file:///etc/passwd", "data: URL, an http URL or base64"),
        ("/etc/passwd", "base64"),
        ("", "empty"),
        ("http://127.0.0.1:1/a.png", "--allowed-media-host"),
    ],
)
def test_bad_urls_are_refused(server, url, said):
    assert said in refused(server, url)


def test_a_video_needs_a_model_that_takes_them(server):
    assert "pictures only" in refused(server, data_url(gif()), field="video_url")


class TestLimits:
    def test_of_pictures_and_pixels(self, model_dir):
        server = ScriptedServer(model_dir, model_dir=model_dir, max_images_per_request=2, max_image_pixels=2000)
        urls = [data_url(png(seed)) for seed in range(3)]
        assert "at most 2 pictures" in refused(server, *urls)
        assert ask(server, urls[0], urls[1], urls[0]).status_code == 200, "one that comes twice counts once"
        assert "at most 2000 pixels" in refused(server, data_url(png(0, (50, 50))))
        assert "at most 2000 pixels" in refused(server, data_url(png(0, (50, 50)))), "now as before"

    def test_what_is_kept_counts_as_if_it_were_read_again(self, model_dir):
        server = ScriptedServer(model_dir, model_dir=model_dir, max_image_pixels=1300)
        urls = [data_url(png(seed)) for seed in range(5)]  # 5 × 30 × 41 pixels, and 4 × 1300 are let in
        for url in urls:
            assert ask(server, url).status_code == 200
        assert "at most 5200 pixels" in refused(server, *urls)

    def test_of_bytes(self, model_dir, tokenizer_dir):
        server = ScriptedServer(model_dir, model_dir=model_dir)
        large = png(0, (1300, 1200))
        assert len(base64_of(large)) > BODY_BYTES
        assert ask(server, data_url(large)).status_code == 200, "what pictures may have is not what bodies may have"
        tight = ScriptedServer(model_dir, model_dir=model_dir, max_media_bytes=2**20)
        assert "at most 1048576 bytes" in refused(tight, data_url(png(0, (700, 700))))
        blind = ScriptedServer(tokenizer_dir)
        assert ask(blind, data_url(large)).status_code == 413

    def test_no_more_is_decoded_than_a_prompt_has_room_for(self, model_dir, monkeypatch):
        reader = ModelMediaReader.of_model(model_dir, load_tokenizer(model_dir))
        assert reader is not None
        decoded, decode = [], media_reader.decode_image
        monkeypatch.setattr(media_reader, "decode_image", lambda data, _: decoded.append(1) or decode(data, _))
        parts = [MediaPart("image", png(seed), "image/png") for seed in range(6)]
        with pytest.raises(ContextLengthError, match="at most 40"):
            reader.read(parts, max_tokens=40)
        assert len(decoded) == 40 // PATCHES + 1
        assert len(reader.read(parts[:1] * 6, max_tokens=40)) == 6, "one that comes several times counts once"

    @pytest.mark.parametrize(
        "knob", [{"allowed_media_host": "http://x"}, {"max_images_per_request": 0}, {"max_image_pixels": 2**30}]
    )
    def test_knobs_that_cannot_be(self, model_dir, knob):
        with pytest.raises(ConfigError):
            ScriptedServer(model_dir, model_dir=model_dir, **knob)

    def test_defaults_let_a_large_photo_through(self):
        assert ServerConfig().max_image_pixels >= 24_000_000


class TestFetching:
    @pytest.fixture
    def host(self) -> Iterator[str]:
        """A web server with one picture; it names what it was asked for in `asked`."""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/away":
                    self.send_response(302)
                    self.send_header("Location", "/a.png")
                    self.end_headers()
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(png() if self.path == "/a.png" else b"no picture")

            def log_message(self, format: str, *args: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
            thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield f"127.0.0.1:{web.server_port}"
            web.shutdown()
            thread.join()

    def test_an_allowed_host_is_asked(self, model_dir, host):
        server = ScriptedServer(model_dir, model_dir=model_dir, allowed_media_host=host)
        assert ask(server, f"http://{host}/a.png").status_code == 200
        fetched = server.request.media[0].digest
        assert ask(server, data_url(png())).status_code == 200
        assert server.request.media[0].digest == fetched
        assert "redirect" in refused(server, f"http://{host}/away")
        assert "PNG, JPEG, WebP or GIF" in refused(server, f"http://{host}/other")
        assert "host that this server allows" in refused(server, "http://localhost/a.png")
        body = {"text": "a", "image_data": f"http://{host}/a.png"}
        assert server.http.post("/generate", json=body).status_code == 200


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    directory = write_vision_model(tmp_path_factory.mktemp("video") / "model", "llava_next_video")
    return ScriptedServer(directory, model_dir=directory)


@pytest.fixture(scope="module")
def film() -> bytes:
    """Twelve frames, each of its own grey."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 48, "yuv420p"
        for shade in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 32, 3), 20 * shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


class TestVideos:
    def test_frames_and_a_picture_in_order(self, seer, film):
        content = [
            {"type": "video_url", "video_url": {"url": data_url(film, "video/mp4"), "num_frames": 3}},
            {"type": "image_url", "image_url": {"url": data_url(png())}},
            {"type": "text", "text": "what?"},
        ]
        response = seer.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 200, response.text
        image, video = seer.request.media  # the template writes pictures first
        assert (image.is_video, video.is_video) == (False, True)
        assert len(video.pixels) == 3
        assert np.diff(video.pixels.mean((1, 2, 3))).min() > 0, "in order"

    def test_the_usual_number_of_frames(self, seer, film):
        body = {"text": "<video>", "video_data": base64_of(film)}
        assert seer.http.post("/generate", json=body).status_code == 200
        assert len(seer.request.media[0].pixels) == 8
        assert seer.http.get("/get_model_info").json()["modalities"] == ["text", "image", "video"]
        assert seer.http.post("/generate", json=body | {"num_frames": 2}).status_code == 200
        assert len(seer.request.media[0].pixels) == 2
        part = {"video": base64_of(film), "media_type": "video/mp4", "num_frames": 5}
        assert seer.http.post("/generate", json={"prompt": ["a", part]}).status_code == 200
        assert len(seer.request.media[0].pixels) == 5

    def test_frames_as_pictures(self, seer):
        frames = [saved(Image.new("RGB", (32, 48), (40 * shade,) * 3)) for shade in range(6)]
        url = write_data_url(tuple(frames), "video/jpeg")
        content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what?"}]
        response = seer.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 200, response.text
        (video,) = seer.request.media
        assert video.is_video and len(video.pixels) == 6
        assert np.diff(video.pixels.mean((1, 2, 3))).min() > 0, "in order"
        for body in (
            {"text": "<video>", "video_data": url, "num_frames": 2},
            {"text": "<video>", "video_data": [write_base64(tuple(frames))], "num_frames": 2},
            {"prompt": ["a", {"video": write_base64(tuple(frames)), "media_type": "video/jpeg", "num_frames": 2}]},
        ):
            assert seer.http.post("/generate", json=body).status_code == 200
            assert seer.request.media[0].pixels.tobytes() == video.pixels[[0, 3]].tobytes()

    def test_one_picture_is_a_video_of_one_frame(self, seer):
        response = seer.http.post("/generate", json={"text": "<video>", "video_data": base64_of(png())})
        assert response.status_code == 400, "this model shows a frame in fewer tokens than a picture's key needs"
        assert "1 frames take 4; show more frames" in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            ((b"hello", b"hello"), "PNG, JPEG, WebP or GIF"),
            ((png(), b""), "a frame of a video must be a file, but is empty"),
            ((png(size=(8, 8)), png(size=(8, 9))), "must have one size"),
            ((png(),) * 129, "at most 128 frames"),
            ((png(),) * 5000, "at most 4096 frames"),
        ],
        ids=["text", "empty", "sizes", "many", "very many"],
    )
    def test_frames_that_are_none(self, seer, frames, message):
        assert message in refused(seer, write_data_url(frames, "video/jpeg"), field="video_url")

    def test_bad_videos(self, seer, film):
        assert "video" in refused(seer, data_url(b"hello, this is no film"), field="video_url")
        assert "cut off or damaged" in refused(seer, data_url(film[: len(film) // 3]), field="video_url")
