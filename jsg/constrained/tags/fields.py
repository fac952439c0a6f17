"""Reads the JSON objects of a structural tag member by member, and refuses what is missing, wrong or unknown."""

from collections.abc import Sequence
from typing import Any, final

from jsg.errors import GrammarError

PARAM = "structural_tag"
_MAX_COUNT = 2**31 - 1
_MISSING = object()


@final
class Fields:
    """The members of one object. `end` refuses those that nobody has asked for, so that none is ignored.

    Attributes:
        path: The way from the grammar to the object, as messages show it.
    """

    def __init__(self, members: dict[str, Any], path: str):
        self.path = path
        self._members = members
        self._unread = set(members)

    @classmethod
    def read(cls, value: Any, path: str) -> "Fields":
        """The members of a value that must be an object."""
        if not isinstance(value, dict):
            raise GrammarError(f"{path} must be an object, but is {_shown(value)}; correct it", PARAM)
        return cls(value, path)

    def refusal(self, rule: str, received: str, remedy: str) -> GrammarError:
        """The error for a rule that does not hold here."""
        return GrammarError(f"{self.path}: {rule}, but got {received}; {remedy}", PARAM)

    def end(self) -> None:
        """Refuses members that were not asked for."""
        for name in sorted(self._unread):
            known = ", ".join(sorted(set(self._members) - self._unread)) or "none"
            raise self.refusal(
                f"it takes no member {name[:60]!r} here (of those it has it takes {known})",
                _shown(self._members[name]),
                "leave it out",
            )

    def has(self, name: str) -> bool:
        """Whether there is a member of that name, other than null."""
        return self._members.get(name) is not None

    def value(self, name: str, default: Any = _MISSING) -> Any:
        """The member's value as it is; refuses a missing one without a default."""
        self._unread.discard(name)
        value = self._members.get(name, default)
        if value is _MISSING:
            raise self.refusal(f"it must have a member {name!r}", "none", "add it")
        return value

    def string(self, name: str, *, not_empty: bool = False) -> str:
        """A member that must be text."""
        value = self.value(name)
        if not isinstance(value, str) or (not_empty and not value):
            raise self._wrong(name, "text that is not empty" if not_empty else "text", value)
        return self.checked(name, value)

    def list(self, name: str) -> list[Any]:
        """A member that must be a list of one or more values."""
        value = self.value(name)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, "a list that is not empty", value)
        return value

    def strings(self, name: str, default: Sequence[str] | None = None) -> Sequence[str]:
        """A member that must be a list of texts, none empty; at least one where there is no default."""
        value = self.value(name, _MISSING if default is None else default)
        if default is not None and (value is None or not value):
            return default
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise self._wrong(name, "a list of texts, none empty", value)
        return [self.checked(name, each) for each in value]

    def object(self, name: str) -> "Fields":
        """A member that must be an object."""
        return Fields.read(self.value(name), f"{self.path}.{name}")

    def objects(self, name: str) -> "list[Fields]":
        """A member that must be a list of one or more objects."""
        return [Fields.read(each, f"{self.path}.{name}[{i}]") for i, each in enumerate(self.list(name))]

    def pairs(self, name: str) -> "list[tuple[str, Fields]]":
        """A member that must be a list of pairs (text, object)."""
        result: list[tuple[str, Fields]] = []
        for i, each in enumerate(self.list(name)):
            if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or not each[0]:
                raise self._wrong(name, "a list of pairs of a text and a format", each)
            result.append((self.checked(name, each[0]), Fields.read(each[1], f"{self.path}.{name}[{i}][1]")))
        return result

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A member that must be true or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(self, name: str) -> int:
        """A member that must be an integer of 31 bits."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_COUNT:
            raise self._wrong(name, "an integer below 2^31", value)
        return value

    def count(self, name: str) -> int | None:
        """A member that must be an integer from 0, or null or missing: None."""
        if self.value(name, None) is None:
            return None
        value = self.number(name)
        if value < 0:
            raise self._wrong(name, "an integer from 0", value)
        return value

    def choice(self, name: str, values: Sequence[str]) -> str:
        """A member that must be one of these texts; the first where it is missing."""
        value = self.value(name, values[0])
        if not isinstance(value, str) or value not in values:
            raise self._wrong(name, f"one of {', '.join(values)}", value)
        return value

    def expect_type(self, kind: str) -> None:
        """Refuses another `type` than this."""
        value = self.value("type")
        if value != kind:
            raise self._wrong("type", repr(kind), value)

    def expect_only(self, name: str, allowed: Any, reason: str) -> None:
        """Refuses a member other than the one value that is supported; it may be missing."""
        value = self.value(name, allowed)
        if value != allowed:
            raise self.refusal(f"{name} is supported as {_shown(allowed)} only ({reason})", _shown(value), "change it")

    def checked(self, name: str, text: str) -> str:
        """The text; refuses lone surrogates, which JSON can write but UTF-8 cannot."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._wrong(name, "Unicode text without lone surrogates", text) from None
        return text

    def _wrong(self, name: str, rule: str, value: Any) -> GrammarError:
        return self.refusal(f"{name} must be {rule}", _shown(value), "correct it")


def _shown(value: Any) -> str:
    """A JSON value as a message may hold it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:60] + "...")
    return "a number"
