"""Finds a model, and refuses one that cannot be served before its weights are downloaded. No JAX and no numpy."""

from collections.abc import Sequence
from pathlib import Path

from jsg.config import EngineConfig
from jsg.engine.embedder import read_embedder
from jsg.models.config import read_spec
from jsg.models.forms import weights_form
from jsg.sources import read_json, resolve_model


def find_model(config: EngineConfig) -> Path:
    """The directory of the model of `config`, downloaded if it is a hub name that is not in the hub's cache yet.

    Raises:
        ModelError: There is no such model, or it cannot be served. What is wrong with it is judged in this order: its
            architecture, how its numbers are stored, its other fields, and then the form of its weights.
        ConfigError: Its experts cannot be shared out over `--ep-size` groups.
    """

    def judge(directory: Path, files: Sequence[str]) -> None:
        needs_weights = config.load_format != "dummy"
        names_family = "config.json" in files and "architectures" in read_json(directory / "config.json")
        if needs_weights and not names_family:
            weights_form(files, config.load_format)  # a better reason than what config.json lacks
        model = read_spec(directory)
        if needs_weights:
            weights_form(files, config.load_format)
        read_embedder(directory, config.task, model.over_devices(config.tp_size, config.ep_size))

    return resolve_model(config.model_path, load_format=config.load_format, judge=judge)
