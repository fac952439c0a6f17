"""A model name → the directory that holds it. Host side; the hub's client is imported only when a name needs it."""

import json
from pathlib import Path

from jsg.errors import ModelError

# A model directory is data: weights in safetensors, JSON, templates and vocabularies. Never pickles, never code.
_WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
# Second copies of the weights in other layouts, which some repositories carry beside the ones we read.
_UNWANTED_FILES = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth"]
_ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny-vision")}
"""The models inside the package, by name; the second takes pictures."""


def resolve_model(name: str, *, revision: str | None = None) -> Path:
    """The local directory of a model; downloads it when it is a hub name that is not in the hub's cache yet.

    Args:
        name: "tiny" or "tiny-vision" (the models inside the package), a directory, or a hub name such as "owner/model".
        revision: A branch, tag or commit of the hub repository; None is its default branch. What the cache holds
            of a branch is used as it is: name a commit to be sure of a version.

    Raises:
        ModelError: Nothing of that name is here and the hub cannot give it.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name and Path(name).is_dir():
        return Path(name)
    try:
        cached = _snapshot(name, revision, from_cache=True)
    except ModelError:
        cached = None
    if cached is not None and _has_all_weights(cached):
        return cached
    return _snapshot(name, revision, from_cache=False)


def _snapshot(name: str, revision: str | None, *, from_cache: bool) -> Path:
    """The snapshot directory of a hub repository; raises ModelError when the cache or the hub does not give it."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED_FILES,
                ignore_patterns=_UNWANTED_FILES,
                local_files_only=from_cache,
            )
        )
    # What the client raises: a ValueError for a name that cannot be one, a RuntimeError inside its transfer library.
    # Their texts carry paths and addresses, so only the kind is told.
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        kind = type(error).__name__
    at_revision = f" at revision {revision!r}" if revision else ""
    embedded = ", ".join(map(repr, EMBEDDED))
    raise ModelError(
        f"the model {name!r}{at_revision} must be {embedded}, an existing directory or a hub name, but it is not a "
        f"directory, the hub cache does not have all of it, and the hub did not give it ({kind}); check the spelling, "
        "the network (and that offline mode is off), the space on disk, and for gated models that you are logged in"
    )


def _has_all_weights(directory: Path) -> bool:
    """Whether a cached snapshot is whole: an interrupted download leaves its index but not all of its shards."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return any(directory.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((directory / shard).is_file() for shard in shards)
