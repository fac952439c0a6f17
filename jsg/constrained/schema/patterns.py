"""What is known about the patterns of a schema without a text: which strings they find, which exclude each other."""

from jsg.constrained.chardfa import CharDfa
from jsg.constrained.limits import Limits
from jsg.constrained.regex.parse import parse_regex
from jsg.errors import GrammarError


class Patterns:
    """The patterns of one document. An automaton is made when it is first asked for."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._automata: dict[tuple[str, bool], CharDfa] = {}

    def check(self, pattern: str, where: str) -> None:
        """Raises GrammarError, naming `where`, unless the pattern is one that is supported."""
        try:
            parse_regex(pattern, search=True, limits=self._limits)
        except GrammarError as error:
            raise GrammarError(f"{where}: {error}") from None

    def is_found(self, pattern: str, text: str) -> bool:
        """Whether the pattern is found somewhere in the text."""
        return self.automaton(pattern).accepts(text)

    def automaton(self, pattern: str, is_found: bool = True) -> CharDfa:
        """The texts in which the pattern is found, or in which it is not."""
        key = (pattern, is_found)
        if key not in self._automata:
            if is_found:
                made = CharDfa.of(parse_regex(pattern, search=True, limits=self._limits), self._limits)
            else:
                made = self.automaton(pattern).complement()
            self._automata[key] = made
        return self._automata[key]

    def both(self, left: CharDfa | None, right: CharDfa) -> CharDfa | None:
        """The texts that both take (None stands for every text); None where there are none."""
        result = right if left is None else left.intersect(right)
        return None if result.is_empty() else result
