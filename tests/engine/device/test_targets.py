"""Descriptions of devices that are not here, and what is said where nothing can compile for one."""

import sys

import pytest

from jsg.cli import TARGETS
from jsg.engine.device import cards, tpus
from jsg.engine.device.memory import usable_bytes
from jsg.errors import ConfigError


def test_every_name_of_the_command_line_has_a_description():
    assert sorted((*cards.NAMES, *tpus.NAMES)) == list(TARGETS)


def test_a_tpu_is_a_target():
    device = tpus.target("v6e").device(4, "it is asked for")
    assert str(device) == "tpu: 4 x TPU v6 lite, 31.2 GiB; it is asked for"
    assert usable_bytes(0.5, device) == tpus.target("v6e").memory_bytes // 2 < 16 * 2**30
    assert {name: tpus.target(name).kind for name in ("v5e", "v5p", "tpu7x")} == {
        "v5e": "TPU v5 lite",
        "v5p": "TPU v5",
        "tpu7x": "TPU7x",
    }


def test_a_mesh_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name, count, most in (("v5e", 16, 8), ("v5p", 8, 4), ("tpu7x", 9, 8)):
        with pytest.raises(ConfigError, match=rf"--tp-size must be at most {most}, .* of {name}, but got {count}"):
            tpus.mesh_of(name, count)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    for variable in tpus.ENVIRONMENT:
        monkeypatch.setenv(variable, "")  # and later as it was
    with pytest.raises(ConfigError, match=r"needs libtpu, .*: pip install 'jax\[tpu\]', or libtpu alone"):
        tpus.mesh_of("v5e")
