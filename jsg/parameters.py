"""The table of sampling parameters: the values that each takes, its default, and its name in every interface of jsg.

All code for sampling parameters reads this table: the checks of `SamplingParams` and of `gen`, the JSON of graphs, the
bodies of the HTTP interfaces, the list of models, the page, the requests to the APIs of others, the arguments that a
run passes to its gens, and the array that a step samples by. So a new parameter is one entry of `PARAMETERS`. Besides,
only the code that does what it asks for names it, and the typed signatures that an editor shows: `SamplingParams`,
`gen` with its kin, and `RunArgs`. `tests/test_parameters.py` compares them with the table.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

from jsg.errors import are_token_ids, is_int, is_number, require, token_id, whole

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_STOP_PATTERNS = 8
MAX_STOP_PATTERN_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_N = 128
_MAX_INT = 2**31 - 1

JumpForward = Literal["draft", "retokenize", "off"]
Speculative = Literal["auto", "off"]
Dtype = Literal["int", "float", "bool", "str"]

Interface = Literal["gen", "run", "openai", "responses", "anthropic"]
"""The interfaces that name parameters. "gen" is `gen` and the JSON of graphs, and "run" is the run of a program.
"openai" is `/v1/completions` and `/v1/chat/completions`, and jsg's own requests to servers that have them. "responses"
is `/v1/responses`, and "anthropic" is `/v1/messages`."""
Remote = Literal["openai", "sglang", "vllm", "anthropic"]
"""The APIs of others, named after those who define them."""

# Kinds of values. `type` is the type of a value in `SamplingParams`.


@dataclasses.dataclass(frozen=True, slots=True)
class Integer:
    """A whole number from `low` to `high`, both included, or `also`. An error message says it as `rule`."""

    type: ClassVar[Any] = int
    low: int = 0
    high: int = _MAX_INT
    rule: str = "an integer in [0, 2^31)"
    also: int | None = None

    def read(self, name: str, value: Any) -> int:
        """The value as `SamplingParams` keeps it. Raises RequestError for a wrong value."""
        value = whole(value)
        require(is_int(value) and (self.low <= value <= self.high or value == self.also), name, self.rule, value)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number, which may have a fraction, in the range of `Integer`. One between 0 and `zero_below` is taken as 0."""

    type: ClassVar[Any] = float
    low: float
    high: float
    rule: str
    zero_below: float = 0

    def read(self, name: str, value: Any) -> float:
        """As `Integer.read`."""
        require(is_number(value) and self.low <= value <= self.high, name, self.rule, value)
        return 0.0 if 0 < value < self.zero_below else value


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    type: ClassVar[Any] = bool

    def read(self, name: str, value: Any) -> bool:
        """As `Integer.read`."""
        require(isinstance(value, bool), name, "true or false", value)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A text, which only a backend can check."""

    type: ClassVar[Any] = str

    def read(self, name: str, value: Any) -> str:
        """As `Integer.read`."""
        require(isinstance(value, str), name, "text", value)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few texts."""

    type: ClassVar[Any] = str
    values: tuple[str, ...]

    def read(self, name: str, value: Any) -> str:
        """As `Integer.read`."""
        require(value in self.values, name, " or ".join(map(repr, self.values)), value)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """One text, or at most `max_items` texts, of 1 to `max_chars` characters. An error message calls them `noun`."""

    type: ClassVar[Any] = tuple[str, ...]
    max_items: int
    max_chars: int
    noun: str

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        """As `Integer.read`."""
        texts = (value,) if isinstance(value, str) else _items(name, value)
        require(len(texts) <= self.max_items, name, f"at most {self.max_items} {self.noun}", len(texts))
        for text in texts:
            is_right = isinstance(text, str) and 0 < len(text) <= self.max_chars
            require(is_right, name, f"{self.noun} of 1 to {self.max_chars} characters", text)
        return texts


@dataclasses.dataclass(frozen=True, slots=True)
class TokenIds:
    """At most `max_items` token ids."""

    type: ClassVar[Any] = tuple[int, ...]
    max_items: int

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        """As `Integer.read`."""
        ids = _items(name, value)
        require(len(ids) <= self.max_items, name, f"at most {self.max_items} ids", len(ids))
        require(are_token_ids(ids), name, "token ids", ids)
        return ids


