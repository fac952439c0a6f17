"""What must be the same on all hosts of an engine, as texts with names."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jsg
from jsg.config import EngineConfig, option
from jsg.errors import ConfigError
from jsg.gguf.folder import LINK
from jsg.models.orbax_checkpoint import FOLDER, MANIFEST

PACKAGES = ("jax", "jaxlib", "flax")
COMPILERS = {"gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin"), "tpu": ("libtpu",)}
"""What compiles programs besides JAX, by platform."""
OWN_KNOBS = frozenset(
    {
        *("model_path", "tokenizer_path", "node_rank", "dist_init_addr"),
        *("compilation_cache_dir", "disable_compilation_cache", "profile_dir"),
    }
)
"""Options that name something of one host. The compile cache is compared by a name that lies in its directory."""
CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", MANIFEST, f"{LINK}*")
MISSING = "missing"
CACHE_NAME = "shared-by-hosts"
SAMPLES, SAMPLE_BYTES = 64, 4096


def identity(config: EngineConfig, directory: Path) -> dict[str, str]:
    """Everything that must be the same on every host, by name: versions, options, the model's files."""
    knobs = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options = {option(name): str(value) for name, value in knobs.items() if name not in OWN_KNOBS}
    files = {f"the model's {path.name}": _fingerprint(path) for path in _model_files(config, directory)}
    if f"the model's {MANIFEST}" in files:
        files["the model's tensors"] = _fingerprint_of_all(directory / FOLDER)
    return code_identity() | {"the compile cache": _compile_cache(config)} | options | files


def code_identity(platforms: Iterable[str] = COMPILERS) -> dict[str, str]:
    """The versions and the source of what traces programs, and compiles them for these platforms, by name."""
    compilers = [name for platform in platforms for name in COMPILERS.get(platform, ())]
    versions = {name: _version(name) for name in (*PACKAGES, *compilers)}
    return {"jsg": jsg.__version__, "jsg's source": _source_digest()} | versions


def difference(leader: Mapping[str, str], follower: Mapping[str, str]) -> str | None:
    """The first difference between two hosts, for the follower's user; None where they agree."""
    for name in {**leader, **follower}:
        theirs, ours = leader.get(name, MISSING), follower.get(name, MISSING)
        if theirs != ours:
            return f"{name} must be the same on every host, but is {theirs} on the leader and {ours} on this one"
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def _source_digest() -> str:
    """A digest of the package's code, because two checkouts may have the same version."""
    root, digest = Path(jsg.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile_cache(config: EngineConfig) -> str:
    """The name in the directory of compiled programs, which hosts that share it have in common. The first one makes it.

    Raises:
        ConfigError: The directory has no name and cannot be written to.
    """
    directory = config.shared_cache_dir
    if directory is None:
        return "none"
    path = Path(directory) / CACHE_NAME
    try:
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=directory) as file, contextlib.suppress(FileExistsError):
                file.write(secrets.token_hex(8))
                file.flush()
                os.link(file.name, path)
        return f"that named {path.read_text()}"
    except OSError as error:
        raise ConfigError(
            f"--compilation-cache-dir must be a directory that can be written to, but gave: {error.strerror}; "
            "correct it, or leave it out on every host"
        ) from None


def _model_files(config: EngineConfig, directory: Path) -> Iterator[Path]:
    """The files that decide what is computed, without weights for `--load-format dummy`."""
    patterns = CONFIG_FILES if config.load_format == "dummy" else CONFIG_FILES + WEIGHT_FILES
    return (path for pattern in patterns for path in sorted(directory.glob(pattern)))


def _fingerprint_of_all(folder: Path) -> str:
    """One fingerprint of all small files of an orbax checkpoint, whose manifest has their lengths."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {_fingerprint(path)} ".encode())
    return digest.hexdigest()[:16]


def _fingerprint(path: Path) -> str:
    """A digest of the size and of the whole of a small file, or of samples of a large one, which is quick."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for index in range(SAMPLES):
                file.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
