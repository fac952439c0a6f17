"""Directories that nobody else may look into or write to."""

import os
import stat
from pathlib import Path

from jsg.errors import ConfigError


def private_directory(path: Path, option: str, why: str) -> Path:
    """Makes an owner-only directory, or checks that one that is there already is; returns its path.

    Args:
        path: The directory. Missing parents are made too.
        option: The option that names it, for the error.
        why: Why nobody else may enter, as a clause for the error.

    Raises:
        ConfigError: It cannot be made, belongs to somebody else, or others may enter it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{option} must be a directory that can be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{option} must be yours and closed to everybody else, because {why}; change its owner and mode "
            "(chmod 700) or choose another"
        )
    return path
