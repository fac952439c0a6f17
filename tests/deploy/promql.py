"""The part of PromQL that our dashboards and alerts use, read strictly: anything else is an error.

`check` also does what Prometheus cannot: it looks whether the series and labels that a query names exist, and whether
a rate is taken of a counter and of nothing else.
"""

import re
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

TARGET_LABELS = frozenset({"job", "instance"})  # Prometheus adds them to everything that it scrapes

RANGE_FUNCTIONS = {  # whether they are for counters, or for everything else
    "rate": True,
    "increase": True,
    "max_over_time": False,
    "min_over_time": False,
    "changes": False,
}
VECTOR_FUNCTIONS = {"histogram_quantile": 2, "clamp_min": 2}  # number of arguments; the vector is the last
AGGREGATIONS = {"sum", "avg", "min", "max"}
COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
OPERATORS = {"+", "-", "*", "/"} | COMPARISONS
SET_OPERATORS = {"and", "or", "unless"}

TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d+\.?\d*(?:e-?\d+)?(?![\w:]))
      | (?P<name>[a-zA-Z_:][\w:]*)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<range>\[(?:\d+[smhd]|\$__rate_interval|\$__interval)\])
      | (?P<mark>=~|!~|==|!=|>=|<=|[-+*/(){},=<>])
    )""",
    re.VERBOSE,
)


class PromqlError(Exception):
    """A query that is wrong or not understood."""


class Token(NamedTuple):
    kind: str
    text: str


class Series(NamedTuple):
    """The samples of one name: the values of each label, and whether the samples only grow."""

    labels: Mapping[str, Set[str]]
    is_counter: bool


class Vector(NamedTuple):
    """The result of an expression: the labels of its samples; None for a number."""

    labels: frozenset[str] | None
    is_bucket_rate: bool = False


def tokens_of(query: str) -> list[Token]:
    tokens, position = [], 0
    query = query.rstrip()
    while position < len(query):
        match = TOKEN.match(query, position)
        if match is None or match.lastgroup is None:
            raise PromqlError(f"not understood at {position}: {query[position : position + 20]!r}")
        tokens.append(Token(match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return tokens


def check(query: str, known: Callable[[str], Series | None]) -> frozenset[str]:
    """The labels of what the query gives. Raises PromqlError where it is wrong; `known` tells of a series by name."""
    parser = _Parser(tokens_of(query), known)
    result = parser.expression()
    parser.expect_end()
    return result.labels or frozenset()


class _Parser:
    def __init__(self, tokens: list[Token], known: Callable[[str], Series | None]) -> None:
        self._tokens = tokens
        self._known = known
        self._at = 0

    def _peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else Token("end", "")

    def _next(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, text: str) -> bool:
        if self._peek().text == text and self._peek().kind in ("mark", "name"):
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise PromqlError(f"expected {text!r}, found {self._peek().text!r}")

    def expect_end(self) -> None:
        if self._peek().kind != "end":
            raise PromqlError(f"more than one expression: {self._peek().text!r}")

    def expression(self) -> Vector:
        """All operators in one level: who needs more writes parentheses, and a mix without them is an error."""
        result = self._operand()
        operators = set()
        while (token := self._peek()).text in OPERATORS | SET_OPERATORS and token.kind != "string":
            self._at += 1
            operators.add("compare" if token.text in COMPARISONS else token.text)
            matched = None
            if token.text in SET_OPERATORS or token.text in OPERATORS:
                matched = self._label_list() if self._take("on") else None
            result = self._joined(result, self._operand(), matched, token.text)
        if len(operators - {"compare", "and"}) > 1:
            raise PromqlError(f"several operators without parentheses: {sorted(operators)}")
        return result

    def _joined(self, left: Vector, right: Vector, on: frozenset[str] | None, operator: str) -> Vector:
        if left.labels is None or right.labels is None:
            return Vector(left.labels if right.labels is None else right.labels)
        if on is not None:
            if not on <= left.labels & right.labels:
                raise PromqlError(f"on {sorted(on)}, which one side does not have")
        elif left.labels != right.labels:
            raise PromqlError(f"sides of {operator!r} match nothing: {sorted(left.labels)} and {sorted(right.labels)}")
        return Vector(left.labels)

    def _operand(self) -> Vector:
        token = self._next()
        if token.kind == "number":
            return Vector(None)
        if token == Token("mark", "("):
            result = self.expression()
            self._expect(")")
            return result
        if token.kind != "name":
            raise PromqlError(f"expected an expression, found {token.text!r}")
        if token.text in AGGREGATIONS:
            return self._aggregation()
        if token.text in RANGE_FUNCTIONS:
            return self._range_function(token.text)
        if token.text in VECTOR_FUNCTIONS:
            return self._vector_function(token.text)
        if self._peek().text == "(":
            raise PromqlError(f"unknown function {token.text!r}")
        series, labels, name = self._selector(token.text)
        if self._peek().kind == "range":
            raise PromqlError(f"{name} with a range outside of a function that takes one")
        if series.is_counter and name.endswith("_bucket"):
            raise PromqlError(f"{name}: buckets are only good for a rate")
        return Vector(labels)

    def _aggregation(self) -> Vector:
        by = self._label_list() if self._take("by") else frozenset()
        self._expect("(")
        inner = self.expression()
        self._expect(")")
        if inner.labels is None:
            raise PromqlError("an aggregation of a number")
        if not by <= inner.labels:
            raise PromqlError(f"by {sorted(by - inner.labels)}, but there are only {sorted(inner.labels)}")
        return Vector(by, inner.is_bucket_rate and "le" in by)

    def _range_function(self, function: str) -> Vector:
        self._expect("(")
        name = self._next()
        if name.kind != "name":
            raise PromqlError(f"{function} of {name.text!r}")
        series, labels, _ = self._selector(name.text)
        if self._next().kind != "range":
            raise PromqlError(f"{function} needs a range behind {name.text}")
        self._expect(")")
        if series.is_counter is not RANGE_FUNCTIONS[function]:
            raise PromqlError(f"{function} of {name.text}, which is {'a' if series.is_counter else 'no'} counter")
        return Vector(labels, name.text.endswith("_bucket"))

    def _vector_function(self, function: str) -> Vector:
        self._expect("(")
        arguments = [self.expression()]
        while self._take(","):
            arguments.append(self.expression())
        self._expect(")")
        if len(arguments) != VECTOR_FUNCTIONS[function]:
            raise PromqlError(f"{function} takes {VECTOR_FUNCTIONS[function]} arguments")
        vector = arguments[-1] if function == "histogram_quantile" else arguments[0]
        if vector.labels is None:
            raise PromqlError(f"{function} of a number")
        if function == "histogram_quantile":
            if not vector.is_bucket_rate:
                raise PromqlError("histogram_quantile needs the rate of buckets, by le")
            return Vector(vector.labels - {"le"})
        return Vector(vector.labels)

    def _selector(self, name: str) -> tuple[Series, frozenset[str], str]:
        series = self._known(name)
        if series is None:
            raise PromqlError(f"no series {name}")
        if self._take("{"):
            while not self._take("}"):
                self._matcher(name, series)
                if not self._take(",") and self._peek().text != "}":
                    raise PromqlError(f"expected , or }} in the matchers of {name}")
        return series, frozenset(series.labels) | TARGET_LABELS, name

    def _matcher(self, name: str, series: Series) -> None:
        label, operator, value = self._next(), self._next(), self._next()
        if label.kind != "name" or operator.text not in ("=", "!=", "=~", "!~") or value.kind != "string":
            raise PromqlError(f"not a matcher in {name}: {label.text}{operator.text}{value.text}")
        if label.text in TARGET_LABELS:
            return
        if label.text not in series.labels:
            raise PromqlError(f"{name} has no label {label.text}")
        pattern = value.text[1:-1] if "~" in operator.text else re.escape(value.text[1:-1])
        if not any(re.fullmatch(pattern, known) for known in series.labels[label.text]):
            raise PromqlError(f"{name} never has {label.text} like {value.text}")

    def _label_list(self) -> frozenset[str]:
        self._expect("(")
        labels = []
        while not self._take(")"):
            token = self._next()
            if token.kind != "name":
                raise PromqlError(f"not a label: {token.text!r}")
            labels.append(token.text)
            if not self._take(",") and self._peek().text != ")":
                raise PromqlError("expected , or ) in a list of labels")
        return frozenset(labels)
