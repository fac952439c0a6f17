"""Directories whose files are run as code: nobody else may enter them, and what is made on the way is as private."""

import contextlib
import os
import pathlib
import stat
import tempfile

import pytest

from jsg.config import EngineConfig
from jsg.engine.private_directory import (
    compilation_cache_path,
    private_directory,
    temporary_directory,
    why_unwritable,
    with_usable_cache,
)
from jsg.errors import ConfigError


def test_what_is_made_is_private_with_its_parents(tmp_path):
    """The kernels of grammars lie below the compiled programs, and whichever comes first makes both directories."""
    inner = private_directory(tmp_path / "programs" / "kernels", "--compilation-cache-dir", "it is code")
    assert stat.S_IMODE(inner.stat().st_mode) == 0o700
    assert private_directory(inner.parent, "--compilation-cache-dir", "it is code") == inner.parent


def test_what_is_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"--x must be yours and closed to everybody else, because it is code"):
        private_directory(tmp_path, "--x", "it is code")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--x must be a directory that can be made"):
        private_directory(tmp_path / "file" / "below", "--x", "it is code")


def test_the_compile_cache_that_an_option_names_must_be_ours_alone(tmp_path: pathlib.Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="700"):
        with_usable_cache(EngineConfig(compilation_cache_dir=str(tmp_path / "open")))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/below gave: Not a directory; choose another"):
        with_usable_cache(EngineConfig(compilation_cache_dir=str(tmp_path / "file" / "below")))
    config = EngineConfig(compilation_cache_dir=str(tmp_path / "made"))
    assert with_usable_cache(config) is config
    assert os.stat(tmp_path / "made").st_mode & 0o777 == 0o700


def test_where_home_is_usable_programs_are_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_usable_cache(EngineConfig()) == EngineConfig() and not caplog.text
    assert compilation_cache_path(None) == tmp_path / ".cache/jsg/xla" and compilation_cache_path(None).is_dir()


def full(dir: object):
    """A file on a full disk."""
    return open("/dev/full", "wb")


@pytest.mark.parametrize("home", ["missing", "a file", "open", "of another", "full", "none", "without an entry"])
def test_a_home_that_cannot_be_used_refuses_no_start(tmp_path: pathlib.Path, monkeypatch, caplog, home: str):
    cache = tmp_path / ".cache/jsg/xla"
    monkeypatch.setenv("HOME", str(tmp_path))
    match home:
        case "missing":
            monkeypatch.setenv("HOME", "/proc/none")  # where even root can make nothing
            reason = "/proc/none/.cache/jsg/xla cannot be made (No such file or directory)"
        case "a file":
            (tmp_path / ".cache").touch()
            reason = f"{cache} cannot be made (Not a directory)"
        case "open":
            cache.mkdir(parents=True)
            cache.chmod(0o755)
            reason = f"{cache} must be yours and closed to everybody else (chmod 700)"
        case "of another":
            cache.mkdir(parents=True, mode=0o700)
            monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
            reason = f"{cache} must be yours and closed to everybody else (chmod 700)"
        case "full":
            monkeypatch.setattr(tempfile, "TemporaryFile", full)
            reason = f"{cache} cannot be written to (No space left on device)"
        case _:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(os.path, "expanduser", lambda path: path)
            reason = "this user has no home directory"
    found = with_usable_cache(EngineConfig())
    assert found == EngineConfig(disable_compilation_cache=True)
    (record,) = caplog.records
    assert reason in record.message and "set HOME to a directory that is yours" in record.message
    assert with_usable_cache(found) is found and len(caplog.records) == 1, "one warning is enough"


def test_a_full_disk_takes_an_empty_file_but_is_found_out(tmp_path, monkeypatch):
    assert why_unwritable(tmp_path) is None
    assert why_unwritable(tmp_path / "none") == "No such file or directory"
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert why_unwritable(tmp_path) == "No space left on device"


@contextlib.contextmanager
def places(monkeypatch, *usable: str | None):
    """Makes only these places usable for temporary directories."""
    make = tempfile.TemporaryDirectory

    def only(prefix: str, dir: str | None, **options):
        if dir not in usable:
            raise FileNotFoundError(dir)
        return make(prefix=prefix, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", only)
    yield


def test_sockets_find_another_place_where_the_usual_one_is_not_usable(tmp_path, monkeypatch):
    with places(monkeypatch, "/dev/shm"), temporary_directory() as name:
        assert pathlib.Path(name).parent == pathlib.Path("/dev/shm")
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o700
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with places(monkeypatch, None, "/dev/shm"), temporary_directory() as name:
        assert pathlib.Path(name).parent == pathlib.Path("/dev/shm"), "the path of a socket would be too long"
    assert not list(long.iterdir())


def test_without_any_place_for_sockets_the_error_names_the_remedy(monkeypatch):
    with places(monkeypatch), pytest.raises(ConfigError, match="set TMPDIR to a directory that is yours"):
        temporary_directory()
