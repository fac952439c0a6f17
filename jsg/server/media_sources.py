"""Pictures and videos as clients name them in requests → what the model is shown.

A client sends a file as a `data:` URL or in base64, or names an `http` URL, which is fetched if the operator has
allowed its host. Files are fetched on the event loop and decoded in threads.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from jsg.config import ServerConfig
from jsg.errors import RequestError
from jsg.processing.media.base64_files import read_base64, read_data_url
from jsg.processing.media.limits import MediaLimits
from jsg.processing.media_prompt import MediaReader, PromptMedia, sees_no
from jsg.processing.parts import MediaKind, MediaPart, file_size
from jsg.processing.snapshot_points import joined_text
from jsg.server.kept_files import KeptFiles
from jsg.server.text_threads import PICTURE_BYTES, TextThreads
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.encode_parts import EncodedPrompt
from jsg.speech.reply_plan import ReplyPlan
from jsg.waits import WaitReason, waiting

BASE64_RATIO = 4 / 3  # characters of base64 for each byte
MAX_FETCHING = 32  # requests whose URLs are fetched at the same time; others wait

UNTYPED = "application/octet-stream"


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSource:
    """The place of a picture or a video.

    Attributes:
        url: A `data:` URL, an `http` or `https` URL, or a file in base64 with nothing around it. Frames may be in
            place of a video's file, as `read_base64` takes them.
        num_frames: How many frames of a video are shown; None for the usual number.
    """

    kind: MediaKind
    url: str
    num_frames: int | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it must be fetched."""
        return self.url[:8].lower().startswith(("http://", "https://"))


def media_limits(config: ServerConfig) -> MediaLimits:
    """The limits on the pictures and videos of one request."""
    return MediaLimits(
        max_images=config.max_images_per_request,
        max_videos=config.max_videos_per_request,
        max_frames=config.max_frames_per_request,
        max_bytes=config.max_media_bytes,
        max_image_pixels=config.max_image_pixels,
        max_total_pixels=4 * config.max_image_pixels,
    )


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """Messages in the form that templates take, and the sources in their contents, in order."""
    shown: list[dict[str, Any]] = []
    sources: list[MediaSource] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            sources += [part for part in content if isinstance(part, MediaSource)]
            content = [{"type": part.kind} if isinstance(part, MediaSource) else part for part in content]
        shown.append({**message, "content": content} if "content" in message else dict(message))
    return shown, sources


def joined_content(pieces: Sequence[str | MediaSource]) -> str | list[Any]:
    """A content of texts and pictures: one text where there are texts only, otherwise a list of parts."""
    content: list[Any] = []
    for is_media, run in itertools.groupby(pieces, lambda piece: isinstance(piece, MediaSource)):
        if is_media:
            content += run
        elif text := joined_text([piece for piece in run if isinstance(piece, str)]):
            content.append({"type": "text", "text": text})
    if any(isinstance(part, MediaSource) for part in content):
        return content
    return content[0]["text"] if content else ""


class Fetcher(Protocol):
    """Fetches files, as `media_fetch.MediaFetcher` does."""

    async def fetch(self, url: str) -> bytes:
        """The file at a URL. Raises RequestError."""
        ...


def _fetcher(config: ServerConfig) -> Fetcher:
    """Fetches from the hosts that `config` allows. Raises ConfigError where it cannot work."""
    from jsg.server.media_fetch import FetchPolicy, MediaFetcher  # here: few servers need an HTTP client

    policy = FetchPolicy(
        allowed_hosts=config.allowed_media_host,
        max_bytes=config.max_media_bytes,
        timeout_s=config.media_fetch_timeout,
    )
    return MediaFetcher(policy)


