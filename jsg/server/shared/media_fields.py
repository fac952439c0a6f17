"""`image_data` and `video_data`, as SGLang names them: pictures and videos beside prompts of text or token ids."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

from jsg.errors import RequestError
from jsg.processing.media.base64_files import MAX_FRAMES
from jsg.processing.media_prompt import PromptMedia, put_media
from jsg.processing.parts import MediaKind
from jsg.server.front import Front
from jsg.server.http.body import Checked
from jsg.server.media_sources import MediaSource
from jsg.server.text_threads import PICTURE_BYTES
from jsg.speech.prompts.encode_parts import EncodedPrompt

IMAGE_DATA = (
    "Pictures, for a model that sees. Each is a `data:` URL, a file in base64, or an http URL of a host that the "
    "server allows; several come as a list. They take the places of the model's placeholders (such as `<image>`) in "
    "order, and there must be as many placeholders as pictures. In a prompt without placeholders they stand at its "
    "front. With a list of prompts, one picture is for all of them, and a list has one entry for each prompt: a "
    "picture, a list of pictures, or null."
)
VIDEO_DATA = (
    "Videos, in the forms of `image_data`, for a model that takes videos. In place of a video's file its frames may "
    "come, each a picture in base64, with commas between them."
)
NUM_FRAMES = (
    "The number of frames that the model sees of each video, evenly spaced. Without it the model sees its usual number "
    "of frames of a file, or all frames if frames were sent."
)

type MediaData = str | Checked[str | Checked[str] | None] | None
type NumFrames = Annotated[int, Field(ge=1, le=MAX_FRAMES)] | None


class MediaFields(Protocol):
    """A body with these fields."""

    image_data: MediaData
    video_data: MediaData
    num_frames: NumFrames


async def encode_with_media(
    front: Front, prompts: Sequence[str | list[int]], body: MediaFields, *, is_list: bool, field: str, namespace: str
) -> list[EncodedPrompt]:
    """The prompts, with the pictures and videos of each.

    Args:
        front: The server that has the model.
        prompts: Texts or token ids.
        body: Has the pictures and videos.
        is_list: Whether the request has a list of prompts.
        field: The field of the prompts, for error messages.
        namespace: As in `MediaReader.within`.

    Raises:
        RequestError: As `MediaSources.read` and `put_media`, or a list is not as long as the list of prompts.
        ContextLengthError: As `put_media`.
    """
    if body.num_frames is not None and body.video_data is None:
        raise RequestError("num_frames needs video_data, but there is no video_data; leave it out", "num_frames")
    images = _each(body.image_data, "image", len(prompts), is_list=is_list)
    videos = _each(body.video_data, "video", len(prompts), is_list=is_list, num_frames=body.num_frames)
    sources = [[*some, *others] for some, others in zip(images, videos, strict=True)]
    flat = [source for some in sources for source in some]
    max_tokens = front.generator.info.max_request_tokens
    name = "image_data" if any(images) else "video_data"
    media = iter(await front.media.read(flat, name, max_tokens * len(prompts), namespace=namespace))
    own: list[list[PromptMedia]] = [[next(media) for _ in some] for some in sources]
    id_lists = await front.generator.encode(prompts)
    bos_ids, reader = front.generator.tokenizer.bos_ids, front.media.reader

    def put_all() -> list[EncodedPrompt]:
        encoded: list[EncodedPrompt] = []
        for ids, items in zip(id_lists, own, strict=True):
            input_ids, inputs = put_media(ids, bos_ids, reader, items, field, max_tokens)
            encoded.append(EncodedPrompt(input_ids=input_ids, media=inputs))
        return encoded

    if reader is None:
        return put_all()
    return await front.threads.run(put_all, sum(map(len, id_lists)) + PICTURE_BYTES * len(flat))


def _each(
    data: Any, kind: MediaKind, count: int, *, is_list: bool, num_frames: int | None = None
) -> list[list[MediaSource]]:
    """The sources of each prompt. Raises RequestError."""
    name = f"{kind}_data"

    def sources(items: list[Any]) -> list[MediaSource]:
        for item in items:
            if not isinstance(item, str) or not item:
                rule = f"{name} of one prompt must be a text or a list of texts"
                raise RequestError(f"{rule}, but has {item!r:.60}; correct it", name)
        return [MediaSource(kind, item, num_frames) for item in items]

    if data is None:
        return [[]] * count
    if not is_list or isinstance(data, str):
        return [sources(data if isinstance(data, list) else [data])] * count
    if len(data) != count:
        raise RequestError(
            f"{name} must have an entry for each of the {count} prompts, or be one for all, but has {len(data)}; give "
            "null where a prompt has none",
            name,
        )
    return [sources(item if isinstance(item, list) else [] if item is None else [item]) for item in data]
