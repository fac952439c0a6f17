"""Fields of the `config.json` of published models, and what must come of them: the table in `data/published.json`.

The fields are remembered and were not seen in the files, and so is the number of parameters, which model cards state
exactly or in billions. Factors of longrope but those of Phi-4-mini are made up, as many as there are. For each
architecture the table has the model type, the fields that its files have in common, and each file: the numbers of
`SHAPE` and the other fields. A file may differ from what is common. `{"repeated": [1, 2], "times": 2}` is [1, 2, 1, 2].
"""

import dataclasses
import json
import pathlib
from typing import Any

from jsg.window import Window

TABLE = pathlib.Path(__file__).parent / "data" / "published.json"
SHAPE = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
IN_MOST = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model.

    Attributes:
        file: The fields of its `config.json`.
        parameters: How many it has; an integer if that is known exactly.
        heads: Query heads, heads of keys and values, and width, of all kinds of layers, if they differ.
        kv_heads: Heads of keys and values that are kept, which latent attention makes one of.
        head_dim: Their width.
        windows: Those of its layers; None for a layer that sees all tokens.
        experts: How many a layer has, and how many of them a token uses; None for a dense model.
        inside: The architecture around this one in the published file; empty if there is none.
    """

    file: dict[str, Any]
    parameters: float
    heads: frozenset[tuple[int, int, int]] = frozenset()
    kv_heads: int
    head_dim: int = 128
    windows: frozenset[Window | None] = frozenset({None})
    experts: tuple[int, int] | None = None
    inside: str = ""


def _whole(value: Any) -> Any:
    """The value without the short form of lists."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"repeated", "times"}:
        return value["repeated"] * value["times"]
    return {name: _whole(of) for name, of in value.items()}


def _window(of: int | list[Any] | None) -> Window | None:
    """One of this length, or of the fields in a list."""
    return Window(*of) if isinstance(of, list) else of and Window(of)


def _read() -> dict[str, Published]:
    made: dict[str, Published] = {}
    for architecture, family in json.loads(TABLE.read_text()).items():
        for name, row in family["files"].items():
            assert name not in made, name
            file = {"architectures": [architecture], "model_type": family["model_type"], **IN_MOST}
            file |= dict(zip(SHAPE, row.pop("shape"), strict=True)) | family.get("common", {}) | row.pop("fields", {})
            row = {"kv_heads": file["num_key_value_heads"], **row}
            if "billions" in row:
                row["parameters"] = row.pop("billions") * 1e9
            if "windows" in row:
                row["windows"] = frozenset(_window(of) for of in row["windows"])
            if "heads" in row:
                row["heads"] = frozenset(map(tuple, row["heads"]))
            if "experts" in row:
                row["experts"] = tuple(row["experts"])
            made[name] = Published(file=_whole(file), **row)
    return made


PUBLISHED = _read()
"""By name."""
