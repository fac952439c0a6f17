"""`messages()` of a program that showed videos: sent as a chat, they show the same frames."""

import pytest

import jsg as sgl
from jsg.processing.media.base64_files import read_data_url
from tests.lang.scripted import ScriptedBackend

PNG = b"\x89PNG\r\n\x1a\n."
MP4 = b"\0\0\0\x18ftypmp42"


@sgl.function
def watch(s, film, num_frames):
    s += sgl.user(sgl.video(film, num_frames) + "what?")
    s += sgl.assistant(sgl.gen("answer"))


@pytest.mark.parametrize(
    ("film", "num_frames", "start"),
    [(MP4, 3, "data:video/mp4;base64,"), ([PNG, PNG + b"2"], 1, "data:video/jpeg;base64,")],
    ids=["file", "frames"],
)
def test_a_video_keeps_its_number_of_frames(film, num_frames, start):
    question, _ = watch.run(film, num_frames, backend=ScriptedBackend("A")).messages()
    part, text = question["content"]
    assert part["type"] == "video_url" and set(part["video_url"]) == {"url", "num_frames"}
    assert part["video_url"]["num_frames"] == num_frames and part["video_url"]["url"].startswith(start)
    assert read_data_url(part["video_url"]["url"], "video") == (film if isinstance(film, bytes) else tuple(film))
    assert text == {"type": "text", "text": "what?"}
