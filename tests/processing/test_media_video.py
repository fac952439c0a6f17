"""Files of videos, made here by PyAV: the frames that exist are shown, whatever the file's header says."""

import io
import itertools
import random
import struct
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image as pillow

from jsg.errors import RequestError, UnsupportedError
from jsg.processing.media import video as video_module
from jsg.processing.media.limits import MediaBudget, MediaLimits
from jsg.processing.media.movie_index import MAX_FRAGMENTS, MAX_INDEX_BYTES, MAX_SAMPLES, checked_movie
from jsg.processing.media.video import decode_frames, decode_video, sampled_indices

KINDS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "quicktime": ("mov", "mpeg4", "yuv420p"),
    "webm": ("webm", "libvpx", "yuv420p"),
    "matroska": ("matroska", "libvpx-vp9", "yuv420p"),
    "avi": ("avi", "mpeg4", "yuv420p"),
    "avi of pictures": ("avi", "mjpeg", "yuvj420p"),
    "ogg": ("ogg", "libvpx", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
STEP = 20


def _video(
    num_frames: int = 10, size: tuple[int, int] = (32, 48), kind: str = "mp4", rate: int = 10, movflags: str = ""
) -> bytes:
    """Frame n has a left half of brightness n · STEP and a right half of 255."""
    container_format, codec, pixel_format = KINDS.get(kind, ("matroska", kind, "yuv420p"))
    file = io.BytesIO()
    with av.open(file, "w", format=container_format, options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(codec, rate=rate)
        (stream.height, stream.width), stream.pix_fmt = size, pixel_format
        for number in range(num_frames):
            pixels = np.full((*size, 3), 255, np.uint8)
            pixels[:, : size[1] // 2] = number * STEP
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format))
            )
        container.mux(stream.encode())
    return file.getvalue()


def _decode(data: bytes, num_frames: int, **limits) -> np.ndarray:
    return decode_video(data, MediaBudget(MediaLimits(**limits)), num_frames)


def _numbers(frames: np.ndarray) -> list[int]:
    """Which frames these are, by their brightness."""
    return [round(float(value) / STEP) for value in frames[:, 4:-4, 4:16].mean((1, 2, 3))]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_spread_evenly_over_those_that_are_there(kind):
    data = _video(kind=kind)
    frames = _decode(data, 4)
    assert frames.shape == (4, 32, 48, 3) and frames.dtype == np.uint8
    assert _numbers(frames) == [0, 2, 5, 7] and _numbers(_decode(data, 100)) == list(range(10))
    assert _numbers(_decode(data, 1)) == [0]


def test_indices_are_those_of_hugging_face():
    for num_frames, total in itertools.product(range(1, 20), range(1, 40)):
        indices = sampled_indices(num_frames, total)
        if num_frames <= total:
            np.testing.assert_array_equal(indices, np.arange(0, total, total / num_frames).astype(int)[:num_frames])
        else:
            assert indices == list(range(total))


def test_declared_rates_and_lengths_are_not_believed():
    data = _video(kind="avi")
    header, stream = data.index(b"avih") + 8, data.index(b"strh") + 8
    assert struct.unpack_from("<I", data, header + 16) == struct.unpack_from("<I", data, stream + 32) == (10,)
    for rate, length in ((1, 10**9), (10**9, 0), (0, 1), (10, 3)):
        lie = bytearray(data)
        struct.pack_into("<I", lie, header, rate)
        struct.pack_into("<I", lie, header + 16, length)
        struct.pack_into("<II", lie, stream + 20, 1, rate)
        struct.pack_into("<I", lie, stream + 32, length)
        assert _numbers(_decode(bytes(lie), 4)) == [0, 2, 5, 7]


def test_frames_of_a_file_that_is_cut_off_are_spread_over_what_is_left():
    data = _video(kind="avi")
    chunks = [place for place in range(len(data)) if data.startswith(b"00dc", place)]
    cut = data[: chunks[6]]
    left = _numbers(_decode(cut, 100))
    assert left == list(range(len(left))) and 4 < len(left) < 10
    assert _numbers(_decode(cut, 4)) == [len(left) * index // 4 for index in range(4)]


def test_frames_that_are_there_but_not_meant_to_be_seen_do_not_count():
    data = _video()
    place = data.index(b"elst") + 12  # ISO 14496-12, 8.6.6: how much of the track is shown
    (duration,) = struct.unpack_from(">I", data, place)
    shorter = data[:place] + struct.pack(">I", duration * 6 // 10) + data[place + 4 :]
    numbers = _numbers(_decode(shorter, 100))
    assert numbers == list(range(6))
    assert _numbers(_decode(shorter, 3)) == [0, 2, 4]


@pytest.mark.parametrize(("turns", "matrix"), [(3, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (1, (0, -1, 1, 0))])
def test_frames_are_turned_as_the_camera_was_held(turns, matrix):
    data = _video(1)
    place = data.index(b"tkhd") + 44  # ISO 14496-12, 8.3.2: three rows of a, b, u
    a, b, c, d = (value << 16 for value in matrix)
    turned = data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]
    np.testing.assert_array_equal(_decode(turned, 1)[0], np.rot90(_decode(data, 1)[0], turns))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_image_pixels": 32 * 48 - 1}, "a frame may have at most 1535 pixels"),
        ({"max_total_pixels": 32 * 48 * 4 - 1}, "pictures and frames may have at most 6143 pixels"),
        ({"max_frame_pixels": 32 * 48 * 4 - 1}, "frames may have at most 6143 pixels"),
        ({"max_frames": 3}, "at most 3 frames of videos in one request, but has 4; ask for fewer"),
        ({"max_video_frames": 9}, "at most 9 frames, but has more"),
        ({"max_bytes": 100}, "at most 100 bytes"),
    ],
)
def test_limits(limits, message):
    with pytest.raises(RequestError, match=message):
        _decode(_video(), 4, **limits)


