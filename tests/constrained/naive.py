"""A slow and obvious reader of grammars, straight from their expressions. The automaton is tested against it."""

import itertools
from collections.abc import Iterator

from jsg.constrained import ir


class NaiveGrammar:
    """Tells of a text whether it matches a grammar, and whether it can be completed to one that does."""

    def __init__(self, grammar: ir.Grammar):
        self.rules = grammar.rules
        self.start = grammar.start
        self.alive = self._alive_rules()

    def matches(self, text: bytes) -> bool:
        return len(text) in Reading(self, text).ends(self.rules[self.start], 0)

    def is_viable(self, text: bytes) -> bool:
        return Reading(self, text).is_viable(self.rules[self.start], 0)

    def next_bytes(self, text: bytes, alphabet: bytes) -> set[int]:
        return {byte for byte in alphabet if self.is_viable(text + bytes([byte]))}

    def forced_run(self, text: bytes, alphabet: bytes, longest: int) -> bytes:
        """The forced bytes after the text, up to a number: nothing else may come, and the text may not end."""
        run = b""
        while len(run) < longest and not self.matches(text + run):
            following = self.next_bytes(text + run, alphabet)
            if len(following) != 1:
                break
            run += bytes(following)
        return run

    def _alive_rules(self) -> set[str]:
        self.alive = set()
        while True:
            more = {name for name, expr in self.rules.items() if self.is_alive(expr)}
            if more == self.alive:
                return more
            self.alive = more

    def is_alive(self, expr: ir.Expr) -> bool:
        """It matches some text."""
        match expr:
            case ir.Literal():
                return True
            case ir.ByteSet(ranges):
                return bool(ranges)
            case ir.Words(words):
                return bool(words)
            case ir.Seq(parts):
                return all(map(self.is_alive, parts))
            case ir.Alt(options):
                return any(map(self.is_alive, options))
            case ir.Repeat(item, low, high, separator):
                if high is not None and low > high:
                    return False
                return low == 0 or (self.is_alive(item) and (low == 1 or self.is_alive(separator)))
            case ir.Bag():
                return self.can_complete(expr, 0, 0, must_go_on=False)
            case ir.Automaton():
                return 0 in self.live_states(expr)
            case ir.Call(rule):
                return rule in self.alive
        raise AssertionError(expr)

    def live_states(self, automaton: ir.Automaton) -> set[int]:
        live = set(automaton.accepting)
        for _ in automaton.edges:
            for state, out in enumerate(automaton.edges):
                if any(target in live and self.is_alive(label) for label, target in out):
                    live.add(state)
            live.update(state for state, target in automaton.skips if target in live)
        return live

    def can_complete(self, bag: ir.Bag, count: int, mask: int, must_go_on: bool) -> bool:
        """A bag that holds these items already can be completed; with `must_go_on`, by one item at least."""
        limit = bag.max if bag.max is not None else max(bag.min, len(bag.items)) + count + 1
        todo, seen = [(count, mask, must_go_on)], set()
        while todo:
            count, mask, must = todo.pop()
            if count > limit or (count, mask, must) in seen:
                continue
            seen.add((count, mask, must))
            if not must and bag.min <= count <= limit and all_required(bag, mask):
                return True
            if count == 0 or self.is_alive(bag.separator):
                todo += [(count + 1, after, False) for item, after in choices(bag, mask) if self.is_alive(item)]
        return False


