"""Prompts in parts, as JSON. Programs send them, because their prompts grow by pieces."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, final

from pydantic import Field, StringConstraints

from jsg.errors import NotFoundError, RequestError
from jsg.processing.media.base64_files import MAX_FRAMES, read_base64
from jsg.processing.media_prompt import sees_no
from jsg.processing.parts import JoinedPart, MediaFile, MediaKind, MediaPart, OffsetPart, Part, TextPart, TokenPart
from jsg.server.front import Front
from jsg.server.http.body import Body, Checked, TokenIds
from jsg.server.kept_files import KeptFiles
from jsg.types import MAX_BRANCHES

NAMED_TYPE = "application/octet-stream"  # the type of a file that is named by its hash: its bytes tell the real type
SHA256_LEN = 64

type Offset = Annotated[int, Field(ge=0, lt=2**31)]
type Sha256 = Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{SHA256_LEN}}}$")]
type Sha256List = Annotated[
    str,
    StringConstraints(
        pattern=rf"^[0-9a-f]{{{SHA256_LEN}}}(,[0-9a-f]{{{SHA256_LEN}}})*$", max_length=(SHA256_LEN + 1) * MAX_FRAMES
    ),
]


class BranchPart(Body):
    """A part that is neither text nor tokens: `markup`, `template`, `offset`, or a picture or video."""

    KINDS: ClassVar[Sequence[str]] = (
        *("markup", "template", "offset"),
        *("image", "video", "image_sha256", "video_sha256"),
    )
    WITH: ClassVar[Mapping[str, Sequence[str]]] = {
        "media_type": ("image", "video"),
        "num_frames": ("video", "video_sha256"),
    }

    markup: str | None = Field(None, description="A text in which written special tokens count as special tokens.")
    template: str | None = Field(
        None,
        description="A text that a chat template wrote. It is read as `markup` is, but BOS is put in front of it only "
        "if the model sees pictures.",
    )
    offset: Offset | None = Field(
        None, description="The number that is added to the positions of all tokens behind this part."
    )
    image: str | None = Field(None, description="The file of a picture in base64.")
    video: str | None = Field(
        None, description="The file of a video in base64, or the files of its frames with commas between them."
    )
    image_sha256: Sha256 | None = Field(
        None,
        description="The SHA-256, in hex, of a picture's file that was sent before with the same key and salts. If the "
        "server does not keep the file any more, it answers 404; then send the file.",
    )
    video_sha256: Sha256List | None = Field(
        None, description="The SHA-256 of a video's file, or of each of its frames with commas between them."
    )
    media_type: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="The media type of the file in `image` or `video`, such as `image/png`."
    )
    num_frames: Annotated[int, Field(ge=1, le=MAX_FRAMES)] | None = Field(
        None, description="The number of frames that the model sees of a video."
    )


class PromptPart(BranchPart):
    """A part that is neither text nor tokens: one of the fields of `BranchPart`, or `branches`."""

    KINDS: ClassVar[Sequence[str]] = (*BranchPart.KINDS, "branches")

    branches: Annotated[Checked[Checked[str | TokenIds | BranchPart]], Field(max_length=MAX_BRANCHES)] | None = Field(
        None,
        description="Branches that stand side by side, each a list of parts. No branch sees another one, and the parts "
        "behind them see all of them. A prompt has at most one such part.",
    )


type PromptParts = Checked[str | TokenIds | PromptPart]


async def read_parts(front: Front, given: Sequence[str | list[int] | BranchPart], namespace: str) -> tuple[Part, ...]:
    """`to_parts` for one namespace of the prefix cache; it runs in a thread where files must be decoded."""
    kept = front.media.kept
    num_chars = sum(map(_num_file_chars, given))
    if not num_chars:
        return to_parts(given, kept, namespace)
    return await front.threads.run(lambda: to_parts(given, kept, namespace), num_chars)


def to_parts(
    given: Sequence[str | list[int] | BranchPart], kept: KeptFiles | None = None, namespace: str = ""
) -> tuple[Part, ...]:
    """The parts of a prompt. In a part that is only a text, special tokens are plain characters.

    Args:
        given: As the body has them.
        kept: The files that parts may name; files that parts bring are added. None for a model that sees nothing.
        namespace: The part of the prefix cache whose files these are.

    Raises:
        RequestError: A part has no kind or several, or there are branches twice.
        NotFoundError: A named file is not kept.
    """
    reader = _PartReader(kept, namespace)
    parts = tuple(reader.read(item, f"prompt[{index}]") for index, item in enumerate(given))
    if sum(isinstance(part, JoinedPart) for part in parts) > 1:
        raise RequestError(
            "prompt must have at most one part with branches, but has several; put all branches into one", "prompt"
        )
    return parts


def _num_file_chars(item: Any) -> int:
    """The size of the files that a part brings or names, in characters."""
    if not isinstance(item, BranchPart):
        return 0
    named = len(item.image_sha256 or "") + len(item.video_sha256 or "")  # to be looked up
    own = len(item.image or "") + len(item.video or "") + named
    branches = item.branches or () if isinstance(item, PromptPart) else ()
    return own + sum(_num_file_chars(each) for branch in branches for each in branch)


@final
class _PartReader:
    """Reads the parts of one prompt."""

    def __init__(self, kept: KeptFiles | None, namespace: str) -> None:
        self._kept = kept
        self._namespace = namespace

    def read(self, item: str | list[int] | BranchPart, place: str) -> Part:
        """One part. `place` is its place in the body, for error messages."""
        if isinstance(item, str):
            return TextPart(item)
        if isinstance(item, list):
            return TokenPart(tuple(item))
        name, value = _kind_of(item, place)
        match name:
            case "markup":
                return TextPart(value, is_markup=True)
            case "template":
                return TextPart(value, is_markup=True, is_template=True)
            case "offset":
                return OffsetPart(value)
            case "branches":
                return JoinedPart(
                    tuple(
                        tuple(
                            self.read(each, f"{place}.branches[{number}][{index}]") for index, each in enumerate(branch)
                        )
                        for number, branch in enumerate(value)
                    )
                )
            case "image" | "video":
                return self._sent(item, name, value, place)
            case "image_sha256":
                return self._named("image", value, None, f"{place}.{name}")
            case "video_sha256":
                return self._named("video", value, item.num_frames, f"{place}.{name}")
            case _:
                raise AssertionError(name)

    def _sent(self, item: BranchPart, kind: MediaKind, text: str, place: str) -> MediaPart:
        try:
            data = read_base64(text, kind)
        except RequestError as error:
            raise RequestError(f"{place}.{kind}: {error}", "prompt") from None
        if item.media_type is None:
            raise RequestError(f"{place} must have a media_type beside {kind}, but has none; add it", "prompt")
        if self._kept is not None:
            for file in (data,) if isinstance(data, bytes) else data:
                self._kept.put(self._namespace, file)
        return MediaPart(kind, data, item.media_type, item.num_frames)

    def _named(self, kind: MediaKind, names: str, num_frames: int | None, place: str) -> MediaPart:
        if self._kept is None:
            raise sees_no(kind, "prompt")
        files = [self._kept.get(self._namespace, bytes.fromhex(name)) for name in names.split(",")]
        found = tuple(file for file in files if file is not None)
        if len(found) < len(files):
            raise NotFoundError(
                f"{place} must name a file that was sent lately with the same key and salts, but "
                f"{len(files) - len(found)} of {len(files)} are not kept here; send the file, as {kind}"
            )
        data: MediaFile = found[0] if len(found) == 1 else found
        return MediaPart(kind, data, NAMED_TYPE, num_frames)


def _kind_of(item: BranchPart, place: str) -> tuple[str, Any]:
    """The kind of a part, and its value. Raises RequestError where it has none or several."""
    given = [name for name in item.KINDS if getattr(item, name) is not None]
    if len(given) != 1:
        rule = f"{place} must have exactly one of {', '.join(item.KINDS)}"
        has = " and ".join(given) or "none"
        raise RequestError(f"{rule}, but has {has}; write each as a part of its own", "prompt")
    for name, kinds in item.WITH.items():
        if getattr(item, name) is not None and given[0] not in kinds:
            rule = f"{place} may have {name} only beside {' or '.join(kinds)}"
            raise RequestError(f"{rule}, but has {given[0]}; leave it out", "prompt")
    return given[0], getattr(item, given[0])
