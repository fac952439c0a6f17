"""Videos that a caller of `jsg.Engine` gives: which frames of them a prompt has."""

from typing import Any

import numpy as np
import pytest

from jsg.engine.media_reader import DEFAULT_FRAMES, ModelMediaReader
from jsg.engine.offline.media import with_media
from jsg.errors import RequestError
from jsg.media import MediaInput
from jsg.processing.tokenizer import load_tokenizer
from tests.server.films import frames_of, write_film
from tests.server.vision_model import png, write_vision_model


@pytest.fixture(scope="module")
def film() -> bytes:
    """Twelve frames, ever brighter."""
    return write_film(range(0, 240, 20))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ModelMediaReader:
    directory = write_vision_model(tmp_path_factory.mktemp("video") / "model", "llava_next_video")
    reader = ModelMediaReader.of_model(directory, load_tokenizer(directory))
    assert reader is not None
    return reader


def media_of(
    reader: ModelMediaReader | None, videos: object, num_frames: object = None, *, images: object = None, count: int = 0
) -> list[tuple[MediaInput, ...]]:
    """The media that one prompt, or each of `count` prompts, shows to the model."""
    ids: list[tuple[int, ...]] = [(97,)] * (count or 1)
    options: dict[str, Any] = {"is_list": bool(count), "reader": reader, "max_tokens": 4096, "bos_ids": ()}
    prompts = with_media(ids, images, videos, num_frames=num_frames, **options)
    return [prompt.media for prompt in prompts]


def test_a_file_has_the_usual_number_of_frames_or_as_many_as_are_asked_for(reader, film, tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(film)
    ((usual,),) = media_of(reader, film)
    ((three,),) = media_of(reader, path, np.int64(3))
    ((all_of_it,),) = media_of(reader, film, 4096)
    assert [len(item.pixels) for item in (usual, three, all_of_it)] == [DEFAULT_FRAMES, 3, 12]
    assert three.pixels.tobytes() == all_of_it.pixels[[0, 4, 8]].tobytes()


def test_frames_are_all_shown_or_as_many_as_are_asked_for(reader, film):
    frames = frames_of(film)
    ((every,),) = media_of(reader, frames)
    ((three,),) = media_of(reader, frames, 3)
    ((of_file,),) = media_of(reader, film, 3)
    assert len(every.pixels) == len(frames) == 12
    assert three.digest == of_file.digest


def test_the_number_is_of_every_video_of_every_prompt_and_of_no_picture(reader, film):
    first, second, third = media_of(
        reader, [film, None, [film, frames_of(film)]], 2, images=[None, png(), None], count=3
    )
    assert [len(item.pixels) for item in (*first, *third)] == [2, 2, 2]
    assert [item.is_video for item in second] == [False]


@pytest.mark.parametrize("num_frames", [0, -1, 4097, True, 2.0, "2"])
def test_a_number_that_cannot_be_is_refused(reader, film, num_frames):
    with pytest.raises(RequestError, match="whole number from 1 to 4096, but got") as caught:
        media_of(reader, film, num_frames)
    assert caught.value.param == "num_frames"


@pytest.mark.parametrize(
    ("images", "videos", "message"),
    [
        (None, None, "no video_data"),
        (png(), None, "no video_data"),
        (None, (), "at least one frame"),
        (None, (png(), b"no picture"), "image knows"),
        (None, [(png(size=(8, 8)), png(size=(8, 9)))], "one size"),
    ],
)
def test_what_is_no_video_is_refused(reader, images, videos, message):
    with pytest.raises(RequestError, match=message):
        media_of(reader, videos, 2, images=images)


def test_a_model_without_eyes_says_so(film):
    with pytest.raises(RequestError, match="cannot see") as caught:
        media_of(None, film)
    assert caught.value.param == "video_data"