class Reading:
    """One text. Both questions are asked of an expression and the place where it begins."""

    def __init__(self, grammar: NaiveGrammar, text: bytes):
        self.grammar = grammar
        self.text = text
        self.known: dict[tuple[bool, str, int], object] = {}

    def ends(self, expr: ir.Expr, at: int) -> set[int]:
        """Where the expression can end."""
        text = self.text
        match expr:
            case ir.Literal(value):
                return {at + len(value)} if text[at : at + len(value)] == value else set()
            case ir.ByteSet(ranges):
                return {at + 1} if at < len(text) and any(a <= text[at] <= b for a, b in ranges) else set()
            case ir.Words(words):
                return {at + len(word) for word in words if text[at : at + len(word)] == word}
            case ir.Seq(parts):
                found = {at}
                for part in parts:
                    found = set().union(*[self.ends(part, place) for place in found])
                return found
            case ir.Alt(options):
                return set().union(*[self.ends(option, at) for option in options])
            case ir.Repeat(_, low, high, _):
                places = self.repeat_places(expr, at)
                return {p for n, p, after in places if after and n >= low and (high is None or n <= high)}
            case ir.Bag():
                return {
                    place
                    for count, mask, place, after in self.bag_places(expr, at)
                    if after
                    and count >= expr.min
                    and (expr.max is None or count <= expr.max)
                    and all_required(expr, mask)
                }
            case ir.Automaton():
                return {place for state, place in self.automaton_places(expr, at) if state in expr.accepting}
            case ir.Call(rule):
                key = (False, rule, at)
                if key not in self.known:
                    self.known[key] = self.ends(self.grammar.rules[rule], at)
                return self.known[key]
        raise AssertionError(expr)

    def is_viable(self, expr: ir.Expr, at: int) -> bool:
        """The rest of the text begins something that the expression matches."""
        rest, grammar = self.text[at:], self.grammar
        match expr:
            case ir.Literal(value):
                return value.startswith(rest)
            case ir.ByteSet(ranges):
                return bool(ranges) if not rest else len(rest) == 1 and bool(self.ends(expr, at))
            case ir.Words(words):
                return any(word.startswith(rest) for word in words)
            case ir.Seq(parts):
                if not grammar.is_alive(expr):
                    return False
                found = {at}
                for part in parts:
                    if any(self.is_viable(part, place) for place in found):
                        return True
                    found = set().union(*[self.ends(part, place) for place in found])
                return len(self.text) in found
            case ir.Alt(options):
                return any(self.is_viable(option, at) for option in options)
            case ir.Repeat():
                return self.is_repeat_viable(expr, at)
            case ir.Bag():
                return self.is_bag_viable(expr, at)
            case ir.Automaton(edges, _, _):
                live = grammar.live_states(expr)
                return any(
                    (place == len(self.text) and state in live)
                    or any(target in live and self.is_viable(label, place) for label, target in edges[state])
                    for state, place in self.automaton_places(expr, at)
                )
            case ir.Call(rule):
                key = (True, rule, at)
                if key not in self.known:
                    self.known[key] = self.is_viable(grammar.rules[rule], at)
                return self.known[key]
        raise AssertionError(expr)

    def repeat_places(self, expr: ir.Repeat, at: int) -> set[tuple[int, int, bool]]:
        """(items so far, place, whether an item could end here: else a separator did)."""
        cap = expr.max if expr.max is not None else max(expr.min, 1) + len(self.text) + 1
        places: set[tuple[int, int, bool]] = set()
        todo = [(0, at, True)]
        while todo:
            count, place, after = todo.pop()
            if (count, place, after) in places or count > cap:
                continue
            places.add((count, place, after))
            if count == 0 or not after:
                todo += [(count + 1, end, True) for end in self.ends(expr.item, place)]
            else:
                todo += [(count, end, False) for end in self.ends(expr.separator, place)]
        return places

    def is_repeat_viable(self, expr: ir.Repeat, at: int) -> bool:
        if not self.grammar.is_alive(expr):
            return False
        item, separator = self.grammar.is_alive(expr.item), self.grammar.is_alive(expr.separator)
        for count, place, after in self.repeat_places(expr, at):
            can_be_last = count + 1 >= expr.min or separator
            fits = expr.max is None or count < expr.max
            is_possible = count >= expr.min or (item and (separator or count == 0))
            if place == len(self.text) and after and is_possible and (count > 0 or expr.min <= 1 or separator):
                return True
            if (count == 0 or not after) and fits and item and can_be_last and self.is_viable(expr.item, place):
                return True
            if count > 0 and after and fits and item and self.is_viable(expr.separator, place):
                return True
        return False

    def bag_places(self, bag: ir.Bag, at: int) -> set[tuple[int, int, int, bool]]:
        places: set[tuple[int, int, int, bool]] = set()
        todo = [(0, 0, at, True)]
        while todo:
            count, mask, place, after = node = todo.pop()
            if node in places or (bag.max is not None and count > bag.max):
                continue
            places.add(node)
            if count == 0 or not after:
                for item, taken in choices(bag, mask):
                    todo += [(count + 1, taken, end, True) for end in self.ends(item, place)]
            else:
                todo += [(count, mask, end, False) for end in self.ends(bag.separator, place)]
        return places

    def is_bag_viable(self, bag: ir.Bag, at: int) -> bool:
        complete = self.grammar.can_complete
        for count, mask, place, after in self.bag_places(bag, at):
            if place == len(self.text) and complete(bag, count, mask, must_go_on=not after):
                return True
            if count == 0 or not after:
                for item, taken in choices(bag, mask):
                    if self.is_viable(item, place) and complete(bag, count + 1, taken, must_go_on=False):
                        return True
            elif self.is_viable(bag.separator, place) and complete(bag, count, mask, must_go_on=True):
                return True
        return False

    def automaton_places(self, expr: ir.Automaton, at: int) -> set[tuple[int, int]]:
        places: set[tuple[int, int]] = set()
        todo = [(0, at)]
        while todo:
            state, place = todo.pop()
            if (state, place) not in places:
                places.add((state, place))
                todo += [(target, end) for label, target in expr.edges[state] for end in self.ends(label, place)]
                todo += [(target, place) for before, target in expr.skips if before == state]
        return places


def all_required(bag: ir.Bag, mask: int) -> bool:
    return all(mask >> i & 1 for i, item in enumerate(bag.items) if item.is_required)


def choices(bag: ir.Bag, mask: int) -> Iterator[tuple[ir.Expr, int]]:
    """Items that may come next, and the mask after each."""
    for i, item in enumerate(bag.items):
        if not ((item.is_once or item.is_required) and mask >> i & 1):
            yield item.expr, mask | 1 << i


def all_texts(alphabet: bytes, longest: int) -> Iterator[bytes]:
    """Every text over an alphabet, shorter ones first."""
    for length in range(longest + 1):
        for letters in itertools.product(alphabet, repeat=length):
            yield bytes(letters)