@dataclasses.dataclass(frozen=True, slots=True)
class LogitBias:
    """At most `max_items` pairs of a token and a number to add to its logit, or a dict, whose keys may be texts."""

    type: ClassVar[Any] = tuple[tuple[int, float], ...]
    max_items: int

    def read(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """As `Integer.read`."""
        rule = "token ids in [0, 2^31), each once, with a number in [-100, 100] for each"
        try:
            pairs = [(token_id(token), bias) for token, bias in (value.items() if isinstance(value, dict) else value)]
        except (TypeError, ValueError):
            pairs = [(None, 0)]
        require(len(pairs) <= self.max_items, name, f"at most {self.max_items} entries", len(pairs))
        for token, bias in pairs:
            require(token is not None and is_number(bias) and abs(bias) <= 100, name, rule, value)
        require(len(dict(pairs)) == len(pairs), name, rule, value)
        return tuple((token, float(bias)) for token, bias in pairs if token is not None)


Kind = Integer | Number | Flag | Text | OneOf | Texts | TokenIds | LogitBias


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter.

    Attributes:
        name: Its name in `SamplingParams`, and so in `sampling_params` of `/generate`. It is SGLang's name.
        kind: The values that it takes.
        default: Its value if nobody gives one.
        interfaces: The other interfaces that take it.
        help: Its text in the documentation of the HTTP interfaces. If it is empty, they show the range of a number.
        names: Its names in interfaces that do not use `name`.
        role: "sampling" is a field of `SamplingParams`, "grammar" stands for its field `grammar`, "report" belongs to
            the request as a whole, and "type" is known to the language only, which makes a grammar of it.
        remote: The APIs of others that take it, under its name in "anthropic" for Anthropic's and in "openai" for the
            rest.
        has_neutral: Whether the default asks for nothing, so that a backend without the parameter need not refuse it.
        takes_zero: Whether 0 stands for the default in the interfaces of OpenAI and Anthropic.
        is_stateless: Whether its effect on a token is independent of the tokens before, so that gens may share a call.
        is_in_steps: Whether the engine's steps read it for each row of logits. A `Number` is there by its name.
    """

    name: str
    kind: Kind
    default: Any
    interfaces: tuple[Interface, ...]
    help: str = ""
    _: dataclasses.KW_ONLY
    names: Mapping[Interface, str] = dataclasses.field(default_factory=dict)
    role: Literal["sampling", "grammar", "report", "type"] = "sampling"
    remote: tuple[Remote, ...] = ()
    has_neutral: bool = True
    takes_zero: bool = False
    is_stateless: bool = False
    is_in_steps: bool = False

    def name_in(self, interface: Interface) -> str | None:
        """Its name in an interface; None if the interface does not take it."""
        return self.names.get(interface, self.name) if interface in self.interfaces else None


_PROGRAMS: tuple[Interface, ...] = ("gen", "run")
_COMPLETIONS: tuple[Interface, ...] = (*_PROGRAMS, "openai")
_OPENAI: tuple[Interface, ...] = (*_COMPLETIONS, "responses")
_EVERYWHERE: tuple[Interface, ...] = (*_OPENAI, "anthropic")
_HTTP: tuple[Interface, ...] = ("openai", "responses", "anthropic")
_SERVERS: tuple[Remote, ...] = ("sglang", "vllm")
_ALL: tuple[Remote, ...] = ("openai", *_SERVERS)
_STOPS = Texts(MAX_STOP_STRINGS, MAX_STOP_CHARS, "strings")
_PATTERNS = Texts(MAX_STOP_PATTERNS, MAX_STOP_PATTERN_CHARS, "patterns")
_N = Integer(1, MAX_N, f"an integer in [1, {MAX_N}]")
_TOP_K = Integer(1, rule="-1 or an integer from 1", also=-1)
_SEEDS = Integer(-(2**63), 2**64 - 1, "a 64-bit integer")
_PENALTY = Number(-2, 2, "in [-2, 2]")
_MAX_TOKENS: Mapping[Interface, str] = {
    **{"gen": "max_tokens", "openai": "max_tokens", "anthropic": "max_tokens"},
    "responses": "max_output_tokens",
}
_MIN_TOKENS: Mapping[Interface, str] = {"gen": "min_tokens", "openai": "min_tokens"}
_SEED: Mapping[Interface, str] = dict.fromkeys(_EVERYWHERE, "seed")

PARAMETERS: tuple[Parameter, ...] = (
    Parameter("max_new_tokens", Integer(), 128, _EVERYWHERE, names=_MAX_TOKENS, has_neutral=False),
    Parameter(
        "min_new_tokens",
        Integer(),
        0,
        _COMPLETIONS,
        "The number of tokens before which nothing ends an answer.",
        names=_MIN_TOKENS,
        remote=_SERVERS,
    ),
    Parameter("n", _N, 1, ("gen", "openai"), "The number of answers to each prompt. Answer i uses seed + i."),
    Parameter(
        "stop",
        _STOPS,
        (),
        _EVERYWHERE,
        f"At most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters that end an answer.",
        names={"anthropic": "stop_sequences"},
    ),
    Parameter(
        "stop_token_ids",
        TokenIds(MAX_STOP_TOKENS),
        (),
        _COMPLETIONS,
        f"At most {MAX_STOP_TOKENS} token ids that end an answer.",
        remote=_SERVERS,
    ),
    Parameter(
        "stop_regex",
        _PATTERNS,
        (),
        _COMPLETIONS,
        f"From SGLang. At most {MAX_STOP_PATTERNS} regular expressions of 1 to {MAX_STOP_PATTERN_CHARS} characters. "
        "An answer ends before the first match.",
        remote=("sglang",),
    ),
    Parameter(
        "temperature",
        Number(0, 100, "in [0, 100]", zero_below=1e-5),
        1.0,
        _EVERYWHERE,
        "With 0, and below 1e-5, the most likely token is chosen. The value is in [0, 100]. The default is 1.",
        has_neutral=False,
        is_stateless=True,
        is_in_steps=True,
    ),
    Parameter(
        "top_p",
        Number(1e-6, 1, "in [1e-6, 1]"),
        1.0,
        _EVERYWHERE,
        "The smallest set of most likely tokens with at least this probability is kept, in [1e-6, 1].",
        remote=(*_ALL, "anthropic"),
        is_stateless=True,
        is_in_steps=True,
    ),
    Parameter(
        "top_k",
        _TOP_K,
        -1,
        _EVERYWHERE,
        "The number of most likely tokens that are kept. -1 and 0 keep all tokens.",
        remote=(*_SERVERS, "anthropic"),
        takes_zero=True,
        is_stateless=True,
        is_in_steps=True,
    ),
    Parameter(
        "min_p",
        Number(0, 1, "in [0, 1]"),
        0.0,
        _OPENAI,
        "Tokens that are at least this fraction as likely as the most likely one are kept, in [0, 1].",
        remote=_SERVERS,
        is_stateless=True,
        is_in_steps=True,
    ),
    Parameter(
        "frequency_penalty",
        _PENALTY,
        0.0,
        _OPENAI,
        "It is subtracted from the logit of a token for each time that the output has the token, in [-2, 2].",
        remote=_ALL,
        is_in_steps=True,
    ),
    Parameter(
        "presence_penalty",
        _PENALTY,
        0.0,
        _OPENAI,
        "It is subtracted once from the logit of each token that the output has, in [-2, 2].",
        remote=_ALL,
        is_in_steps=True,
    ),
    Parameter(
        "repetition_penalty",
        Number(0.01, 2, "in [0.01, 2]"),
        1.0,
        _OPENAI,
        "It divides positive and multiplies negative logits of tokens in prompt or output, in [0.01, 2].",
        remote=_SERVERS,
        is_in_steps=True,
    ),
    Parameter("ignore_eos", Flag(), False, _COMPLETIONS, "Do not end an answer at EOS.", remote=_SERVERS),
    Parameter(
        "sampling_seed", _SEEDS, None, _EVERYWHERE, "The same seed gives the same tokens.", names=_SEED, remote=_ALL
    ),
    Parameter("return_logprob", Flag(), False, _PROGRAMS, role="report"),
    Parameter("logprob_start_len", Integer(-1), -1, _PROGRAMS, role="report"),
    Parameter("top_logprobs_num", Integer(), 0, _PROGRAMS, role="report"),
    Parameter("return_text_in_logprobs", Flag(), False, _PROGRAMS, role="report"),
    Parameter("dtype", OneOf(get_args(Dtype)), None, ("gen",), role="type"),
    Parameter("regex", Text(), None, ("gen",), role="grammar"),
    Parameter("json_schema", Text(), None, ("gen",), role="grammar"),
    Parameter("ebnf", Text(), None, ("gen",), role="grammar"),
    Parameter(
        "logit_bias",
        LogitBias(MAX_LOGIT_BIAS),
        (),
        ("openai",),
        f"At most {MAX_LOGIT_BIAS} token ids → the number in [-100, 100] that is added to the logit.",
    ),
    Parameter(
        "skip_special_tokens", Flag(), True, ("openai",), "Leave special tokens out of the text. The default is true."
    ),
    Parameter("no_stop_trim", Flag(), False, ("openai",), "SGLang's name of `include_stop_str_in_output`."),
    Parameter(
        "jump_forward",
        OneOf(get_args(JumpForward)),
        None,
        _HTTP,
        "The method for parts where the grammar allows only one text; see `sampling_params`.",
    ),
    Parameter(
        "speculative",
        OneOf(get_args(Speculative)),
        None,
        _HTTP,
        "Whether drafts are copied from earlier text; see `sampling_params`.",
    ),
    Parameter(
        "return_constraint",
        Flag(),
        False,
        _HTTP,
        "The answer has `constraint`, which reports what the grammar did.",
    ),
    Parameter(
        "return_drafts",
        Flag(),
        False,
        _HTTP,
        "The answer has `drafts`, which says how many draft tokens it had, by source, and how many steps it took.",
    ),
)


@functools.cache
def named(interface: Interface) -> Mapping[str, Parameter]:
    """The parameters that an interface takes, by their names there."""
    return {name: parameter for parameter in PARAMETERS if (name := parameter.name_in(interface)) is not None}


def with_fields[T](fields: Mapping[str, tuple[Any, Any]]) -> Callable[[type[T]], type[T]]:
    """Adds the fields (name → type, default) that a class lacks, before `dataclass` sees the class."""

    def complete(cls: type[T]) -> type[T]:
        for name, (kind, default) in fields.items():
            if name not in cls.__annotations__:
                cls.__annotations__[name] = kind
                setattr(cls, name, default)
        return cls

    return complete


def _items(name: str, value: Any) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), name, "a list", value)
    return tuple(value)
