"""Reads pictures and videos for one model: cuts files into tiles and maps prompt tokens to patches.

The front process does this, and `jsg.Engine` does it in its caller's thread.
"""

import copy
import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

from jsg.byte_cache import ByteCache
from jsg.errors import ContextLengthError, ModelError, RequestError
from jsg.models.config import read_spec
from jsg.models.image_layout import image_layout, num_tiles, video_layout
from jsg.models.spec import ModelSpec
from jsg.models.vision_config import VisionConfig
from jsg.processing.media.decode import decode_image
from jsg.processing.media.headers import is_still
from jsg.processing.media.key import MAX_VOCAB_SIZE, MIN_TOKENS, key_words
from jsg.processing.media.limits import MediaBudget, MediaLimits
from jsg.processing.media.pixel_config import PixelConfig, read_pixel_config
from jsg.processing.media.processor import PixelProcessor, PixelTiles
from jsg.processing.media.video import decode_frames, decode_video
from jsg.processing.media_prompt import PromptMedia
from jsg.processing.parts import MediaKind, MediaPart, file_size
from jsg.processing.tokenizer import Tokenizer

DEFAULT_FRAMES = 8
"""Frames of a video file by default, as in the published examples of LLaVA-NeXT-Video."""

KEPT_BYTES = 256 * 2**20


