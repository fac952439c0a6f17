"""Reads the log of a server strictly: every line must be of the format."""

import json
import re
from typing import NamedTuple

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TEXT_LINE = re.compile(rf"({TIME}) ({'|'.join(LEVELS)}) ([\w-]+)([:|]) (.*)")


class LogRecord(NamedTuple):
    """A record; that of a request has its fields as text for a message."""

    time: str
    level: str
    source: str
    message: str


def read_records(log_format: str, log: str) -> list[LogRecord]:
    """The records of a log."""
    records: list[LogRecord] = []
    for line in log.splitlines():
        if log_format == "json":
            fields = json.loads(line)
            time, level, source = (fields.pop(name) for name in ("time", "level", "source"))
            assert re.fullmatch(TIME, time) and level in LEVELS, line
            records.append(LogRecord(time, level, source, json.dumps(fields) if len(fields) > 1 else fields["message"]))
            continue
        match = TEXT_LINE.fullmatch(line)
        assert match is not None, line
        time, level, source, mark, text = match.groups()
        if mark == ":":
            records.append(LogRecord(time, level, source, text))
        else:
            place = next(i for i in reversed(range(len(records))) if records[i].source == source)
            records[place] = records[place]._replace(message=f"{records[place].message}\n{text}")
    return records
