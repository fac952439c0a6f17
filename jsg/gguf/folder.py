"""Makes a model directory of GGUF files: their metadata as the usual files, and links to them.

So all that reads a model reads a directory. It is made once, in `~/.cache/jsg/gguf`, or for this process only where
that cannot be written to.
"""

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jsg.errors import ModelError

LINK = "gguf-weights"
"""The name of the link to the first file. The others have a number more."""
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CACHE = "~/.cache/jsg/gguf"


def find_gguf(files: Iterable[str]) -> str | None:
    """The GGUF file of a directory, the first if it is in several; None if it has none or other weights.

    Raises:
        ModelError: There are several to choose from.
    """
    names = sorted(files)
    if any(name.endswith(".safetensors") or name == "orbax.json" for name in names):
        return None
    found = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    firsts = [name for name in found if (match := _SHARD.fullmatch(name)) is None or int(match[2]) == 1]
    if len(firsts) > 1:
        raise ModelError(
            f"a directory of GGUF files must have one model, but has {', '.join(firsts)}; name the file in place of "
            "the directory"
        )
    return firsts[0] if firsts else found[0] if found else None


def as_directory(path: Path) -> Path:
    """The model directory of a GGUF file, or of all the files that it is in.

    Raises:
        ModelError: A file is missing, damaged, or of a kind that jsg does not read.
    """
    paths = [shard.resolve() for shard in _shards(path)]
    name = _key(paths)
    with contextlib.suppress(OSError):
        cache = _cache()
        if (made := cache / name / "config.json").is_file():
            return made.parent
    files = _files(paths)
    with contextlib.suppress(OSError):
        return _write(files, _cache(), name)
    temporary = Path(tempfile.mkdtemp(prefix="jsg-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return _write(files, temporary, name)


def _shards(path: Path) -> Sequence[Path]:
    match = _SHARD.fullmatch(path.name)
    count = int(match[3]) if match else 1
    names = [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)] if match else [path.name]
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise ModelError(
            f"a model of {count} GGUF files must have all of them, but {missing[0]} is missing; download it too"
        )
    return [path.parent / name for name in names]


def _key(paths: Sequence[Path]) -> str:
    """A name for what these files have now, and for what this version of jsg makes of it."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for path in paths:
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns} ".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _files(paths: Sequence[Path]) -> Mapping[str, bytes | Path]:
    """What is in the directory of a model: contents, and what links point to."""
    # Here, because these need numpy, and who asks a server needs none of it.
    from jsg.gguf.architectures import config_of, read_metadata
    from jsg.gguf.container import read_container
    from jsg.gguf.tokenizer import Vocabulary

    containers = [(path, read_container(path)) for path in paths]
    try:
        metadata, vocabulary = read_metadata(containers), Vocabulary(containers[0][1].metadata)
        config = config_of(metadata) | vocabulary.special_ids()
        files = {"config.json": json.dumps(config, indent=1).encode(), **vocabulary.files(metadata.architecture)}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise ModelError(
            f"the metadata of {paths[0].name} must have values of the usual types, but one is another "
            f"({type(error).__name__}); download it again"
        ) from None
    links = {LINK + f"-{index:05}" * (index > 0): path for index, path in enumerate(paths)}
    return {**files, **links}


def _cache() -> Path:
    """The owner's directory. Raises OSError if there can be none."""
    path = Path(os.path.expanduser(_CACHE))
    for each in (path.parent.parent, path.parent, path):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if not path.is_absolute() or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError("others may write there")
    return path


def _write(files: Mapping[str, bytes | Path], root: Path, name: str) -> Path:
    """Makes a directory, whole or not at all, and removes those whose files are gone. Raises OSError."""
    for old in root.iterdir():
        if any(link.is_symlink() and not link.exists() for link in old.glob(f"{LINK}*")):
            shutil.rmtree(old, ignore_errors=True)
    new = Path(tempfile.mkdtemp(dir=root))
    try:
        for file, content in files.items():
            if isinstance(content, bytes):
                (new / file).write_bytes(content)
            else:
                (new / file).symlink_to(content)
        with contextlib.suppress(FileExistsError, OSError):  # another process was faster
            new.rename(root / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return root / name
