"""Directories that nobody else may look into or write to."""

import os
import stat
from pathlib import Path

from jsg.errors import ConfigError


def private_directory(path: Path, option: str, why: str) -> Path:
    """Makes an owner-only directory, or checks that one that is there already is; returns its path.

    Args:
        path: The directory. Missing parents are made too, and are as private, because one of them may itself be the
            private directory of another option.
        option: The option that names it, for the error.
        why: Why nobody else may enter, as a clause for the error.

    Raises:
        ConfigError: It cannot be made, belongs to somebody else, or others may enter it.
    """
    try:
        for parent in reversed(path.parents):  # `mkdir(parents=True)` would leave them open to others
            if not parent.exists():
                parent.mkdir(exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{option} must be a directory that can be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{option} must be yours and closed to everybody else, because {why}; change its owner and mode "
            "(chmod 700) or choose another"
        )
    return path
