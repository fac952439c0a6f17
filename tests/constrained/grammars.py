"""Small random grammars over the bytes a, b, c."""

import random

from jsg.constrained import ir

ALPHABET = b"abc"


class GrammarMaker:
    """Makes grammars from a seed; a rule calls only later ones, unless something stands before the call."""

    def __init__(self, seed: int, num_rules: int = 3):
        self.random = random.Random(seed)
        self.num_rules = num_rules

    def grammar(self) -> ir.Grammar:
        rules = {f"r{i}": self.expr(3, i) for i in range(self.num_rules)}
        return ir.Grammar("r0", rules)

    def expr(self, depth: int, rule: int) -> ir.Expr:
        kinds = ["literal", "bytes"] if depth == 0 else MORE
        kind = self.random.choice(kinds)
        return getattr(self, kind)(depth - 1, rule)

    def literal(self, depth: int, rule: int) -> ir.Expr:
        return ir.Literal(bytes(self.random.choices(ALPHABET, k=self.random.randint(1, 3))))

    def bytes(self, depth: int, rule: int) -> ir.Expr:
        return self.random.choice([ir.ByteSet(((97, 98),)), ir.ByteSet(((97, 97), (99, 99))), ir.ByteSet(((97, 99),))])

    def words(self, depth: int, rule: int) -> ir.Expr:
        words = {bytes(self.random.choices(ALPHABET, k=self.random.randint(1, 3))) for _ in range(4)}
        return ir.Words(tuple(sorted(words)))

    def never(self, depth: int, rule: int) -> ir.Expr:
        return self.random.choice([ir.NEVER, ir.ByteSet(()), ir.Words(())])

    def empty(self, depth: int, rule: int) -> ir.Expr:
        return ir.EMPTY

    def seq(self, depth: int, rule: int) -> ir.Expr:
        return ir.Seq(tuple(self.expr(depth, rule) for _ in range(self.random.randint(1, 3))))

    def alt(self, depth: int, rule: int) -> ir.Expr:
        return ir.Alt(tuple(self.expr(depth, rule) for _ in range(self.random.randint(1, 3))))

    def call(self, depth: int, rule: int) -> ir.Expr:
        if rule + 1 < self.num_rules and self.random.random() < 0.5:
            return ir.Call(f"r{self.random.randrange(rule + 1, self.num_rules)}")
        return ir.Seq((self.literal(depth, rule), ir.Call(f"r{self.random.randrange(self.num_rules)}")))

    def repeat(self, depth: int, rule: int) -> ir.Expr:
        low = self.random.randint(0, 3)
        high = self.random.choice([None, low, low + 1, low + 3])
        separator = self.random.choice(
            [ir.EMPTY, ir.EMPTY, ir.Literal(b"c"), self.expr(0, rule), self.expr(depth, rule)]
        )
        item = self.expr(depth, rule)
        if self.random.random() < 0.3:  # counted
            low, high = self.random.choice([(0, 40), (2, 40), (30, 31), (34, None), (0, 3)])
            item = self.random.choice([ir.Literal(b"abc"), ir.alt(ir.Literal(b"ab"), ir.Literal(b"a")), item])
        return ir.Repeat(item, low, high, separator)

    def bag(self, depth: int, rule: int) -> ir.Expr:
        items = []
        for _ in range(self.random.randint(1, 4)):
            is_once = self.random.random() < 0.6
            first = self.random.choice([ir.Literal(bytes([byte])) for byte in ALPHABET])
            rest = self.random.choice([ir.EMPTY, self.expr(depth, rule)])
            items.append(ir.BagItem(ir.Seq((first, rest)), is_once, is_once and self.random.random() < 0.4))
        low = self.random.randint(0, 3)
        high = self.random.choice([None, low, low + 1, low + 2])
        separator = self.random.choice([ir.EMPTY, ir.Literal(b"c"), ir.Literal(b"b"), self.expr(depth, rule)])
        return ir.Bag(tuple(items), separator, low, high)

    def automaton(self, depth: int, rule: int) -> ir.Expr:
        size = self.random.randint(1, 4)
        edges = tuple(
            tuple(
                (
                    self.random.choice([self.literal(0, rule), self.bytes(0, rule), self.words(0, rule)]),
                    self.random.randrange(size),
                )
                for _ in range(self.random.randint(0, 2))
            )
            for _ in range(size)
        )
        accepting = frozenset(self.random.sample(range(size), self.random.randint(0, size)))
        skips = [(state, self.random.randint(state + 1, size - 1)) for state in range(size - 1)]
        return ir.Automaton(edges, accepting, tuple([skip for skip in skips if self.random.random() < 0.5]))


MORE = ["literal", "bytes", "words", "never", "empty", "seq", "seq", "seq", "alt", "alt", "call", "call"]
MORE += ["repeat", "repeat", "repeat", "bag", "bag", "automaton"]
