"""Finds the directory of a model by its name. The client of the hub is imported only when a name needs it."""

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jsg.errors import ModelError

logger = logging.getLogger(__name__)

# A model directory is data: weights, JSON, templates and vocabularies. Never pickles, never code.
_WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt", "orbax/*"]
# Some repositories have second copies of the weights in other layouts, beside the files that jsg reads.
_UNWANTED_FILES = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth"]
# For each kind of weights, the files of the other kind, which are not downloaded if a repository has both.
_INDEX, _MANIFEST = "model.safetensors.index.json", "orbax.json"
_OTHER_KIND = {"safetensors": [_MANIFEST, "orbax/*"], "orbax": ["*.safetensors", _INDEX]}
_ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny-vision")}
"""The directories of the models inside the package, by name."""


def resolve_model(name: str, *, revision: str | None = None, load_format: str = "auto") -> Path:
    """The local directory of a model. Downloads the model if its hub name is not in the hub's cache yet.

    Args:
        name: "tiny" or "tiny-vision" (the models inside the package), a directory, or a hub name such as "owner/model".
        revision: A branch, tag or commit of the hub repository; None is its default branch. A cached branch is not
            updated, so name a commit to be sure of a version.
        load_format: `safetensors` or `orbax` asks for weights of that kind; any other value takes what is there.

    Raises:
        ModelError: There is no directory of that name, and the hub does not give one.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name and Path(name).is_dir():
        return Path(name)
    try:
        cached = _snapshot(name, revision, load_format, from_cache=True)
    except ModelError:
        cached = None
    if cached is not None and _has_all_weights(cached, load_format):
        return cached
    return _snapshot(name, revision, load_format, from_cache=False)


def _snapshot(name: str, revision: str | None, load_format: str, *, from_cache: bool) -> Path:
    """The snapshot directory of a hub repository. Raises ModelError if the cache or the hub does not have it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the client reads it while it is imported
    import httpx
    from huggingface_hub import constants, snapshot_download

    if not (from_cache or constants.HF_HUB_OFFLINE):
        logger.warning("%s is not in the hub's cache, so the hub is asked for it; HF_HUB_OFFLINE=1 forbids that", name)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED_FILES,
                ignore_patterns=_UNWANTED_FILES + _OTHER_KIND.get(load_format, []),
                local_files_only=from_cache,
            )
        )
    # The client raises a ValueError for an impossible name, and a RuntimeError inside its transfer library. Their texts
    # have paths and addresses, so the message names the kind only.
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        kind = type(error).__name__
    at_revision = f" at revision {revision!r}" if revision else ""
    embedded = ", ".join(map(repr, EMBEDDED))
    raise ModelError(
        f"the model {name!r}{at_revision} must be {embedded}, an existing directory or a hub name, but it is not a "
        f"directory, the hub cache does not have all of it, and the hub did not give it ({kind}); check the spelling, "
        "the network (and that offline mode is off), the space on disk, and for gated models that you are logged in"
    )


def _has_all_weights(directory: Path, load_format: str) -> bool:
    """Whether a cached snapshot is whole. After an interrupted download some of the listed files are missing."""
    kinds = {"safetensors": _has_all_safetensors, "orbax": _has_all_orbax}
    if load_format in kinds:
        return kinds[load_format](directory)
    return any(has_all(directory) for has_all in kinds.values())


def _has_all_safetensors(directory: Path) -> bool:
    if not (directory / _INDEX).is_file():
        return any(directory.glob("*.safetensors"))
    return _has_listed(directory / _INDEX, "weight_map", lambda files: files.values(), directory)


def _has_all_orbax(directory: Path) -> bool:
    return _has_listed(directory / _MANIFEST, "files", lambda files: files.keys(), directory / "orbax")


def _has_listed(file: Path, field: str, names: Callable[[dict[str, Any]], Iterable[str]], folder: Path) -> bool:
    """Whether a folder has all files that an object in a JSON file names."""
    try:
        listed = set(names(json.loads(file.read_text(encoding="utf-8"))[field]))
        return bool(listed) and all((folder / path).is_file() for path in listed)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