@final
class ModelMediaReader:
    """A `MediaReader` of one model.

    It keeps files that it has read, up to `KEPT_BYTES`, because a conversation sends its pictures with each turn and a
    program with each call. A kept file counts towards the limits as if it were read again, so that no answer depends
    on what is kept.

    Attributes:
        placeholders, placeholder_ids: As in `MediaReader`.
    """

    def __init__(
        self,
        model: ModelSpec,
        tokenizer: Tokenizer,
        pixels: dict[MediaKind, PixelConfig],
        limits: MediaLimits | None = None,
    ) -> None:
        """Makes the reader of a model that takes images. `limits` are those of one request.

        Raises:
            ModelError: The files of the model contradict each other.
        """
        vision = model.vision
        assert vision is not None
        self._vision = vision
        self._vocab_size = model.vocab_size
        self._limits = limits or MediaLimits()
        _check(model, vision, pixels)
        self._processors = {kind: PixelProcessor(config) for kind, config in pixels.items()}
        self.placeholder_ids: dict[str, int] = {"image": vision.image_token_id}
        if vision.video_token_id is not None:
            self.placeholder_ids["video"] = vision.video_token_id
        self.placeholders = {kind: _written(tokenizer, kind, i) for kind, i in self.placeholder_ids.items()}
        self._kept = ByteCache[bytes, _Seen](KEPT_BYTES, lambda seen: seen.num_bytes)
        self._lock = threading.Lock()  # of `_kept`
        self._namespace = b""

    @classmethod
    def of_model(
        cls, directory: Path, tokenizer: Tokenizer, limits: MediaLimits | None = None
    ) -> "ModelMediaReader | None":
        """The reader of the model in a directory; None where the model takes text only.

        Raises:
            ModelError: A file of the model is missing, damaged, or says what is not supported.
        """
        model = read_spec(directory)
        if model.vision is None:
            return None
        pixels: dict[MediaKind, PixelConfig] = {"image": read_pixel_config(directory)}
        if model.vision.video_token_id is not None:
            pixels["video"] = read_pixel_config(directory, "video")
        return cls(model, tokenizer, pixels, limits)

    def within(self, namespace: str) -> "ModelMediaReader":
        """As `MediaReader.within`. All namespaces share the bound of kept files."""
        view = copy.copy(self)
        view._namespace = namespace.encode()
        return view

    def read(self, parts: Sequence[MediaPart], max_tokens: int | None = None) -> list[PromptMedia]:
        """All pictures and videos of one request, in order; as `MediaReader.read`."""
        budget = MediaBudget(self._limits)
        found: dict[bytes, PromptMedia] = {}
        by_part: dict[int, bytes] = {}  # by identity, because many prompts may have the same part
        digests: dict[int, bytes] = {}  # by identity, because many parts may have the same file
        for part in parts:
            if id(part) not in by_part:
                by_part[id(part)] = _file_key(self._namespace, part, digests)
        keys = [by_part[id(part)] for part in parts]
        num_tokens = 0
        for key, part in zip(keys, parts, strict=True):
            if key in found:
                continue
            found[key] = self._read(key, part, budget)
            num_tokens += found[key].num_tokens
            if max_tokens is not None and num_tokens > max_tokens:
                raise ContextLengthError(
                    f"prompt and new tokens together must be at most {max_tokens}, but pictures and videos alone have "
                    "more; send fewer, or smaller ones where the model cuts them into tiles",
                    param="prompt",
                )
        return [found[key] for key in keys]

    def _read(self, key: bytes, part: MediaPart, budget: MediaBudget) -> PromptMedia:
        if part.kind not in self.placeholder_ids:
            raise RequestError(
                f"a prompt for this model may have pictures only, but has a part of kind {part.kind}; send frames of "
                "it as pictures",
                param="prompt",
            )
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            _count(part, kept, budget)
            return kept.media
        tiles = self._tiles(part, budget)
        made = self._prompt_media(tiles)
        seen = _Seen(made, tiles.size)
        if seen.num_bytes <= KEPT_BYTES:
            with self._lock:
                self._kept.put(key, seen)
        return made

    def _tiles(self, part: MediaPart, budget: MediaBudget) -> PixelTiles:
        processor = self._processors[part.kind]
        if part.kind == "image":
            assert isinstance(part.data, bytes)
            return processor.image(decode_image(part.data, budget))
        if isinstance(part.data, bytes) and not is_still(part.data):
            return processor.video(decode_video(part.data, budget, part.num_frames or DEFAULT_FRAMES))
        frames = (part.data,) if isinstance(part.data, bytes) else part.data
        return processor.video(decode_frames(frames, budget, part.num_frames))

    def _prompt_media(self, tiles: PixelTiles) -> PromptMedia:
        is_video = tiles.mode == "video"
        rows = video_layout(self._vision, len(tiles.pixels)) if is_video else image_layout(self._vision, tiles.size)
        assert is_video or len(tiles.pixels) == num_tiles(self._vision, tiles.size)
        if len(rows) < MIN_TOKENS:
            raise RequestError(
                f"a video must take at least {MIN_TOKENS} tokens of the prompt, but {len(tiles.pixels)} frames take "
                f"{len(rows)}; show more frames",
                param="prompt",
            )
        digest = tiles.key()
        return PromptMedia(
            placeholder_id=self.placeholder_ids[tiles.mode],
            words=key_words(digest, len(rows), self._vocab_size),
            rows=rows,
            pixels=tiles.pixels,
            digest=digest,
            is_video=is_video,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What was made of a file, and the height and width of its picture or frames."""

    media: PromptMedia
    size: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return self.media.pixels.nbytes + self.media.words.nbytes + self.media.rows.nbytes


def _file_key(namespace: bytes, part: MediaPart, digests: dict[int, bytes]) -> bytes:
    """The key of a part, which differs between namespaces.

    `digests` holds the digests of files by identity. Each is made once, because naming a file again costs a client
    nothing.
    """
    is_file = isinstance(part.data, bytes)
    files: tuple[bytes, ...] = (part.data,) if isinstance(part.data, bytes) else part.data
    digest = hashlib.sha256(len(namespace).to_bytes(8, "big") + namespace)
    digest.update(f"{part.kind} {part.num_frames} {'file' if is_file else 'frames'} ".encode())
    for file in files:
        if id(file) not in digests:
            digests[id(file)] = hashlib.sha256(file).digest()
        digest.update(digests[id(file)])
    return digest.digest()


def _count(part: MediaPart, seen: _Seen, budget: MediaBudget) -> None:
    """Takes from the budget what reading this file takes."""
    budget.take_bytes(file_size(part.data))
    if seen.media.is_video:
        budget.take_video()
        budget.take_frames(len(seen.media.pixels), *seen.size)
    else:
        budget.take_image(*seen.size)


def _check(model: ModelSpec, vision: VisionConfig, pixels: dict[MediaKind, PixelConfig]) -> None:
    """Raises ModelError where the processor's file makes tiles that the vision tower does not take."""
    for kind, config in pixels.items():
        if config.tile_size != vision.image_size:
            raise ModelError(
                f"the processor's config must make tiles of {vision.image_size} pixels, as config.json says, but of "
                f"kind {kind} it makes {config.tile_size}; fetch the model again"
            )
    grid = pixels["image"].grid
    if (() if grid is None else grid.pinpoints) != vision.grid_pinpoints:
        raise ModelError(
            "image_grid_pinpoints must be the same in config.json and in the processor's config, but they differ; "
            "fetch the model again"
        )
    if vision.patches_per_tile < MIN_TOKENS or model.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(
            f"a picture must take at least {MIN_TOKENS} tokens of a vocabulary of at most {MAX_VOCAB_SIZE}, but takes "
            f"{vision.patches_per_tile} of {model.vocab_size}; such a model is not supported"
        )


def _written(tokenizer: Tokenizer, kind: str, token_id: int) -> str:
    """The written form of a placeholder. Raises ModelError if it is no special token, so that any text may have it."""
    written = tokenizer.token_bytes(token_id).decode(errors="replace")
    if not written or token_id not in tokenizer.special_ids:
        raise ModelError(
            f"the placeholder of kind {kind} in config.json must be a special token of the tokenizer, but its id "
            f"{token_id} is {written!r}; fetch the model again"
        )
    return written
