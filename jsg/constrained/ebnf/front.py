"""Makes a grammar of an EBNF text."""

from jsg.constrained.build.analysis import analyse
from jsg.constrained.chars.lower import lower
from jsg.constrained.ebnf.inline import inline_rules
from jsg.constrained.ebnf.lexer import PARAM
from jsg.constrained.ebnf.parser import START, parse
from jsg.constrained.ebnf.recursion import LeftRecursion
from jsg.constrained.ir import Grammar
from jsg.constrained.limits import LIMITS, Limits, check


def ebnf_grammar(text: str, limits: Limits = LIMITS) -> Grammar:
    """The grammar of an EBNF text in the dialect of GBNF and XGrammar; see `parser.py` for what it may hold.

    Rules that the rule `root` does not lead to are dropped, left recursion is turned into repeats, and small rules are
    put in place where they are called.

    Raises:
        GrammarError: It is not of the dialect, cannot be rewritten, or is too large.
    """
    check(len(text.encode(errors="surrogatepass")), limits.text_bytes, "bytes of text", PARAM)
    rules = parse(text, limits)
    lowered = {name: lower(expr) for name, expr in rules.exprs.items()}
    facts = analyse(Grammar(START, lowered), limits)
    exprs = LeftRecursion(facts, limits).removed()
    return Grammar(START, inline_rules(exprs, START))
