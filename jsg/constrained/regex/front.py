"""Makes a grammar of a regular expression, which the whole output must match."""

from jsg.constrained.chars.lower import lower
from jsg.constrained.ir import NEVER, Grammar
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.regex.parse import parse_regex
from jsg.errors import GrammarError

_PARAM = "regex"
_START = "root"


def regex_grammar(text: str, limits: Limits = LIMITS) -> Grammar:
    """The grammar of the texts that a regular expression (Python's dialect) matches as a whole, in UTF-8.

    Raises:
        GrammarError: The pattern is wrong, uses something that is not supported, is too large, or matches no text.
    """
    expr = lower(parse_regex(text, search=False, limits=limits, param=_PARAM))
    if expr == NEVER:
        raise GrammarError("the regular expression matches no text at all; correct it", param=_PARAM)
    return Grammar(_START, {_START: expr})
