"""The log process of a server: `python log_relay.py FORMAT` reads what the server's processes write to their stderr.

It gives each line time, level and source, and writes it to the real stderr. What jsg's loggers write has all three
(`log.py`). What others write (C++, libraries, the interpreter) gets the time of its arrival, the level that its words
suggest, and the source `other`. In the format `json` a record of several lines, such as a trace, is one object.

Several engines, or workers, have the same options on the same machine. A warning that one has just written is left out
where another one repeats it.

It reads until the last of the processes has ended, so that the last words of one that crashes are there as well. It
imports nothing of jsg and starts within 20 ms.
"""

import datetime
import json
import os
import re
import select
import signal
import sys
import time

STDIN, STDOUT, STDERR = 0, 1, 2
END = b"\x04"
"""A line of this: what the server wrote before it must be written out. The process then closes its stdout."""
QUIET_S = 0.1  # a record has ended when nothing more of it has come for so long
HOLD_S = 1.0  # the longest time for which a record waits for more, where lines of other records keep coming
MAX_LINE_BYTES = 2**16
MAX_LINES = 1000  # of a record
MAX_LEVEL_CHARS = 500  # of a line that are searched for its level
REPEAT_S = 60.0  # for so long a warning of one engine or worker is left out where another one writes it
MAX_WARNINGS = 1000  # that are remembered
OTHER = "other"  # the source of lines that no logger of jsg has written

_OWN = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w-]+)([:|]) (.*)", re.DOTALL
)
_ONE_OF_SEVERAL = re.compile(rb"(?:engine|worker)-\d+")
_LINE_END = re.compile(rb"\r?\n|\r")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_GLOG = (
    r"(?-i:(?:[\d:. -]+: )?[{}](?:\d{{4}})? .*?\w:\d+\] )"  # as in W0000 00:00:1700000000.123 42 a.cc:7] text of XLA
)
_LEVELS = {
    level: re.compile(f"{_GLOG.format(letters)}|{words}", re.IGNORECASE)
    for level, letters, words in (
        ("INFO", "IV", r"\W*(?:info|debug)\b"),
        ("WARNING", "W", r"\W*warn(?:ing)?\b|.*Warning: "),
        ("CRITICAL", "F", r"\W*(?:critical|fatal)\b"),
        ("ERROR", "E", r".*(?:error|exception|traceback|panicked|abort|terminate called|corrupt)"),
    )
}
"""The level of a line that has none in our form, by the first that fits."""
_TRACE = re.compile(r"\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent|(?:Current t|T)hread 0x")