@final
class MediaSources:
    """Reads the pictures and videos that clients name, for one model.

    Attributes:
        reader: The model's reader; None where the model sees nothing.
        kept: The files that requests may name; None where the model sees nothing.
    """

    def __init__(self, reader: MediaReader | None, threads: TextThreads, config: ServerConfig | None = None) -> None:
        """Takes the limits from `config`. Raises ConfigError where they cannot work."""
        config = config or ServerConfig()
        self.reader = reader
        self.kept = None if reader is None else KeptFiles()
        self._threads = threads
        self._limits = media_limits(config)
        self._fetcher = _fetcher(config) if config.allowed_media_host else None
        self._timeout_s = config.media_fetch_timeout
        self._fetching = asyncio.Semaphore(MAX_FETCHING)

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The written forms of the tokens for a picture and for a video, as far as the model takes these."""
        return {} if self.reader is None else self.reader.placeholders

    @property
    def modalities(self) -> list[str]:
        """What the model takes: "text" and, if it sees, "image" and "video"."""
        return ["text", *self.placeholders]

    def reader_within(self, namespace: str) -> MediaReader | None:
        """The reader for the requests of one namespace of the prefix cache."""
        return None if self.reader is None else self.reader.within(namespace)

    @property
    def max_body_bytes(self) -> int:
        """How many characters of base64 all pictures and videos of a request may have in its body."""
        return 0 if self.reader is None else int(self._limits.max_bytes * BASE64_RATIO) + 4

    async def read(
        self, sources: Sequence[MediaSource], field: str, max_tokens: int | None = None, *, namespace: str
    ) -> list[PromptMedia]:
        """What the model is shown of all pictures and videos of one request, in order.

        Args:
            sources: The sources of all prompts of the request.
            field: The field that names them, for error messages.
            max_tokens: As in `MediaReader.read`.
            namespace: As in `MediaReader.within`.

        Raises:
            RequestError: The model sees nothing, a URL is not allowed or cannot be fetched, or as `MediaReader.read`.
            QueueFullError: Too many requests wait for their pictures and videos.
        """
        if not sources:
            return []
        reader = self.reader_within(namespace)
        if reader is None:
            raise sees_no(sources[0].kind, field)
        # One picture may be in each of many prompts, and megabytes of URLs take long to compare.
        once = list({id(source): source for source in sources}.values())
        distinct = await self._threads.run(lambda: self._distinct(once, field), sum(len(source.url) for source in once))
        urls = dict.fromkeys(source.url for source in distinct if source.is_remote)

        def read(files: Mapping[str, bytes]) -> list[PromptMedia]:
            parts = self._parts(distinct, files)
            return reader.read([parts[source] for source in sources], max_tokens)

        try:
            with waiting(WaitReason.MEDIA):
                files = await self._fetch(list(urls)) if urls else {}
            return await self._threads.decode(lambda: read(files))
        except RequestError as error:
            error.param = error.param if error.param not in (None, "prompt") else field
            raise

    async def chat(
        self,
        chat: ChatPrompt,
        plan: ReplyPlan,
        build: Callable[[], Sequence[Mapping[str, Any]]],
        num_bytes: int,
        *,
        namespace: str,
        **options: Any,
    ) -> EncodedPrompt:
        """The prompt of a conversation whose contents may have sources.

        Args:
            chat: The model's template and tokenizer.
            plan: The plan of the reply to it.
            build: Makes the messages, in a thread; a part of a content may be a source.
            num_bytes: The approximate size of the messages.
            namespace: As in `MediaReader.within`.
            options: As in `ChatPrompt.prompt`.

        Raises:
            RequestError: As `build`, `read` and `ChatPrompt.prompt`.
        """
        options |= {"continue_final_message": plan.is_continued, "tools": plan.shown_tools}
        return await self.encode(chat.prompt, build, num_bytes, chat.max_tokens, namespace=namespace, **options)

    async def encode[T](
        self,
        encode: Callable[..., T],
        build: Callable[[], Sequence[Mapping[str, Any]]],
        num_bytes: int,
        max_tokens: int | None,
        *,
        namespace: str,
        **options: Any,
    ) -> T:
        """What a method of `ChatPrompt`, such as `prompt`, makes of a conversation. The rest is as in `chat`."""

        def begin() -> tuple[list[dict[str, Any]], list[MediaSource], T | None]:
            shown, sources = split_media(build())
            return shown, sources, None if sources else encode(shown, namespace=namespace, **options)

        shown, sources, encoded = await self._threads.run(begin, num_bytes)
        if encoded is not None:
            return encoded
        media = await self.read(sources, "messages", max_tokens, namespace=namespace)
        num_chars = num_bytes + sum(PICTURE_BYTES - len(source.url) for source in sources)
        return await self._threads.run(lambda: encode(shown, media=media, namespace=namespace, **options), num_chars)

    def _distinct(self, sources: Sequence[MediaSource], field: str) -> list[MediaSource]:
        """Each source once. Raises RequestError for too many of them, before anything is fetched."""
        distinct = list(dict.fromkeys(sources))
        for kind, most in (("image", self._limits.max_images), ("video", self._limits.max_videos)):
            count = sum(source.kind == kind for source in distinct)
            if count > most:
                name = {"image": "pictures", "video": "videos"}[kind]
                rule = f"a request may have at most {most} {name}"
                raise RequestError(f"{rule}, but has {count}; send fewer", field)
        return distinct

    async def _fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The files at these URLs, one after another. Raises RequestError."""
        fetcher, files, num_bytes = self._fetcher, dict[str, bytes](), 0
        if fetcher is None:
            raise RequestError(
                "an http URL must be of a host that --allowed-media-host names, but this server allows none; send a "
                "data: URL"
            )
        try:
            async with self._fetching, asyncio.timeout(self._timeout_s):
                for url in urls:
                    files[url] = await fetcher.fetch(url)
                    num_bytes += len(files[url])
                    self._check_total(num_bytes)
        except TimeoutError:
            raise RequestError(
                f"the URLs of a request must be fetched within {self._timeout_s:g} s, but were not; send data: URLs"
            ) from None
        return files

    def _parts(self, sources: Sequence[MediaSource], files: Mapping[str, bytes]) -> dict[MediaSource, MediaPart]:
        """The file of each source. Raises RequestError at the first file that exceeds the limit on all together."""
        parts: dict[MediaSource, MediaPart] = {}
        num_bytes = 0
        for source in sources:
            parts[source] = self._part(source, files)
            num_bytes += file_size(parts[source].data)
            self._check_total(num_bytes)
        return parts

    def _check_total(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_bytes:
            raise RequestError(
                f"the files of one request may have at most {self._limits.max_bytes} bytes, but these have more; send "
                "smaller files, or fewer"
            )

    def _part(self, source: MediaSource, files: Mapping[str, bytes]) -> MediaPart:
        if source.is_remote:
            data = files[source.url]
        elif source.url[:5].lower() == "data:":
            data = read_data_url(source.url, source.kind, self._limits.max_bytes)
        elif ":" in source.url[:20]:  # base64 has no colon
            raise RequestError(
                "a file must be a data: URL, an http URL or base64, but it begins with "
                f"{source.url[:20]!r}; encode its bytes"
            )
        else:
            data = read_base64(source.url, source.kind, self._limits.max_bytes)
        return MediaPart(source.kind, data, UNTYPED, source.num_frames)
