"""The file of a video → some of its frames, by PyAV (extra `video`). The frames may also come as pictures.

The rate and the length that a file declares are not trusted: its frames are counted, and those that are shown are
spread over them. A result is uint8 [frames, height, width, 3]: red, green, blue, turned the way they are meant to be
seen.
"""

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, final

import numpy as np

from jsg.errors import RequestError, UnsupportedError
from jsg.extras import install_command
from jsg.processing.media.decode import decode_declared
from jsg.processing.media.headers import read_header
from jsg.processing.media.limits import MediaBudget, MediaLimits
from jsg.processing.media.movie_index import checked_movie

# Classes of PyAV, which may not be installed.
type InputContainer = Any
type VideoFrame = Any
type VideoStream = Any

CODECS = ("h264", "hevc", "libdav1d", "vp9", "vp8", "mpeg4", "mpeg2video", "mjpeg", "theora", "gif")
"""Decoders that may run. FFmpeg has hundreds more, most of them old and little tested against hostile files."""


def decode_frames(files: Sequence[bytes], budget: MediaBudget, num_frames: int | None = None) -> np.ndarray:
    """Decodes a video whose frames came as pictures, as `decode_image` does. It needs no PyAV.

    Args:
        files: The pictures in order.
        budget: The request's, which counts this video. Of a frame that is not shown it counts the bytes only.
        num_frames: How many are shown, at least 1, evenly over those that came; None shows all.

    Raises:
        RequestError: There are no frames, `num_frames` is below 1, a frame is not a picture or is damaged, frames
            differ in size, or as `MediaBudget`.
    """
    if not files:
        raise RequestError("a video must have frames, but its list is empty; send at least one")
    _check_number(num_frames)
    for file in files:
        budget.take_bytes(len(file))
    shown = [files[index] for index in sampled_indices(len(files) if num_frames is None else num_frames, len(files))]
    budget.take_video()
    sizes: set[tuple[int, int]] = set()
    frames: list[np.ndarray] = []
    for file in shown:
        declared = read_header(file)
        budget.take_frames(1, declared.height, declared.width)
        image = decode_declared(declared)
        sizes.add((image.shape[0], image.shape[1]))
        if len(sizes) > 1:
            raise RequestError(f"the frames of a video must have one size, but have {sorted(sizes)}; resize them")
        frames.append(image)
    return np.stack(frames)