def text_lines(at_s: float, level: str, source: str, text: str) -> list[str]:
    """The lines of a record in the format `text`. A bar after the source marks those that continue it."""
    shown = [_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n")]
    head = f"{utc(at_s)} {level} {source}"
    return [f"{head}: {shown[0]}", *(f"{head}| {line}" for line in shown[1:])]


def json_line(level: str, source: str, message: str, at: str = "") -> str:
    """A record in the format `json`, of now if there is no time."""
    return json.dumps({"time": at or utc(time.time()), "level": level, "source": source, "message": message})


def utc(at_s: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def level_of(line: str) -> str:
    """The level of a line that has none in our form."""
    return next((level for level, pattern in _LEVELS.items() if pattern.match(line[:MAX_LEVEL_CHARS])), "WARNING")


class Relay:
    """Gives each line time, level and source.

    Attributes:
        output: What is to be written.
        is_at_end: Whether `END` has come.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.output = bytearray()
        self.is_at_end = False
        self._as_json = as_json
        self._records: dict[str, tuple[str, str, list[str]]] = {}  # source → time, level and lines of its last record
        self._is_in_trace = False  # of the last record of another source
        self._warned: dict[bytes, tuple[bytes, float]] = {}  # text → the engine that wrote it last, and when
        self._left_out: set[bytes] = set()  # the engines whose last record was

    @property
    def has_records(self) -> bool:
        """Whether there are records that further lines may continue."""
        return bool(self._records)

    def add(self, line: bytes) -> None:
        """Takes a line without its end."""
        if line.endswith(END):
            self.is_at_end = True
            self.end_records()
            return
        if self._as_json and line.startswith(b'{"time": "'):
            self.output += line + b"\n"  # of the request log
            return
        own = _OWN.search(line)
        if own is None:
            self._add_other(line.decode(errors="backslashreplace"))
            return
        if own.start():  # another process was in the middle of a line
            self._add_other(line[: own.start()].decode(errors="backslashreplace"))
        if self._is_repeated(*own.groups()[1:]):
            return
        if not self._as_json:
            self.output += line[own.start() :] + b"\n"
            return
        at, level, source, mark, text = (part.decode(errors="backslashreplace") for part in own.groups())
        self._add(at, level, source, text, is_more=mark == "|")

    def _is_repeated(self, level: bytes, source: bytes, mark: bytes, text: bytes) -> bool:
        """Whether a line belongs to a warning that another engine or worker has just written."""
        if _ONE_OF_SEVERAL.fullmatch(source) is None:
            return False
        if mark == b"|":
            return source in self._left_out
        self._left_out.discard(source)
        if level != b"WARNING":
            return False
        now_s = time.monotonic()
        other, at_s = self._warned.setdefault(text, (source, now_s))
        if other != source and now_s - at_s < REPEAT_S:
            self._left_out.add(source)
            return True
        self._warned[text] = source, now_s
        if len(self._warned) > MAX_WARNINGS:
            del self._warned[next(iter(self._warned))]
        return False

    def _add_other(self, line: str) -> None:
        """Indented lines belong to the line before, and so do a trace and the error at its end."""
        last = self._records.get(OTHER)
        is_indented, begins_trace = not line or line[0].isspace(), bool(_TRACE.match(line))
        if not line and last is None:
            return
        is_more = last is not None and (self._is_in_trace or is_indented or begins_trace)
        self._is_in_trace = begins_trace or (self._is_in_trace and is_indented)
        now_s = time.time()
        at, level = (last[0], last[1]) if last is not None and is_more else (utc(now_s), level_of(line))
        self._add(at, level, OTHER, line, is_more=is_more)
        if not self._as_json:
            first, *more = text_lines(now_s, level, OTHER, f"\n{line}" if is_more else line)
            self.output += (more[0] if is_more else first).encode() + b"\n"

    def _add(self, at: str, level: str, source: str, text: str, *, is_more: bool) -> None:
        if is_more and source in self._records and len(self._records[source][2]) < MAX_LINES:
            self._records[source][2].append(text)
            return
        self._write(source)
        self._records[source] = at, level, [text]

    def _write(self, source: str) -> None:
        record = self._records.pop(source, None)
        if record is not None and self._as_json:
            self.output += json_line(record[1], source, "\n".join(record[2]), record[0]).encode() + b"\n"

    def end_records(self) -> None:
        """Writes out all records: nothing continues them."""
        for source in list(self._records):
            self._write(source)
        self._is_in_trace = False


def _write_all(output: bytearray) -> None:
    rest = bytes(output)
    output.clear()
    while rest:
        try:
            rest = rest[os.write(STDERR, rest) :]
        except BlockingIOError:  # another process that shares stderr made it non-blocking
            select.select([], [STDERR], [])
        except OSError:  # nobody reads any more, but the server must go on writing
            return


def main(log_format: str) -> None:
    """Relays until the last process that writes has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server's to obey
        signal.signal(number, signal.SIG_IGN)
    relay, rest = Relay(as_json=log_format == "json"), b""
    held_at = due_at = 0.0  # since when there are records, and when nothing continues them any more
    while True:
        is_holding = relay.has_records or bool(rest)
        wait_s = max(0.0, due_at - time.monotonic()) if is_holding else None
        if select.select([STDIN], [], [], wait_s)[0]:
            held_at = held_at if is_holding else time.monotonic()
            if not (received := os.read(STDIN, MAX_LINE_BYTES)):
                break
            *lines, rest = _LINE_END.split(rest + received)
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                relay.add(line)
            due_at = min(time.monotonic() + QUIET_S, held_at + HOLD_S)
        elif rest:  # a process may have ended in the middle of a line
            relay.add(rest)
            rest = b""
        if time.monotonic() >= due_at:
            relay.end_records()
        _write_all(relay.output)
        if relay.is_at_end:
            relay.is_at_end = False
            os.close(STDOUT)
    if rest:
        relay.add(rest)
    relay.end_records()
    _write_all(relay.output)


if __name__ == "__main__":
    main(sys.argv[1])
