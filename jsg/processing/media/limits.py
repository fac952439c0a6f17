"""How much media one request may bring, and how much it has brought so far.

All is counted from what a file declares, before a pixel of it is decoded, because a file of a kilobyte can hold a
picture of gigabytes.
"""

import collections
import dataclasses
from typing import final

from jsg.errors import ConfigError, RequestError

MAX_IMAGE_PIXELS = 2**26
"""The largest limit: from 2^26.4 pixels on, Pillow itself suspects a bomb and warns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one request may bring.

    Pictures are decoded one after another. Meanwhile Pillow 13 takes about 22 bytes a pixel for WebP, 10 for PNG, 9 for
    JPEG and 6 for GIF, and 2 more for what is transparent. Frames are kept in 3 bytes a pixel until all are decoded.

    Attributes:
        max_images: Pictures.
        max_videos: Videos.
        max_frames: Frames that are shown to the model, of all videos together.
        max_bytes: Bytes of all files together.
        max_image_pixels: Pixels of one picture or frame.
        max_total_pixels: Pixels of all pictures and of all frames that are shown.
        max_frame_pixels: Pixels of all frames that are shown, which are in memory at the same time.
        max_aspect_ratio: Longer side divided by shorter side. When the shorter side of a line is resized to what a
            model sees, the longer one becomes hundreds of times as long.
        max_video_frames: Frames of one video, which is decoded up to the last frame that is shown.
        max_video_s: Seconds that decoding one video may take.

    Raises:
        ConfigError: A limit is below 1, or `max_image_pixels` is above `MAX_IMAGE_PIXELS`.
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

    Every `take_` counts what it is given, or raises RequestError, and then the request is over.
    """

    def __init__(self, limits: MediaLimits):
        self.limits = limits
        self._taken: collections.Counter[str] = collections.Counter()

    def take_bytes(self, num_bytes: int) -> None:
        """Counts a file of this size."""
        self._take("max_bytes", num_bytes, "pictures and videos", "bytes", "send smaller files")

    def take_image(self, height: int, width: int) -> None:
        """Counts a picture that declares this size."""
        self._take("max_images", 1, "a request", "pictures", "send fewer")
        self._take_pixels("a picture", height, width, 1)

    def take_video(self) -> None:
        """Counts a video of any length."""
        self._take("max_videos", 1, "a request", "videos", "send fewer")

    def take_frames(self, num_frames: int, height: int, width: int) -> None:
        """Counts frames of a video that are to be shown to the model."""
        self._take("max_frames", num_frames, "a request", "frames of videos", "ask for fewer")
        self._take_pixels("a frame", height, width, num_frames)
        self._take("max_frame_pixels", num_frames * height * width, "frames", "pixels", "ask for fewer")

    def _take_pixels(self, what: str, height: int, width: int, count: int) -> None:
        if height < 1 or width < 1:
            raise RequestError(f"{what} must have pixels, but it declares {width} × {height}; send another file")
        most, ratio = self.limits.max_image_pixels, self.limits.max_aspect_ratio
        if height * width > most:
            raise _too_much(what, f"{most} pixels", f"{width} × {height}", "scale it down")
        if max(height, width) > ratio * min(height, width):
            raise RequestError(
                f"{what} may be at most {ratio} times as long as wide, but it has {width} × {height} pixels; cut it"
            )
        self._take("max_total_pixels", height * width * count, "pictures and frames", "pixels", "send fewer")

    def _take(self, limit: str, added: int, what: str, unit: str, remedy: str) -> None:
        """Adds to what is counted against a field of `MediaLimits`."""
        self._taken[limit] += added
        most = getattr(self.limits, limit)
        if self._taken[limit] > most:
            raise _too_much(what, f"{most} {unit}", self._taken[limit], remedy)


def _too_much(what: str, limit: str, value: object, remedy: str) -> RequestError:
    return RequestError(f"{what} may have at most {limit} in one request, but has {value}; {remedy}")
