"""Files of pictures: what is right is decoded as Pillow does, and what is not is refused before it costs anything."""

import io
import random
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image as pillow
from PIL import ImageOps

from jsg.errors import ConfigError, RequestError
from jsg.processing.media.base64_files import read_data_url, write_data_url
from jsg.processing.media.decode import decode_image
from jsg.processing.media.headers import MAX_JPEG_SCANS, MAX_PARTS, read_header
from jsg.processing.media.limits import MediaBudget, MediaLimits

DAMAGED = "cut off or damaged"


def _pixels(height: int = 5, width: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def _file(image: pillow.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _decode(data: bytes, **limits) -> np.ndarray:
    return decode_image(data, MediaBudget(MediaLimits(**limits)))


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _ihdr(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


RGB = pillow.fromarray(_pixels())
RGBA = pillow.fromarray(np.dstack([_pixels(), np.arange(40, dtype=np.uint8).reshape(5, 8) * 6]))
FILES = {
    "WEBP": _file(RGB, "WEBP"),
    "PNG": _file(RGB, "PNG"),
    "PNG, palette": _file(RGB.quantize(16), "PNG"),
    "PNG, transparent colour": _file(RGB.quantize(16), "PNG", transparency=3),
    "PNG, transparent colours": _file(RGB.quantize(16), "PNG", transparency=bytes(range(16))),
    "PNG, alpha": _file(RGBA, "PNG"),
    "PNG, grey and alpha": _file(RGBA.convert("LA"), "PNG"),
    "PNG, 1 bit": _file(RGB.convert("1"), "PNG"),
    "JPEG": _file(RGB, "JPEG"),
    "JPEG, grey": _file(RGB.convert("L"), "JPEG"),
    "JPEG, CMYK": _file(RGB.convert("CMYK"), "JPEG"),
    "JPEG, progressive": _file(RGB, "JPEG", progressive=True),
    "JPEG of several pictures": _file(RGB, "MPO", save_all=True, append_images=[RGB]),
    "WebP, lossless": _file(RGB, "WEBP", lossless=True),
    "WebP, alpha": _file(RGBA, "WEBP", lossless=True, exact=True),
    "WebP, frames": _file(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(180)]),
    "GIF": _file(RGB.quantize(16), "GIF"),
    "GIF, frames": _file(RGB.quantize(16), "GIF", save_all=True, append_images=[RGB.rotate(180).quantize(16)]),
    "GIF, transparent": _file(RGB.quantize(16), "GIF", transparency=3),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_picture_is_what_pillow_makes_of_it(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, that transparency is dropped
        image = pillow.open(io.BytesIO(FILES[kind]))
        colours, alpha = image.convert("RGB"), image.convert("RGBA").getchannel("A")
    white = np.asarray(alpha)[..., None] / 255 * np.asarray(colours) + (255 - np.asarray(alpha)[..., None])
    expected = np.rint(white).astype(np.uint8)
    pixels = _decode(FILES[kind])
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert np.abs(pixels.astype(int) - expected).max() <= ("alpha" in kind or "colours" in kind)  # a rounding
    assert ("alpha" in kind or "transparent" in kind) == (np.asarray(colours) != pixels).any()


def test_16_bit_grey_keeps_its_shades():
    shades = np.arange(40, dtype=np.uint16).reshape(5, 8) * 1600
    expected = (shades >> 8).astype(np.uint8)[..., None].repeat(3, axis=-1)
    np.testing.assert_array_equal(_decode(_file(pillow.fromarray(shades), "PNG")), expected)


def test_a_transparent_16_bit_grey_is_white():
    lines = b"".join(b"\0" + struct.pack(">3H", 0, 256, 40000) for _ in range(2))
    data = _png(
        (b"IHDR", struct.pack(">IIBBBBB", 3, 2, 16, 0, 0, 0, 0)),
        (b"tRNS", struct.pack(">H", 256)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    np.testing.assert_array_equal(_decode(data), [[[0] * 3, [255] * 3, [156] * 3]] * 2)


def test_black_on_transparent_is_black_on_white():
    """As screenshots of formulas and logos are saved; the colour of what is transparent is black, too."""
    image = pillow.new("RGBA", (4, 3), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (1, 1, 3, 2))
    expected = np.full((3, 4, 3), 255)
    expected[1, 1:3] = 0
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("GIF", {})):
        np.testing.assert_array_equal(_decode(_file(image, format, **options)), expected)


def test_16_bit_colours_keep_their_high_byte():
    lines = b"".join(b"\0" + struct.pack(">6H", 0, 256, 65535, 513, 40000, 255) for _ in range(3))
    data = _png(
        (b"IHDR", struct.pack(">IIBBBBB", 2, 3, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    )
    np.testing.assert_array_equal(_decode(data), [[[0, 1, 255], [2, 156, 0]]] * 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_picture_is_turned_as_exif_says(orientation, format):
    exif = pillow.Exif()
    exif[0x0112] = orientation
    data = _file(RGB, format, exif=exif)
    expected = ImageOps.exif_transpose(pillow.open(io.BytesIO(data))).convert("RGB")
    np.testing.assert_array_equal(_decode(data), np.asarray(expected))


def test_a_damaged_exif_does_not_spoil_the_picture():
    data = _file(RGB, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    np.testing.assert_array_equal(_decode(data), _pixels())


@pytest.mark.parametrize("kind", FILES)
def test_a_picture_that_is_cut_off_is_refused(kind):
    data = FILES[kind]
    assert len(data) > 40
    inside = (
        () if "several" in kind or "frames" in kind else (len(data) // 2, len(data) * 3 // 4)
    )  # of the first picture
    for length in (0, 1, 3, 12, 20, 25, 30, *inside):
        with pytest.raises(RequestError):
            _decode(data[:length])


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_picture_is_decoded_or_refused(kind):
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(FILES[kind])
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        try:
            pixels = _decode(bytes(data))
        except RequestError:
            continue
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        _file(RGB, "BMP"),
        _file(RGB, "TIFF"),
        _file(RGB, "PPM"),
        b"RIFF\x10\0\0\0WAVEfmt " + bytes(40),
    ],
)
def test_other_types_are_refused(data):
    with pytest.raises(RequestError, match="must be PNG, JPEG, WebP or GIF"):
        _decode(data)


def _webp_canvas(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 50) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + sides + bytes(20)


def _gif(screen: tuple[int, int], image: tuple[int, int]) -> bytes:
    extension = b"!\xf9\2\0\0\0"
    return (
        b"GIF89a" + struct.pack("<HHBBB", *screen, 0, 0, 0) + extension + struct.pack("<BHHHHB", 0x2C, 0, 0, *image, 0)
    )


BOMBS = {
    "PNG": _png(_ihdr(60_000, 60_000), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")),
    "JPEG": b"\xff\xd8\xff\xc0\0\x11\x08\xea\x60\xea\x60\3\1\x11\0\2\x11\0\3\x11\0\xff\xda\0\x08\1\1\0\0\x3f\0\xff\xd9",
    "WebP": _webp_canvas(60_000, 60_000),
    "WebP, lossless": b"RIFF\x20\0\0\0WEBPVP8L\x10\0\0\0\x2f" + struct.pack("<I", 16383 | 16383 << 14) + bytes(20),
    "GIF": _gif((60_000, 60_000), (1, 1)),
    "GIF, image": _gif((1, 1), (60_000, 60_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_by_its_header(kind, monkeypatch):
    monkeypatch.setattr(pillow, "open", None)  # nobody may even look into it
    assert len(BOMBS[kind]) < 200
    with pytest.raises(RequestError, match=r"at most 33554432 pixels .* has (60000 × 60000|16384 × 16384)"):
        _decode(BOMBS[kind])


@pytest.mark.parametrize("chunk", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_bomb_in_a_text_is_never_unpacked(chunk):
    bomb = zlib.compress(bytes(2**26), 9)
    head = b"key\0\1\0\0\0" if chunk == b"iTXt" else b"key\0\0"
    first, rest = FILES["PNG"][8:33], FILES["PNG"][33:]
    data = b"\x89PNG\r\n\x1a\n" + first + _png((chunk, head + bomb))[8:] * 3 + rest
    np.testing.assert_array_equal(_decode(data), _pixels())


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _exif(orientation: int) -> bytes:
    return b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHIII", 0x0112, 3, 1, orientation, 0)


def _with_parts(format: str, *parts: bytes) -> bytes:
    """A small file with these parts before its image."""
    data = FILES[format]
    place = {"PNG": 33, "JPEG": 2, "WEBP": len(data), "GIF": 13 + (3 << (data[10] % 8 + 1))}[format]
    data = data[:place] + b"".join(parts) + data[place:]
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:] if format == "WEBP" else data


def test_a_decoder_gets_no_more_than_what_makes_the_pixels():
    exif = _segment(0xE1, _exif(6)), _segment(0xE1, _exif(3))
    profile, comment = _segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(40)), _segment(0xFE, b"\xff" * 60_000)
    header = read_header(_with_parts("JPEG", *exif, b"\xff" * 9, profile, comment) + b"a film")
    assert header.shown == FILES["JPEG"] and header.orientation == 6
    png = _png((b"eXIf", _exif(5)[6:]), (b"tEXt", b"a\0b"), (b"eXIf", _exif(3)[6:]), (b"iCCP", bytes(6)))[8:]
    header = read_header(_with_parts("PNG", png))
    assert header.shown == FILES["PNG"] and header.orientation == 5
    assert read_header(_with_parts("GIF", b"!\xfe\3abc\2de\0")).shown == FILES["GIF"]


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("PNG", _png((b"IDAT", b""))[8:]),
        ("PNG", _png((b"eXIf", b""))[8:]),
        ("JPEG", _segment(0xE5, b"")),
        ("JPEG", _segment(0xE1, b"Exif\0\0abcd")),
        ("WEBP", b"ABCD\0\0\0\0"),
        ("GIF", b"!\xfe\0"),
        ("GIF", b"!\xfe" + b"\1a" * 9 + b"\0"),
    ],
)
def test_a_file_of_many_parts_is_refused_before_it_is_decoded(format, part, monkeypatch):
    assert _decode(_with_parts(format, *[part] * 9)).shape == (5, 8, 3)
    monkeypatch.setattr(pillow, "open", None)
    with pytest.raises(RequestError, match=f"at most {MAX_PARTS} chunks, segments or blocks, but this {format} has"):
        _decode(_with_parts(format, *[part] * (MAX_PARTS + 1)))


def test_bytes_that_fill_a_jpeg_are_looked_at_once():
    def duration(length: int) -> float:
        data, start = b"\xff\xd8\xff\xe0\0\2" + b"\xff" * length + b"\0", time.thread_time()
        with pytest.raises(RequestError):
            read_header(data)
        return time.thread_time() - start

    short, long = (min(duration(length) for _ in range(5)) for length in (5_000, 40_000))
    assert long < 24 * short  # 8 times as long; all pairs of bytes would be 64 times as many


def test_a_scan_is_not_filled_without_end():
    data = FILES["JPEG"]
    assert _decode(data[:-2] + b"\xff" * 50_000 + data[-2:]).shape == (5, 8, 3)
    assert _decode(data + b"\xff" * 2**16).shape == (5, 8, 3)
    with pytest.raises(RequestError, match=DAMAGED):
        read_header(data[:-2] + b"\xff" * 2**16 + data[-2:])


def test_pixels_that_are_more_than_declared_are_refused_or_left_out():
    lines = zlib.compress(bytes(2**24), 9)
    data = _png(_ihdr(4, 4), (b"IDAT", lines), (b"IEND", b""))
    assert _decode(data).shape == (4, 4, 3)
    second = _png(_ihdr(4, 4), _ihdr(4000, 1000), (b"IDAT", lines), (b"IEND", b""))
    with pytest.raises(RequestError, match=DAMAGED):
        _decode(second)


def test_a_jpeg_of_many_scans_is_refused():
    data = FILES["JPEG, progressive"]
    start = data.rindex(b"\xff\xda")
    assert _decode(data).shape == (5, 8, 3)
    with pytest.raises(RequestError, match=f"at most {MAX_JPEG_SCANS} scans"):
        _decode(data[:-2] + data[start:-2] * MAX_JPEG_SCANS + data[-2:])


def test_lines_and_single_pixels():
    for size in ((1, 1), (1, 200), (200, 1)):
        pixels = _pixels(*size)
        np.testing.assert_array_equal(_decode(_file(pillow.fromarray(pixels), "PNG")), pixels)
    with pytest.raises(RequestError, match="at most 200 times as long as wide, but it has 10000 × 1 pixels"):
        _decode(_file(pillow.fromarray(_pixels(1, 10_000)), "PNG"))


def test_a_size_of_nothing_is_refused():
    with pytest.raises(RequestError, match="must have pixels"):
        _decode(_png(_ihdr(0, 4), (b"IDAT", b""), (b"IEND", b"")))


def test_the_whole_request_is_limited():
    data = FILES["PNG"]
    for limits, message in (
        ({"max_images": 2}, "at most 2 pictures in one request, but has 3; send fewer"),
        ({"max_bytes": 2 * len(data)}, f"at most {2 * len(data)} bytes in one request, but has {3 * len(data)}"),
        ({"max_total_pixels": 80}, "at most 80 pixels in one request, but has 120"),
    ):
        budget = MediaBudget(MediaLimits(**limits))
        for _ in range(2):
            decode_image(data, budget)
        with pytest.raises(RequestError, match=message):
            decode_image(data, budget)


def test_limits_that_cannot_work_are_refused():
    for limits in ({"max_images": 0}, {"max_video_s": float("nan")}, {"max_image_pixels": 2**27}):
        with pytest.raises(ConfigError, match=next(iter(limits))):
            MediaLimits(**limits)


@pytest.mark.parametrize("kind", FILES)
def test_headers_say_the_size(kind):
    header = read_header(FILES[kind])
    assert (header.height, header.width) == (5, 8)


@pytest.mark.parametrize("url", ["data:image/png;base64,AAEC", "DATA:;BASE64,AAEC", "data:a/b;charset=x;base64,AAEC"])
def test_a_data_url_is_its_bytes(url):
    assert read_data_url(url, "image", max_bytes=3) == b"\0\1\2"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,AAEC", "must be data:TYPE;base64,DATA"),
        ("data:image/png;base64", "must be data:TYPE;base64,DATA"),
        ("http://example.com/;base64,AAEC", "must be data:TYPE;base64,DATA"),
        ("data:" + "x" * 300 + ";base64,AAEC", "must be data:TYPE;base64,DATA"),
        ("data:;base64,AAE", "must be base64 with padding"),
        ("data:;base64,AA\nEC", "must be base64 with padding"),
        ("data:;base64,AA%2BC", "must be base64 with padding"),
        ("data:;base64,AA-_", "must be base64 with padding"),
        ("data:;base64,AAÄC", "must be base64 with padding"),
        ("data:;base64,AA==,AA==", "must be base64 with padding"),
        ("data:;base64,", "is empty"),
        ("data:;base64," + "A" * 400, "at most 4 bytes, but has 300"),
        ("data:;base64,AAECAwQ=", "at most 4 bytes, but has 5"),
    ],
)
def test_a_data_url_of_another_form_is_refused(url, message):
    with pytest.raises(RequestError, match=message):
        read_data_url(url, "image", max_bytes=4)


def test_the_frames_of_a_video_stand_with_commas_between_them():
    frames = (b"\0", b"\1\2", b"\3\4\5")
    url = write_data_url(frames, "video/jpeg")
    assert url == "data:video/jpeg;base64,AA==,AQI=,AwQF"
    assert read_data_url(url, "video", max_bytes=12) == frames
    assert read_data_url("data:video/mp4;base64,AA==", "video") == b"\0"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("AA==,", "a frame of a video must be a file, but is empty"),
        (",", "a frame of a video must be a file, but is empty"),
        ("AA==,A", "a frame of a video must be base64"),
        ("AA==," * 4096 + "AA==", "at most 4096 frames"),
        ("," * 10**6, "at most 4096 frames"),
        ("A" * 10**7 + ",AAAA", "may have at most 1000000 bytes, but has 7500003"),
    ],
    ids=["end", "comma", "second", "many", "commas", "long"],
)
def test_frames_that_are_none_are_refused(data, message):
    with pytest.raises(RequestError, match=message):
        read_data_url(f"data:;base64,{data}", "video", max_bytes=10**6)
