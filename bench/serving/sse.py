"""Reads server-sent events from the bytes of a stream, as tolerantly as browsers do."""

DONE = b"[DONE]"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventDecoder:
    """Gives the data of each event, however the bytes are divided into chunks.

    Lines end with LF, CR LF or CR. The blank after `data:` is optional. Several `data:` lines are one event. Comments
    and other fields are skipped. The last event counts even if the blank line behind it is missing, as with some
    servers.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._has_begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this chunk completes."""
        rest = self._rest + chunk
        if not self._has_begun:
            if len(rest) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(rest):
                self._rest = rest
                return []
            rest = rest.removeprefix(_BYTE_ORDER_MARK)
            self._has_begun = True
        held = b""
        if b"\r" in rest:
            if rest.endswith(b"\r"):  # the LF of this line end may be in the next chunk
                rest, held = rest[:-1], b"\r"
            rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, last = rest.split(b"\n")
        self._rest = last + held
        return self._take(lines)

    def finish(self) -> list[bytes]:
        """The event that the end of the stream completes, if there is one."""
        lines, self._rest = [self._rest.removesuffix(b"\r"), b""], b""
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
