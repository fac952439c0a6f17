"""Typed, bounded access to the JSON files of a model directory. No JAX."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsg.errors import ModelError

MAX_JSON_BYTES = 16 * 2**20
MAX_INTEGER = 2**24
MAX_LIST = 1024
MAX_SHOWN = 80
"""The characters of a wrong value that an error message repeats."""
_NUMBER_KEY = "__float__"
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


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
