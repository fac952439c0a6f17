"""Directories whose files are run as code: nobody else may enter them, and what is made on the way is as private."""

import stat

import pytest

from jsg.engine.private_directory import private_directory
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