def test_frames_asked_for_count_only_as_far_as_they_are_there():
    assert len(_decode(_video(), 1000, max_frames=10)) == 10


def test_videos_of_a_request_are_limited_together():
    budget = MediaBudget(MediaLimits(max_videos=2))
    for _ in range(2):
        decode_video(_video(1), budget, 1)
    with pytest.raises(RequestError, match="at most 2 videos in one request, but has 3"):
        decode_video(_video(1), budget, 1)


def test_decoding_ends_when_its_time_is_up(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(RequestError, match="at most 5 s, but takes longer"):
        _decode(_video(), 4, max_video_s=5)


class _Frame:
    def __init__(self, rotation: float = 0) -> None:
        self.height, self.width, self.rotation = 4, 6, rotation

    def to_ndarray(self, format: str) -> np.ndarray:
        return np.zeros((4, 6, 3), np.uint8)


def _decode_packets(monkeypatch, packets, **limits) -> np.ndarray:
    """Two frames of a file whose packets are lists of frames."""

    class Container:
        def demux(self, stream):
            return (SimpleNamespace(size=1, decode=lambda frames=frames: frames) for frames in packets)

        def decode(self, stream):
            return (frame for packet in self.demux(stream) for frame in packet.decode())

    @contextmanager
    def opened(self):
        yield Container(), SimpleNamespace(codec_context=SimpleNamespace(height=4, width=6))

    monkeypatch.setattr(video_module._VideoFile, "_opened", opened)
    return _decode(b"GIF89a", 2, **limits)


def test_packets_of_which_no_frame_comes_take_time_too(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(RequestError, match="at most 15 s, but takes longer"):
        _decode_packets(monkeypatch, [[]] * 10, max_video_s=15)


def test_frames_that_are_turned_otherwise_than_the_first_are_refused(monkeypatch):
    assert _decode_packets(monkeypatch, [[_Frame(90)], [_Frame(-90)]]).shape == (2, 6, 4, 3)
    with pytest.raises(RequestError, match="must have one size"):
        _decode_packets(monkeypatch, [[_Frame()], [_Frame(90)]])


def test_a_frame_that_is_too_large_to_be_looked_at_is_called_so():
    data = _video(2, kind="avi of pictures")
    assert _decode(data, 1).shape == (1, 32, 48, 3)
    with pytest.raises(RequestError, match="a frame may have at most 1535 pixels"):
        _decode(data, 1, max_image_pixels=32 * 48 - 1)


def _box(name: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", len(body) + 8) + name + body


def _table(name: bytes, *numbers: int) -> bytes:
    return _box(name, bytes(4), struct.pack(f">{len(numbers)}I", *numbers))


BOMBS = {
    "samples": (_table(b"stsz", 1, 20_000_000), f"at most {MAX_SAMPLES} samples"),
    "short samples": (_table(b"stz2", 4, 20_000_000), f"at most {MAX_SAMPLES} samples"),
    "two tracks": (_table(b"stsz", 1, MAX_SAMPLES // 2) * 2, f"at most {MAX_SAMPLES} samples"),
    "of a fragment": (_box(b"moof", _table(b"trun", 20_000_000)), f"at most {MAX_SAMPLES} samples"),
    "chunks": (_table(b"stco", 20_000_000), f"at most {MAX_SAMPLES} samples"),
    "large chunks": (_table(b"co64", 1000) + _table(b"stsc", 2, 1, 9, 1, 2, 10**6, 1), "samples in its chunks"),
    "edits": (_table(b"stsz", 1, 10**5) + _table(b"elst", 100), f"at most {MAX_SAMPLES} samples"),
    "fragments": (_box(b"moof") * (MAX_FRAGMENTS + 1), f"at most {MAX_FRAGMENTS} fragments"),
    "index": (_box(b"abcd", bytes(MAX_INDEX_BYTES)), f"at most {MAX_INDEX_BYTES} bytes beside its frames"),
    "packed": (_box(b"moov", _box(b"cmov", bytes(20))), "must not be packed or encrypted"),
    "large box": (
        struct.pack(">I4sQ4xII", 1, b"stsz", 28, 1, 20_000_000),
        f"at most {MAX_SAMPLES} samples",
    ),
}


# A box that may be the index, one of a size that cannot be, and one of 64 bits that ends before the table.
@pytest.mark.parametrize("where", ["free", "wrong size", "behind frames"])
@pytest.mark.parametrize("kind", BOMBS)
def test_an_index_that_would_be_large_in_memory_is_refused_before_the_file_is_opened(kind, where, monkeypatch):
    table, message = BOMBS[kind]
    data = _video(1)
    match where:
        case "free":
            data += _box(b"free", b"x", table)
        case "wrong size":
            data += struct.pack(">I4s", 3, b"mdat") + table
        case _:
            data += struct.pack(">I4sQ", 1, b"mdat", 24) + bytes(8) + table
    monkeypatch.setattr(video_module, "_import_av", None)
    with pytest.raises(RequestError, match=message):
        _decode(data, 4)


def test_frames_are_no_index():
    for frames in (_box(b"mdat", BOMBS["samples"][0]), struct.pack(">I4s", 0, b"mdat") + BOMBS["samples"][0]):
        assert checked_movie(_video(1) + frames) == _video(1) + frames


def test_an_index_of_fragments_is_not_followed():
    data = _video(movflags="frag_every_frame+empty_moov+dash")
    assert data.count(b"moof") > 5 and b"sidx" in data and b"sidx" not in checked_movie(data)
    assert _numbers(_decode(data, 4)) == [0, 2, 5, 7]


def test_files_of_old_begin_with_any_box():
    data = _video(kind="quicktime")
    (size,) = struct.unpack_from(">I", data)
    assert data[4:8] == b"ftyp" and data[size + 4 : size + 8] == b"wide"
    place = data.index(b"stco") + 8
    (num_chunks,) = struct.unpack_from(">I", data, place)
    offsets = struct.unpack_from(f">{num_chunks}I", data, place + 4)
    old = bytearray(data)
    struct.pack_into(f">{num_chunks}I", old, place + 4, *(offset - size for offset in offsets))
    np.testing.assert_array_equal(_decode(bytes(old[size:]), 4), _decode(data, 4))


@pytest.mark.parametrize("num_frames", [0, -1])
def test_a_number_of_no_frames_is_refused(num_frames):
    with pytest.raises(RequestError, match="num_frames must be at least 1"):
        _decode(_video(), num_frames)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",  # a playlist would read on elsewhere
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        bytes(100),
    ],
)
def test_other_types_are_refused(data):
    with pytest.raises(RequestError, match="must be MP4, QuickTime, WebM"):
        _decode(data, 4)


def test_other_codecs_are_refused():
    with pytest.raises(RequestError, match=r"must be of a codec of h264, .* but is ffv1"):
        _decode(_video(kind="ffv1"), 4)


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif"])
def test_a_damaged_video_is_decoded_or_refused(kind):
    good = _video(4, kind=kind)
    for seed in range(40):
        chance = random.Random(seed)
        data = bytearray(good[: chance.randint(1, len(good))] if seed % 4 == 0 else good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        try:
            frames = _decode(bytes(data), 2, max_image_pixels=10_000)
        except RequestError:
            continue
        assert frames.dtype == np.uint8 and 1 <= len(frames) <= 2


def test_a_sound_has_no_frames():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    with pytest.raises(RequestError, match="must have frames"):
        _decode(file.getvalue(), 4)


def test_without_pyav_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedError, match="run pip install av"):
        _decode(b"GIF89a" + bytes(40), 4)


def test_pictures_can_be_the_frames():
    files = [_png(value, (2, 3)) for value in range(4)]
    video = decode_frames(files, MediaBudget(MediaLimits()))
    assert video.shape == (4, 2, 3, 3) and video[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    some = decode_frames([*files, b"never shown"], MediaBudget(MediaLimits(max_frames=2)), num_frames=2)
    assert some[:, 0, 0, 0].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("files", "limits", "message"),
    [
        (lambda: [], {}, "its list is empty"),
        (lambda: [_png(0, (2, 3)), _png(1, (3, 2))], {}, "must have one size"),
        (lambda: [_png(0, (2, 3))] * 4, {"max_frames": 3}, "at most 3 frames"),
        (lambda: [_png(0, (9, 9))] * 2, {"max_frame_pixels": 100}, "at most 100 pixels"),
        (lambda: [_png(0, (2, 3)) * 2] * 9, {"max_bytes": 900}, "at most 900 bytes"),
        (lambda: [_png(0, (2, 3))[:-20]], {}, "cut off or damaged"),
        (lambda: [b"text"], {}, "a picture must be PNG, JPEG, WebP or GIF"),
    ],
)
def test_pictures_that_cannot_be_frames_are_refused(files, limits, message):
    with pytest.raises(RequestError, match=message):
        decode_frames(files(), MediaBudget(MediaLimits(**limits)))


def _png(value: int, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    pillow.fromarray(np.full((*size, 3), value, np.uint8)).save(file, format="PNG")
    return file.getvalue()