def sampled_indices(num_frames: int, total: int) -> list[int]:
    """Which of `total` frames are shown: `num_frames` evenly from the first on, or all if there are fewer."""
    shown = min(num_frames, total)
    return [index * total // shown for index in range(shown)]


def decode_video(data: bytes, budget: MediaBudget, num_frames: int) -> np.ndarray:
    """Decodes `num_frames` frames, evenly over those of the file, in the calling thread and with one thread.

    Args:
        data: A file: MP4, QuickTime, WebM, Matroska, AVI, Ogg or GIF. Its bytes decide its type.
        budget: The request's, which counts this video.
        num_frames: At least 1; a video that has fewer is shown whole.

    Raises:
        RequestError: The file is of another type or codec, is damaged, has no frames or frames of several sizes,
            declares more than the budget holds, or takes too long to decode.
        UnsupportedError: PyAV is not installed.
    """
    _check_number(num_frames)
    budget.take_bytes(len(data))
    budget.take_video()
    file = _VideoFile(data, budget.limits)
    total, size = file.measure()
    budget.take_frames(min(num_frames, total), *size)
    frames, num_seen = file.read(sampled_indices(num_frames, total), size)
    if len(frames) < min(num_frames, num_seen):  # fewer could be decoded than there seemed to be: spread over those
        del frames  # while others are read
        frames, _ = file.read(sampled_indices(num_frames, num_seen), size)
    if not len(frames):
        raise _without_frames()
    return frames


@final
class _VideoFile:
    """A file that is opened anew for each pass over it. All passes together may take `max_video_s`."""

    def __init__(self, data: bytes, limits: MediaLimits):
        self._container = _container_of(data)
        self._data = checked_movie(data) if self._container == "mp4" else data
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_video_s

    def measure(self) -> tuple[int, tuple[int, int]]:
        """The number of frames, which are counted as packets without decoding, and the height and width of one."""
        with self._opened() as (container, stream):
            total = 0
            for packet in container.demux(stream):
                total += packet.size > 0
                self._check(total)
            if not total:
                raise _without_frames()
            height, width = stream.codec_context.height, stream.codec_context.width
            if not height or not width:  # the file does not declare the size, and no frame could be decoded to see it
                raise RequestError(
                    f"a frame may have at most {self._limits.max_image_pixels} pixels and must not be damaged, but of "
                    "this video none can be decoded; scale it down"
                )
            return total, (height, width)

    def read(self, indices: Sequence[int], size: tuple[int, int]) -> tuple[np.ndarray, int]:
        """The frames at these indices, and how many frames were decoded up to the last of them."""
        frames = np.empty((0, *size, 3), np.uint8)
        num_shown = num_seen = 0
        with self._opened() as (container, stream):
            for frame in self._decoded(container, stream):
                if (frame.height, frame.width) != size:
                    raise _of_several_sizes()
                if num_seen == indices[num_shown]:
                    upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                    if not num_shown:
                        frames = np.empty((len(indices), *upright.shape), np.uint8)
                    if upright.shape != frames.shape[1:]:
                        raise _of_several_sizes()
                    frames[num_shown] = upright
                    num_shown += 1
                num_seen += 1
                self._check(num_seen)
                if num_shown == len(indices):
                    break
        return frames[:num_shown], num_seen

    def _decoded(self, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
        """The frames in order. The time is also checked for packets that give no frame."""
        for packet in container.demux(stream):
            self._check(0)
            yield from packet.decode()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        av = _import_av()
        max_pixels = str(self._limits.max_image_pixels)
        try:
            with av.open(
                io.BytesIO(self._data),
                format=self._container,
                options={"max_pixels": max_pixels, "codec_whitelist": ",".join(CODECS), "max_streams": "32"},
                io_open=_refuse_files,
            ) as container:
                stream = next(iter(container.streams.video), None)
                if stream is None:
                    raise _without_frames()
                codec = stream.codec_context
                if codec is None or codec.name not in CODECS:
                    name = "of an unknown one" if codec is None else codec.name
                    raise RequestError(
                        f"a video must be of a codec of {', '.join(CODECS)}, but is {name}; encode it again"
                    )
                codec.options = {"max_pixels": max_pixels}  # the size may change within the file
                codec.thread_count = 1
                yield container, stream
        except RequestError:
            raise
        except Exception:  # FFmpeg's errors are of many kinds, and on damaged bytes PyAV adds others
            raise RequestError(
                "a video must be a whole file, but this one is cut off or damaged; send it again"
            ) from None

    def _check(self, num_frames: int) -> None:
        """Raises RequestError if there are too many frames or the time is up."""
        most, seconds = self._limits.max_video_frames, self._limits.max_video_s
        if num_frames > most:
            raise RequestError(f"a video may have at most {most} frames, but has more; send a shorter part")
        if time.monotonic() > self._deadline:
            raise RequestError(
                f"decoding a video may take at most {seconds:g} s, but takes longer; send a shorter part"
            )


def _check_number(num_frames: int | None) -> None:
    if num_frames is not None and num_frames < 1:
        raise RequestError(f"num_frames must be at least 1, but got {num_frames}; leave it out for the default")


def _import_av() -> Any:
    try:
        import av
    except ImportError:
        raise UnsupportedError(
            f"a video needs PyAV, which is not installed here; run {install_command('video')}"
        ) from None
    return av


def _refuse_files(url: str, flags: int, options: object) -> NoReturn:
    """Refuses every other file and address that a container names to be read too."""
    raise PermissionError("a video must be one file")


def _container_of(data: bytes) -> str:
    """FFmpeg's name of the container, by the first bytes. If FFmpeg chose, it would accept playlists too."""
    for name, place, magic in _CONTAINERS:
        if data[place : place + len(magic)] == magic:
            return name
    raise RequestError(
        "a video must be MP4, QuickTime, WebM, Matroska, AVI, Ogg or GIF, but its file begins with "
        f"{data[:8]!r}; convert it"
    )


_CONTAINERS = (
    *(("mp4", 4, name) for name in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),  # old files begin with any
    ("matroska", 0, b"\x1a\x45\xdf\xa3"),
    ("avi", 8, b"AVI "),
    ("ogg", 0, b"OggS"),
    ("gif", 0, b"GIF87a"),
    ("gif", 0, b"GIF89a"),
)


def _without_frames() -> RequestError:
    return RequestError("a video must have frames, but this one has none that can be decoded; send another file")


def _of_several_sizes() -> RequestError:
    return RequestError("the frames of a video must have one size, but these differ; encode it again")
