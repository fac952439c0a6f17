import dataclasses
from pathlib import Path

import pytest

from jsg.config import EngineConfig
from jsg.engine.hosts import identity as module
from jsg.engine.hosts.identity import SAMPLE_BYTES, SAMPLES, difference, identity
from jsg.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(SAMPLES * SAMPLE_BYTES * 3))
    return tmp_path


CONFIG = EngineConfig(nnodes=2, tp_size=2, dist_init_addr="a:1")


def test_knobs_of_one_host_may_differ(directory: Path):
    other = dataclasses.replace(CONFIG, node_rank=1, model_path="elsewhere", profile_dir="here")
    assert difference(identity(CONFIG, directory), identity(other, directory)) is None


@pytest.mark.parametrize(
    ("knob", "value"), [("page_size", 4), ("quantization", "int8"), ("deterministic", True), ("dist_timeout", 9.0)]
)
def test_another_knob_is_named(directory: Path, knob: str, value: object):
    other = dataclasses.replace(CONFIG, **{knob: value})
    why = difference(identity(CONFIG, directory), identity(other, directory))
    assert why == (
        f"--{knob.replace('_', '-')} must be the same on every host, but is {getattr(CONFIG, knob)} on the leader and "
        f"{value} on this one"
    )


def test_another_model_is_named(directory: Path, tmp_path_factory: pytest.TempPathFactory):
    other = tmp_path_factory.mktemp("other")
    for path in directory.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    ours = identity(CONFIG, directory)
    assert difference(ours, identity(CONFIG, other)) is None
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert "the model's model.safetensors must be the same" in (difference(ours, identity(CONFIG, other)) or "")
    (other / "config.json").write_text("{ }")
    assert "the model's config.json must be the same" in (difference(ours, identity(CONFIG, other)) or "")
    (other / "model.safetensors").unlink()
    (other / "config.json").write_text("{}")
    assert "is missing" not in (difference(ours, ours) or "")
    assert "missing on this one" in (difference(ours, identity(CONFIG, other)) or "")


def test_made_up_weights_need_no_files(directory: Path):
    dummy = dataclasses.replace(CONFIG, load_format="dummy")
    before = identity(dummy, directory)
    (directory / "model.safetensors").unlink()
    assert difference(before, identity(dummy, directory)) is None


def test_other_tensors_of_an_orbax_checkpoint_are_named(directory: Path):
    (directory / "orbax.json").write_text("{}")
    (directory / "orbax" / "a" / "c").mkdir(parents=True)
    (directory / "orbax" / "a" / "c" / "0").write_bytes(b"1")
    ours = identity(CONFIG, directory)
    (directory / "orbax" / "a" / "c" / "0").write_bytes(b"2")
    why = difference(ours, identity(CONFIG, directory))
    assert (why or "").startswith("the model's tensors must be the same on every host")


def test_the_middle_of_a_large_tensor_counts(directory: Path):
    (directory / "orbax.json").write_text("{}")
    (directory / "orbax").mkdir()
    chunk = directory / "orbax" / "0"
    chunk.write_bytes(bytes(SAMPLES * SAMPLE_BYTES))
    ours = identity(CONFIG, directory)
    chunk.write_bytes(bytes(SAMPLES * SAMPLE_BYTES - 1) + b"1")
    assert "the model's tensors must be the same" in (difference(ours, identity(CONFIG, directory)) or "")


def test_hosts_share_one_compile_cache_or_have_none(directory: Path, tmp_path_factory: pytest.TempPathFactory):
    here, there = (str(tmp_path_factory.mktemp("cache")) for _ in range(2))
    cached = dataclasses.replace(CONFIG, compilation_cache_dir=here)
    ours = identity(cached, directory)
    assert difference(ours, identity(cached, directory)) is None
    for other, theirs in ((cached, "that named"), (CONFIG, "none")):
        elsewhere = dataclasses.replace(other, node_rank=1, compilation_cache_dir=other.compilation_cache_dir and there)
        why = difference(ours, identity(elsewhere, directory)) or ""
        assert why.startswith("the compile cache must be the same on every host, but is that named ")
        assert f" and {theirs}" in why
    unused = dataclasses.replace(cached, disable_compilation_cache=True)
    assert difference(identity(unused, directory), identity(CONFIG, directory)) is None


def test_a_compile_cache_that_cannot_be_written_to_is_an_error(directory: Path):
    with pytest.raises(ConfigError, match="--compilation-cache-dir must be a directory that can be written to"):
        identity(dataclasses.replace(CONFIG, compilation_cache_dir=str(directory / "none")), directory)


def test_another_version_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch):
    ours = identity(CONFIG, directory)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda package: "9" if package == "jax" else "1")
    assert (difference(ours, identity(CONFIG, directory)) or "").startswith("jax must be the same on every host")


def test_another_source_of_the_same_version_is_named(directory: Path):
    ours = identity(CONFIG, directory)
    why = difference(ours, ours | {"jsg's source": "edited"})
    assert (why or "").startswith("jsg's source must be the same")
