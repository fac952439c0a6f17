"""Small videos to show a model: their files, and the frames of these as pictures."""

import io
from collections.abc import Iterable

import numpy as np
import pytest
from PIL import Image

from jsg.processing.media.limits import MediaBudget, MediaLimits
from jsg.processing.media.video import decode_video
from tests.server.vision_model import saved

HEIGHT, WIDTH = 48, 32


def write_film(shades: Iterable[int]) -> bytes:
    """An MP4 with a frame of each of these greys. Skips the test where PyAV is not installed."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((HEIGHT, WIDTH, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def write_two_films() -> tuple[bytes, bytes]:
    """Two of twelve frames each, the second of which is the first backwards."""
    shades = range(0, 240, 20)
    return write_film(shades), write_film(reversed(shades))


def frames_of(film: bytes) -> tuple[bytes, ...]:
    """The pictures of all its frames."""
    limits = MediaLimits()
    frames = decode_video(film, MediaBudget(limits), limits.max_frames)
    return tuple(saved(Image.fromarray(frame)) for frame in frames)
