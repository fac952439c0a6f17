"""The files of a model: finds their directory by its name, and reads their JSON with types and bounds. No JAX.

The client of the hub is imported only when a name needs it.
"""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from jsg.errors import ModelError
from jsg.gguf.folder import as_directory, find_gguf

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 16 * 2**20
MAX_INTEGER = 2**24
MAX_LIST = 1024
MAX_SHOWN = 80
"""The characters of a wrong value that an error message repeats."""
_NUMBER_KEY = "__float__"
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

# A model directory is data: weights, JSON, templates and vocabularies. Never pickles, never code.
_WEIGHTS = ["*.safetensors", "orbax/*"]
_WANTED_FILES = [*_WEIGHTS, "*.json", "tokenizer.model", "*.jinja", "*.txt"]
# Some repositories have second copies of the weights in other layouts, beside the files that jsg reads.
_UNWANTED_FILES = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth"]
# For each kind of weights, the files of the other kind, which are not downloaded if a repository has both.
_INDEX, _MANIFEST = "model.safetensors.index.json", "orbax.json"
_LARGE_JSON = (_INDEX, _MANIFEST, "tokenizer.json", "vocab.json")
_OTHER_KIND = {
    "safetensors": [_MANIFEST, "orbax/*"],
    "orbax": ["*.safetensors", _INDEX],
    "dummy": [*_WEIGHTS, _MANIFEST, _INDEX],
    "index": _WEIGHTS,
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {name: _ASSETS / name for name in ("tiny", "tiny-vision")}
"""The directories of the models inside the package, by name."""

_OF_THIS_MACHINE = tuple(
    getattr(errno, name) for name in ("EACCES", "EDQUOT", "ENOENT", "ENOSPC", "ENOTDIR", "EPERM", "EROFS")
)
"""Errors of files. What the network or the hub gives has other numbers or none."""

Judge = Callable[[Path, Sequence[str]], object]
"""Raises ModelError if a model cannot be used. Gets a directory with its small files and the names of all its files."""


def resolve_model(
    name: str, *, revision: str | None = None, load_format: str = "auto", judge: Judge = lambda *_: None
) -> Path:
    """The local directory of a model. Downloads the model if its hub name is not in the hub's cache yet.

    Args:
        name: "tiny" or "tiny-vision" (the models inside the package), a directory, or a hub name such as "owner/model".
        revision: A branch, tag or commit of the hub repository; None is its default branch. A cached branch is not
            updated, so name a commit to be sure of a version.
        load_format: `safetensors` or `orbax` asks for weights of that kind, `dummy` for none, and `index` for none but
            for the index that names them; any other value takes what is there.
        judge: Called for a directory, and for a hub name as soon as its `config.json` is here, before the rest comes.

    Raises:
        ModelError: There is no directory of that name, and the hub does not give one; or the judge refuses it.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    local = Path(os.path.expanduser(name))
    if name and load_format not in ("safetensors", "orbax"):
        local = _of_gguf(local)
    if name and local.is_dir():
        judge(local, _files_in(local))
        return local
    if local.is_file():
        if not (local.parent / "config.json").is_file():  # a GGUF, for example, has a better reason
            judge(local.parent, [local.name])
        raise ModelError(f"the model must be a directory, but {local.name!r} is a file; serve its directory")
    if not _HUB_NAME.fullmatch(name):
        _refuse(name, "is none of these; correct the path, or write a hub name as owner/model")
    try:
        cached = _snapshot(name, revision, load_format, from_cache=True)
    except ModelError:
        cached = None
    if cached is not None and _has_all_weights(cached, load_format):
        judge(cached, _files_in(cached))
        return cached
    return _snapshot(name, revision, load_format, from_cache=False, judge=judge)


def find_tokenizer(name: str | None, model: Path) -> Path:
    """The directory of the tokenizer of that name, without weights; that of the model if there is no name."""
    return model if name is None else resolve_model(name, load_format="dummy")


def _of_gguf(path: Path) -> Path:
    """The model directory of a GGUF file, or of the one in a directory without other weights; any other path."""
    if path.is_dir():
        file = find_gguf(_files_in(path))
        return path if file is None else as_directory(path / file)
    return as_directory(path) if path.suffix == ".gguf" and path.is_file() else path


def _files_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise ModelError(
            f"a model directory must be readable, but this one is not ({type(error).__name__}); check its permissions"
        ) from None


def _refuse(name: str, problem: str) -> Never:
    embedded = ", ".join(map(repr, EMBEDDED))
    raise ModelError(f"the model must be {embedded}, an existing directory or a hub name, but {name!r} {problem}")


def _snapshot(
    name: str, revision: str | None, load_format: str, *, from_cache: bool, judge: Judge = lambda *_: None
) -> Path:
    """The snapshot directory of a hub repository. Raises ModelError if the cache or the hub does not have it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the client reads it while it is imported
    import httpx
    from huggingface_hub import HfApi, constants, snapshot_download

    def fetch(wanted: list[str]) -> Path:
        unwanted = _UNWANTED_FILES + _OTHER_KIND.get(load_format, [])
        options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": unwanted}
        return Path(snapshot_download(name, revision=revision, local_files_only=from_cache, **options))

    if not (from_cache or constants.HF_HUB_OFFLINE):
        logger.warning("%s is not in the hub's cache, so the hub is asked for it; HF_HUB_OFFLINE=1 forbids that", name)
    try:
        if not from_cache:
            files = HfApi().list_repo_files(name, revision=revision)
            judge(fetch([file for file in files if _is_small(file)]), files)
        return fetch(_WANTED_FILES)
    # The client raises a ValueError for an impossible name, and a RuntimeError inside its transfer library. Their texts
    # have paths and addresses, so the message names the kind only.
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        kind, unusable = type(error).__name__, _unusable(error, constants.HF_HUB_CACHE)
    if unusable is not None and not from_cache:
        raise ModelError(
            f"a model of the hub needs a cache that can be written to, but {unusable}; set HF_HOME to a directory that "
            "is yours and has room, or give the path of a model directory"
        )
    _refuse(
        name,
        f"{f'at revision {revision!r} ' if revision else ''}is no directory, the hub cache does not have all of it, "
        f"and the hub did not give it ({kind}); check the spelling, the network (and that offline mode is off), the "
        "space on disk, and for gated models that you are logged in",
    )


def _unusable(error: Exception, cache: str) -> str | None:
    """Why the hub's cache cannot be used, with its path, where this is what the error is about."""
    if cache.startswith("~"):  # no variable and no entry of /etc/passwd names a home
        return "this user has no home directory"
    if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
        return f"{error.filename or cache} gave: {error.strerror}"
    return None


def _is_small(file: str) -> bool:
    """Whether a file of a repository is fetched before the repository is judged."""
    return file.endswith(".json") and file.count("/") < 2 and not file.endswith(_LARGE_JSON)


def _has_all_weights(directory: Path, load_format: str) -> bool:
    """Whether a cached snapshot is whole. After an interrupted download some of the listed files are missing."""
    kinds = {"safetensors": _has_all_safetensors, "orbax": _has_all_orbax}
    if load_format == "index":
        return (directory / "config.json").is_file()
    if load_format == "dummy":
        return any(directory.glob("tokenizer*"))
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


# The JSON files of a model directory.


class FieldError(ModelError):
    """A field of a JSON file that is refused.

    Attributes:
        file: The name of its file, and those of the objects that it is in, each after a colon.
        name: Its name.
    """

    def __init__(self, message: str, file: str, name: str):
        super().__init__(message)
        self.file, self.name = file, name


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. What transformers writes for an infinite number is that number.

    Raises:
        ModelError: There is no such file, it is larger than `MAX_JSON_BYTES`, or it is no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path.name} must have at most {MAX_JSON_BYTES} bytes; is it the right file?")
        value = json.loads(path.read_bytes(), object_hook=_number_or_object)
    except FileNotFoundError:
        raise ModelError(f"a model must have {path.name}, but this one has none; take all of its files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} must be readable JSON ({type(error).__name__}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def _number_or_object(value: dict[str, Any]) -> Any:
    """A number that JSON has not, of the object that transformers 5 writes for it."""
    name = value.get(_NUMBER_KEY) if len(value) == 1 else None
    return _NUMBERS.get(name, value) if isinstance(name, str) else value


class Fields:
    """One JSON object. A null counts as absent. Getters raise FieldError, which names file, field, rule and value.

    Attributes:
        file: The name of its file, and the name of the field if the object is nested, for messages.
        notes: What is said about the file, a sentence each. Objects that are made of others have the notes of these.
    """

    def __init__(self, file: str, values: Mapping[str, Any], notes: list[str] | None = None):
        self.file = file
        self.notes = [] if notes is None else notes
        self._values = values

    def names(self) -> set[str]:
        """The fields that are present."""
        return {name for name, value in self._values.items() if value is not None}

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, unchecked."""
        value = self._values.get(name)
        return default if value is None else value

    def over(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same object with `defaults` for fields that it lacks. A null is no lack: it takes the default away."""
        return Fields(self.file, {**defaults, **self._values}, self.notes)

    def under(self, values: Mapping[str, Any]) -> "Fields":
        """The same object, in which `values` replace its own."""
        return Fields(self.file, {**self._values, **values}, self.notes)

    def require(self, ok: bool, name: str, rule: str, value: object) -> None:
        """Raises unless `ok`. The message says that the field must `rule`, and which value it has."""
        if not ok:
            shown = "absent or null" if value is None else repr(value)
            shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
            raise FieldError(f"{self.file}: {name} must {rule}, but is {shown}", self.file, name)

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None."""
        value = self.get(name)
        self.require(value is None or isinstance(value, dict), name, "be an object", value)
        return None if value is None else Fields(f"{self.file}: {name}", value, self.notes)

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        """An integer in [low, high]. Without a default the field is required."""
        value = self.get(name, default)
        self.require(type(value) is int and low <= value <= high, name, f"be an integer in [{low}, {high}]", value)
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """A number in (low, high]. Without a default the field is required."""
        value = self.get(name, default)
        self.require(type(value) in (int, float) and low < value <= high, name, f"be in ({low}, {high}]", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        self.require(isinstance(value, bool), name, "be true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.get(name, default)
        self.require(isinstance(value, str), name, "be a string", value)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """No token id, one, or a list of them."""
        value = self.get(name, [])
        ids = tuple(value) if isinstance(value, list) else (value,)
        ok = len(ids) <= MAX_LIST and all(type(token) is int and 0 <= token < MAX_INTEGER for token in ids)
        self.require(ok, name, "be a token id or a list of token ids", value)
        return ids
