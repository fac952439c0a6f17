"""Collects the rules of a grammar while it is made."""

from collections import deque
from collections.abc import Callable, Hashable

from jsg.constrained.ir import Call, Expr, Library, rules_reached
from jsg.errors import GrammarError


class RuleBook:
    """The rules of a grammar by name. A rule that is asked for twice is made once.

    `finish` makes the rules one after another. So nested schemas do not become nested Python calls, and a schema may
    contain itself.
    """

    def __init__(self, library: Library | None = None) -> None:
        """Makes a book without rules. Those that the library has are taken from there."""
        self._library = library
        self._taken: dict[str, None] = {}
        self._calls: dict[Hashable, Call] = {}
        self._names: dict[str, int] = dict.fromkeys(library.rules, 1) if library else {}
        self._waiting: deque[tuple[str, Callable[[], Expr]]] = deque()

    def call(self, key: Hashable, name: str, make: Callable[[], Expr]) -> Call:
        """A call of the rule for `key`. If there is no such rule yet, `finish` will make it with `make`.

        Args:
            key: What the rule is for.
            name: The rule's name in messages, such as "string of #/properties/a". A number is added if another rule
                has this name.
            make: Gives the rule's expression. It may ask for other rules.
        """
        call = self._calls.get(key)
        if call is None and self._library is not None and key in self._library.calls:
            call = self._calls[key] = self._library.calls[key]
            self._taken |= dict.fromkeys(self._library.reached[call.rule])
        if call is None:
            unused = name
            while unused in self._names:
                self._names[name] += 1
                unused = f"{name} ({self._names[name]})"
            self._names[unused] = 1
            call = self._calls[key] = Call(unused)
            self._waiting.append((call.rule, make))
        return call

    def finish(self) -> dict[str, Expr]:
        """Makes all rules that were asked for, and returns them by name, with those that they call.

        Raises:
            GrammarError: A rule cannot be made. The message names it.
        """
        rules: dict[str, Expr] = {}
        while self._waiting:
            name, make = self._waiting.popleft()
            try:
                rules[name] = make()
            except GrammarError as error:
                raise GrammarError(f"{error} (in {name})") from error
        return rules if self._library is None else rules | {name: self._library.rules[name] for name in self._taken}

    def library(self) -> Library:
        """The rules of this book as a library for others."""
        rules = self.finish()
        return Library(self._calls, rules, {name: rules_reached(rules, name) for name in rules})
