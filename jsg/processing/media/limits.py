"""How much media one request may bring, and what it has brought so far.

Everything is counted from what a file declares, before a pixel of it is decoded: a file of a kilobyte can declare, and
be, a picture of gigabytes.
"""

import dataclasses
from typing import final

from jsg.errors import ConfigError, RequestError

MAX_IMAGE_PIXELS = 2**26
"""A limit may not be larger: from 2^26.4 pixels on Pillow itself suspects a bomb, and warns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one request may bring.

    Pictures are decoded one after another. While one is, Pillow 13 takes, by its format and pixels, some 22 bytes a
    pixel for WebP, 10 for PNG, 9 for JPEG and 6 for GIF; frames are kept in 3 bytes a pixel until all are there.

    Attributes:
        max_images: Pictures.
        max_videos: Videos.
        max_frames: Frames that the model is shown, of all videos together.
        max_bytes: Files, all together.
        max_image_pixels: Of one picture, and of one frame.
        max_total_pixels: Of all pictures and of all frames shown.
        max_frame_pixels: Of all frames shown, which are held together.
        max_aspect_ratio: Longer side by shorter side. Resizing the shorter side of a line to the size that a model
            sees makes the longer one hundreds of times that.
        max_video_frames: Frames that a video has: it is decoded up to the last one shown.
        max_video_s: Seconds that decoding one video may take.

    Raises:
        ConfigError: One is below 1, or `max_image_pixels` is above `MAX_IMAGE_PIXELS`.
    """

    max_images: int = 64
    max_videos: int = 4
    max_frames: int = 128
    max_bytes: int = 64 * 2**20
    max_image_pixels: int = 2**25
    max_total_pixels: int = 2**27
    max_frame_pixels: int = 2**26
    max_aspect_ratio: int = 200
    max_video_frames: int = 20_000
    max_video_s: float = 20.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value >= 1:
                raise ConfigError(f"{field.name} must be at least 1, but got {value}")
        if self.max_image_pixels > MAX_IMAGE_PIXELS:
            raise ConfigError(f"max_image_pixels must be at most {MAX_IMAGE_PIXELS}, but got {self.max_image_pixels}")


@final
class MediaBudget:
    """What a request may still bring. One per request, used by one thread at a time.

    Every `take_` counts what it is told, or raises RequestError and the request is over.
    """

    def __init__(self, limits: MediaLimits):
        self.limits = limits
        self._num_images = 0
        self._num_videos = 0
        self._num_frames = 0
        self._num_frame_pixels = 0
        self._num_bytes = 0
        self._num_pixels = 0

    def take_bytes(self, num_bytes: int) -> None:
        """A file of this size."""
        self._num_bytes += num_bytes
        most = self.limits.max_bytes
        _require(self._num_bytes <= most, "pictures and videos", f"{most} bytes", self._num_bytes, "send smaller files")

    def take_image(self, height: int, width: int) -> None:
        """A picture that declares this size."""
        self._num_images += 1
        most = self.limits.max_images
        _require(self._num_images <= most, "a request", f"{most} pictures", self._num_images, "send fewer")
        self._take_pixels("a picture", height, width, 1)

    def take_video(self) -> None:
        """A video of any length."""
        self._num_videos += 1
        most = self.limits.max_videos
        _require(self._num_videos <= most, "a request", f"{most} videos", self._num_videos, "send fewer")

    def take_frames(self, num_frames: int, height: int, width: int) -> None:
        """So many frames of a video, to be shown to the model."""
        self._num_frames += num_frames
        most = self.limits.max_frames
        _require(self._num_frames <= most, "a request", f"{most} frames of videos", self._num_frames, "ask for fewer")
        self._take_pixels("a frame", height, width, num_frames)
        self._num_frame_pixels += num_frames * height * width
        most = self.limits.max_frame_pixels
        _require(self._num_frame_pixels <= most, "frames", f"{most} pixels", self._num_frame_pixels, "ask for fewer")

    def _take_pixels(self, what: str, height: int, width: int, count: int) -> None:
        if height < 1 or width < 1:
            raise RequestError(f"{what} must have pixels, but it declares {width} × {height}; send another file")
        most = self.limits.max_image_pixels
        _require(height * width <= most, what, f"{most} pixels", f"{width} × {height}", "scale it down")
        ratio = self.limits.max_aspect_ratio
        if max(height, width) > ratio * min(height, width):
            raise RequestError(
                f"{what} may be at most {ratio} times as long as wide, but it has {width} × {height} pixels; cut it"
            )
        self._num_pixels += height * width * count
        most = self.limits.max_total_pixels
        _require(self._num_pixels <= most, "pictures and frames", f"{most} pixels", self._num_pixels, "send fewer")


def _require(ok: bool, what: str, limit: str, value: object, remedy: str) -> None:
    if not ok:
        raise RequestError(f"{what} may have at most {limit} in one request, but has {value}; {remedy}")
