"""Directories that nobody else may look into or write to, and what happens where there can be none."""

import dataclasses
import logging
import os
import stat
import tempfile
from pathlib import Path

from jsg.config import EngineConfig, option
from jsg.errors import ConfigError

logger = logging.getLogger(__name__)

PROGRAMS_WHY = "what lies there is run as code"
MOST_SOCKET_DIRECTORY_BYTES = 96
"""The longest path of a directory for sockets: the path of a socket has 107 bytes at most."""
PROBE_BYTES = 4096
_CACHE_OPTION = option("compilation_cache_dir")


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
        raise ConfigError(
            f"{option} must be a directory that can be made, but {path} gave: {error.strerror}; choose another"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{option} must be yours and closed to everybody else, because {why}, but {path} is not; change its owner "
            "and mode (chmod 700) or choose another"
        )
    return path


def compilation_cache_path(directory: str | None) -> Path:
    """The directory of compiled programs: `~/.cache/jsg/xla` for None."""
    return Path(directory or os.path.expanduser("~/.cache/jsg/xla"))


def with_usable_cache(config: EngineConfig) -> EngineConfig:
    """The options, without the cache of compiled programs where it cannot be used, of which a warning says why.

    The directory in the home of this user is never worth a refused start: a home may be missing, read-only, full, or
    somebody else's.

    Raises:
        ConfigError: `--compilation-cache-dir` cannot be made, belongs to somebody else, or others may enter it.
    """
    if config.disable_compilation_cache:
        return config
    path = compilation_cache_path(config.compilation_cache_dir)
    if (problem := _problem_of(path, is_default=config.compilation_cache_dir is None)) is None:
        return config
    logger.warning(
        "compiled programs are not kept, so each start compiles them anew, because %s; set HOME to a directory that is "
        "yours and has room, or name one with %s",
        problem,
        _CACHE_OPTION,
    )
    return dataclasses.replace(config, disable_compilation_cache=True)


def _problem_of(path: Path, *, is_default: bool) -> str | None:
    """Why programs cannot be kept in this directory; None if they can."""
    if not path.is_absolute() and is_default:  # no variable and no entry of /etc/passwd names a home
        return "this user has no home directory"
    try:
        private_directory(path, _CACHE_OPTION, PROGRAMS_WHY)
    except ConfigError as error:
        if not is_default:
            raise
        if isinstance(error.__cause__, OSError):
            return f"{path} cannot be made ({error.__cause__.strerror})"
        return f"{path} must be yours and closed to everybody else (chmod 700), because {PROGRAMS_WHY}"
    reason = why_unwritable(path)
    return None if reason is None else f"{path} cannot be written to ({reason})"


def why_unwritable(directory: Path) -> str | None:
    """Why nothing can be written to a directory, as the system says it; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))  # a full disk takes an empty file
    except OSError as error:
        return error.strerror
    return None


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """An owner-only directory that goes with this object, in which sockets may lie.

    Raises:
        ConfigError: No place for temporary files can be written to, or their paths are too long for a socket.
    """
    for place in (None, f"/run/user/{os.getuid()}", "/tmp", "/dev/shm"):
        try:
            made = tempfile.TemporaryDirectory(prefix="jsg-", dir=place, ignore_cleanup_errors=True)  # mode 0700
        except OSError:
            continue
        if len(os.fsencode(made.name)) <= MOST_SOCKET_DIRECTORY_BYTES:
            return made
        made.cleanup()
    raise ConfigError(
        "jsg needs a directory for its sockets, but no directory for temporary files can be written to, or its path "
        f"is longer than {MOST_SOCKET_DIRECTORY_BYTES} bytes; set TMPDIR to a directory that is yours"
    )
