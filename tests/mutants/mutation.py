"""One break of the core of a package, which fast tests should find."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """One break.

    Attributes:
        name: The package and what is broken.
        path: The file.
        old: A text that stands in it once.
        new: What stands there instead.
        tests: Fast tests that should find it, as arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """The file with the break."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must stand once in {self.path}"
        return text.replace(self.old, self.new)
