"""The files of pictures and videos that were sent to a server. Later calls name them by their SHA-256."""

import dataclasses
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, final

from jsg.lang.http.parts import parts_to_json, whole_media
from jsg.processing.parts import MediaPart, Part

MAX_FILES = 4096
MAX_MISSES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """A prompt as one call sends it.

    Attributes:
        json: The field `prompt`.
        sent: The SHA-256 of each file in it.
        named: The SHA-256 of each file that it only names.
    """

    json: list[Any]
    sent: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _SentFile:
    """The state of one file.

    Attributes:
        is_kept: Whether it was sent, and not refused since.
        num_misses: How many times in a row it was sent and refused later. Calls at the same time that are refused for
            one loss count as one miss.
    """

    is_kept: bool = True
    num_misses: int = 0


@final
class SentFiles:
    """The files that one server keeps, as far as its answers show. Any number of threads may use it.

    A server keeps a file for a while. A file that it has forgotten when a call names it is sent again. A file that it
    has forgotten twice in a row is sent with each call from then on, so that not every call is made twice.
    """

    def __init__(self) -> None:
        self._files: dict[str, _SentFile] = {}  # by name, in the order of their last use
        self._lock = threading.Lock()

    def attempts(self, prompt: Sequence[Part], *, may_name: bool) -> Iterator[WrittenPrompt]:
        """Gives the prompt with names of the files that the server should know, and then, if that is refused, whole.

        Args:
            prompt: The prompt of a call.
            may_name: Whether the server takes names. Where it does not, the prompt comes once, whole.
        """
        if not may_name:
            yield WrittenPrompt(parts_to_json(prompt))
            return
        written = self._write(prompt, may_name=True)
        yield written
        if written.named:
            yield self._write(prompt, may_name=False)

    def taken(self, written: WrittenPrompt) -> None:
        """Notes that the server has answered, so it has these files."""
        with self._lock:
            for name in written.named:
                self._use(name, _SentFile())
            for name in written.sent:
                self._use(name, _SentFile(num_misses=self._misses_of(name)))

    def refused(self, written: WrittenPrompt) -> None:
        """Notes that the server has forgotten a named file. It does not say which one."""
        with self._lock:
            for name in written.named:
                if (file := self._files.get(name)) is not None and file.is_kept:
                    self._use(name, _SentFile(is_kept=False, num_misses=file.num_misses + 1))

    def _write(self, prompt: Sequence[Part], *, may_name: bool) -> WrittenPrompt:
        sent: list[str] = []
        named: list[str] = []

        def write(part: MediaPart) -> dict[str, Any]:
            names = file_names(part)
            if not (may_name and self._may_name(names)):
                sent.extend(names)
                return whole_media(part)
            named.extend(names)
            fields = {f"{part.kind}_sha256": ",".join(names)}
            return fields if part.num_frames is None else fields | {"num_frames": part.num_frames}

        return WrittenPrompt(parts_to_json(prompt, write), tuple(sent), tuple(named))

    def _may_name(self, names: Sequence[str]) -> bool:
        with self._lock:
            files = [self._files.get(name) for name in names]
        return all(file is not None and file.is_kept and file.num_misses < MAX_MISSES for file in files)

    def _misses_of(self, name: str) -> int:
        file = self._files.get(name)
        return 0 if file is None else file.num_misses

    def _use(self, name: str, file: _SentFile) -> None:
        self._files.pop(name, None)
        self._files[name] = file
        if len(self._files) > MAX_FILES:
            del self._files[next(iter(self._files))]


def file_names(part: MediaPart) -> list[str]:
    """Gives the SHA-256 of a file, or of the files of its frames, in hex."""
    files = (part.data,) if isinstance(part.data, bytes) else part.data
    return [hashlib.sha256(file).hexdigest() for file in files]
