"""Whether and how a model embeds, read from the files that sentence-transformers writes beside it. No JAX."""

import json
from pathlib import Path
from typing import Any

from jsg.errors import ModelError
from jsg.models.spec import ModelSpec
from jsg.sources import MAX_JSON_BYTES, MAX_LIST, Fields, read_json
from jsg.types import Embedder

MODULES = "modules.json"
POOLING_PREFIX = "pooling_mode_"
TODO = "serve it with another server, or as a model that generates (--task generate)"


def read_embedder(directory: Path, task: str, model: ModelSpec) -> Embedder | None:
    """How a model of this directory embeds; None if it generates text.

    A directory of sentence-transformers names its modules: the transformer, the pooling, which must take the last
    token, and a norm, which may be absent. Vectors of such a model may be cut to any length, unless `config.json` names
    the lengths or says that there are none.

    Raises:
        ModelError: The directory is one of another kind of embedding model, or it is damaged.
    """
    has_modules = (directory / MODULES).is_file()
    if task == "generate" or not (has_modules or task == "embed"):
        return None
    if model.vision is not None:
        raise ModelError(f"a model that embeds must be one of text only, but {model.architecture} sees; {TODO}")
    config = Fields("config.json", read_json(directory / "config.json"))
    if lengths := config.get("matryoshka_dimensions"):
        is_list = isinstance(lengths, list) and len(lengths) <= MAX_LIST
        if not is_list or not all(type(each) is int and 1 <= each <= model.hidden_size for each in lengths):
            raise ModelError(f"matryoshka_dimensions must list lengths from 1 to {model.hidden_size}; correct it")
    can_cut = config.flag("is_matryoshka", default=has_modules)
    return Embedder(
        width=model.hidden_size,
        is_normed=_read_modules(directory) if has_modules else True,
        dimensions=tuple(sorted(lengths)) if lengths else None if can_cut else (),
    )


def _read_modules(directory: Path) -> bool:
    """Whether the vectors of a directory of sentence-transformers are normed, once its modules are checked."""
    modules = _module_list(directory / MODULES)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(f"{MODULES} must name Transformer, Pooling and perhaps Normalize, but names {kinds}; {TODO}")
    folder = str(modules[1].get("path"))
    if Path(folder).name != folder:
        raise ModelError(f"{MODULES} must name a folder beside itself, but names {folder[:100]!r}; download it again")
    pooling = read_json(directory / folder / "config.json")
    modes = [name.removeprefix(POOLING_PREFIX) for name in pooling if name.startswith(POOLING_PREFIX) and pooling[name]]
    if (modes or [pooling.get("pooling_mode")]) != ["lasttoken"]:
        raise ModelError(f"the pooling of a model that embeds must be lasttoken, but is {modes or pooling}; {TODO}")
    return kinds[-1] == "Normalize"


def _module_list(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{MODULES} must be readable JSON ({type(error).__name__}); download it again") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{MODULES} must hold a list of objects, but does not; download it again")
    return modules
