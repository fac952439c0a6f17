r"""Makes a grammar of an EBNF text.

The dialect is that of GBNF and XGrammar:

    root  ::= greeting ", " name{1,3} "!"?      # the order of the rules does not matter; `root` is the start
    name  ::= [A-Z] [^ \n]* | 'x' (name | ".")  # classes, groups, alternatives; a dot is any character

An alternative may be empty. The escapes are \n \t \r \b \f \v \a \e \0, \xHH, \uHHHH, \u{…} and \UHHHHHHHH, which are
code points, and a backslash before any punctuation.
"""

from typing import final

from jsg.constrained.build.analysis import analyse
from jsg.constrained.chars.lower import lower
from jsg.constrained.ebnf.inline import inline_rules
from jsg.constrained.ebnf.lexer import PARAM, Source, Token, tokens_of
from jsg.constrained.ebnf.recursion import LeftRecursion
from jsg.constrained.ir import EMPTY, Call, Chars, Expr, Grammar, Repeat, either, literal, seq
from jsg.constrained.limits import LIMITS, Limits, check

START = "root"
MAX_RULES = 10_000
MAX_WORDS = 50_000
_MACROS = frozenset(("TagDispatch", "Token", "ExcludeToken", "AnyTokens", "TokenTagDispatch", "Regex"))


def ebnf_grammar(text: str, limits: Limits = LIMITS) -> Grammar:
    """The grammar of an EBNF text in the dialect of GBNF and XGrammar.

    Rules that the rule `root` does not lead to are dropped, left recursion is turned into repeats, and small rules are
    put in place where they are called.

    Raises:
        GrammarError: It is not of the dialect, cannot be rewritten, or is too large.
    """
    check(len(text.encode(errors="surrogatepass")), limits.text_bytes, "bytes of text", PARAM)
    rules = parse(text, limits)
    lowered = {name: lower(expr) for name, expr in rules.items()}
    facts = analyse(Grammar(START, lowered), limits)
    exprs = LeftRecursion(facts, limits).removed()
    return Grammar(START, inline_rules(exprs, START))


def parse(text: str, limits: Limits) -> dict[str, Expr]:
    """The rules of an EBNF text, over `Chars`. Every rule that is called is among them.

    Raises:
        GrammarError: It is not of the dialect.
    """
    return _Parser(text, limits).rules()


@final
class _Parser:
    """Looks one token ahead, and one more to tell a name from the beginning of the next rule."""

    def __init__(self, text: str, limits: Limits):
        self._source = Source(text)
        self._limits = limits
        self._tokens = tokens_of(self._source)
        self._token = next(self._tokens)
        self._after = self._token if self._token.kind == "end" else next(self._tokens)
        self._depth = 0
        self._calls: dict[str, int] = {}
        self._num_words = 0

    def rules(self) -> dict[str, Expr]:
        """All rules."""
        exprs: dict[str, Expr] = {}
        offsets: dict[str, int] = {}
        while self._token.kind != "end":
            name = self._expect("name", "the name of a rule")
            if name.value in exprs:
                self._source.refuse(
                    name.offset,
                    f"each rule must be defined once, but {name.value!r} is also defined at "
                    f"{self._source.where(offsets[name.value])}",
                    "rename one, or join them with |",
                )
            offsets[name.value] = name.offset
            self._expect("::=", "::= behind the name of a rule")
            exprs[name.value] = self._choice()
            check(len(exprs), MAX_RULES, "rules", PARAM)
        if START not in exprs:
            self._source.refuse(
                len(self._source.text) if exprs else 0,
                f"a grammar must have a rule {START!r}, but has {', '.join(list(exprs)[:8])[:100] or 'no rules'}",
                f"name the rule to start with {START!r}",
            )
        for name, offset in self._calls.items():
            if name not in exprs:
                hint = "; macros of that name are not supported" if name in _MACROS else ""
                self._source.refuse(offset, f"there is no rule {name!r}{hint}", "define it, or quote it if it is text")
        return exprs

    def _choice(self) -> Expr:
        options = [self._sequence()]
        while self._token.kind == "|":
            self._advance()
            option = self._sequence()
            if option != EMPTY or options[-1] != EMPTY:
                options.append(option)
        return either(*options)

    def _sequence(self) -> Expr:
        parts: list[Expr] = []
        while (part := self._part()) is not None:
            depth = self._depth
            while self._token.kind == "repeat":
                depth += 1
                check(depth, self._limits.nesting, "levels of nesting", PARAM)
                least, most = self._advance().bounds
                part = Repeat(part, least, most)
            parts.append(part)
        return seq(*parts)

    def _part(self) -> Expr | None:
        """One part of a sequence without its repeat; None where the sequence ends."""
        token = self._token
        match token.kind:
            case "text":
                self._advance()
                return literal(token.value)
            case "class":
                self._advance()
                return Chars(token.ranges)
            case "name" if self._after.kind != "::=":
                self._advance()
                self._calls.setdefault(token.value, token.offset)
                return Call(token.value)
            case "(":
                return self._group()
            case "repeat" | "::=":
                self._source.refuse(
                    token.offset,
                    f"expected a part of a rule, but found {self._source.found(token.offset)}",
                    "put what is repeated or named before it",
                )
            case _:
                return None

    def _group(self) -> Expr:
        opening = self._advance()
        self._depth += 1
        check(self._depth, self._limits.nesting, "levels of nesting", PARAM)
        inside = self._choice()
        if self._token.kind != ")":
            self._source.refuse(
                self._token.offset,
                f"expected ) for the ( at {self._source.where(opening.offset)}, but found "
                f"{self._source.found(self._token.offset)}",
                "close the group",
            )
        self._advance()
        self._depth -= 1
        return inside

    def _expect(self, kind: str, what: str) -> Token:
        if self._token.kind != kind:
            offset = self._token.offset
            self._source.refuse(offset, f"expected {what}, but found {self._source.found(offset)}", "correct it")
        return self._advance()

    def _advance(self) -> Token:
        token, self._token = self._token, self._after
        if self._token.kind != "end":
            self._after = next(self._tokens)
            self._num_words += 1
            if self._num_words > MAX_WORDS:
                check(self._num_words, MAX_WORDS, "names, texts, classes and signs", PARAM)
        return token
