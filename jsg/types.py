"""The records that cross package and process boundaries. They need no JAX, and nobody changes them.

A `Request` goes down to the engine, and one `RequestOutput` comes back for each request and step. Both have tokens
only: `jsg.processing` translates between text and tokens.
"""

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from jsg.cache_report import CacheReport
from jsg.errors import FieldName, GrammarError, JsgError, RequestError, is_int, quote, require
from jsg.media import MediaInput
from jsg.parameters import PARAMETERS, Flag, Integer, JumpForward, Speculative, TokenIds, with_fields
from jsg.prompt_ids import PromptIds
from jsg.step_reports import ConstraintReport, DraftReport
from jsg.token_scores import TokenLogprob, TokenScores
from jsg.waits import Waited, sum_of

MAX_TOP_LOGPROBS = 128
MAX_BRANCHES = 1024
MAX_GRAMMAR_BYTES = 1 << 20
_PRIORITY = Integer(-(2**31), 2**31 - 1, "an integer in [-2^31, 2^31)")
_TOP_LOGPROBS = Integer(0, MAX_TOP_LOGPROBS, f"an integer in [0, {MAX_TOP_LOGPROBS}]")

GrammarKind = Literal["regex", "json_schema", "ebnf", "choices", "structural_tag"]
Whitespace = Literal["fixed", "compact", "flexible"]
PropertyOrder = Literal["declared", "free"]
AdditionalProperties = Literal["closed", "open"]
GRAMMAR_FIELDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
GRAMMAR_OPTIONS = {"whitespace": "fixed", "property_order": "declared", "additional_properties": "closed"}
"""The options of a grammar that has JSON in it, with their defaults."""
_GRAMMAR_NAMES = frozenset((*GRAMMAR_FIELDS, *GRAMMAR_OPTIONS))
ANY_OBJECT = {"type": "object"}
"""The schema of any JSON object. SGLang's clients write `SGLANG_ANY_JSON` in its place."""
SGLANG_ANY_JSON = "$$ANY$$"
_WITH_OPTIONS: tuple[GrammarKind, ...] = ("json_schema", "structural_tag")


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a client wrote it. `jsg.constrained` compiles it.

    Attributes:
        kind: The language of `text`.
        text: A regular expression, a JSON Schema, an EBNF grammar, a JSON list of choices, or a structural tag as JSON.
            It has at most `MAX_GRAMMAR_BYTES` in UTF-8.
        whitespace: The white space in the JSON of a schema. "fixed" means `", "` and `": "`, "compact" means none, and
            "flexible" means at most one space, or a line break with indentation.
        property_order: The order of the members of an object: as the schema declares them, or any order ("free").
        additional_properties: Whether an object may have members that are not declared, if its schema declares some and
            says nothing about others. "closed" means no, as most clients expect; "open" means yes, as in JSON Schema.
        field: The field of a request to blame for what the grammar costs as a whole, where it was made of others.
        key: A digest. Equal grammars have equal keys, and different grammars have different keys.
    """

    kind: GrammarKind
    text: str
    whitespace: Whitespace = "fixed"
    property_order: PropertyOrder = "declared"
    additional_properties: AdditionalProperties = "closed"
    field: str | None = dataclasses.field(default=None, compare=False)
    key: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", get_args(GrammarKind)),
            ("whitespace", get_args(Whitespace)),
            ("property_order", get_args(PropertyOrder)),
            ("additional_properties", get_args(AdditionalProperties)),
        ):
            require(getattr(self, name) in allowed, name, " or ".join(map(repr, allowed)), getattr(self, name))
        for name, default in GRAMMAR_OPTIONS.items():
            if getattr(self, name) != default:
                _check_takes_options(self.kind, name)
        require(isinstance(self.text, str), self.kind, "text", self.text)
        try:
            text = self.text.encode()
        except UnicodeEncodeError:
            raise GrammarError(
                f"{self.kind} must be Unicode text, but has a lone surrogate; leave it out", param=self.kind
            ) from None
        if len(text) > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes of text, but this one has {len(text)}; "
                "simplify it",
                self.kind,
                self.field,
            )
        options = (getattr(self, name) for name in GRAMMAR_OPTIONS)
        digest = hashlib.sha256("\0".join((self.kind, *options, "")).encode())
        digest.update(text)
        object.__setattr__(self, "key", digest.hexdigest())


def _check_takes_options(kind: GrammarKind, option: str) -> None:
    if kind not in _WITH_OPTIONS:
        raise RequestError(
            f"{option} needs a {' or a '.join(_WITH_OPTIONS)}, but the grammar is of kind {kind}; leave it out",
            param=option,
        )


_SAMPLING = {parameter.name: parameter for parameter in PARAMETERS if parameter.role == "sampling"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
@with_fields({name: (parameter.kind.type, parameter.default) for name, parameter in _SAMPLING.items()})
class SamplingParams:
    """How to choose tokens and when to stop. SGLang's names and defaults.

    Attributes:
        max_new_tokens: The largest number of tokens to generate; 0 only fills the cache.
        min_new_tokens: The number of tokens before which no EOS, stop token, string or pattern ends the request.
        stop: One string or several strings that end the output. They are cut off unless `no_stop_trim` is set.
        stop_token_ids: Token ids that end the output.
        stop_regex: One or several regular expressions in Python's dialect. The output ends before the match that is
            complete first; if several matches are complete then, before the longest. It is cut off like a stop string.
        temperature: In [0, 100]; 0 is greedy, and so is a value below 1e-5.
        top_p: Keep the smallest set of most likely tokens with at least this mass, in [1e-6, 1].
        top_k: Keep this many most likely tokens (ties stay in); -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        frequency_penalty: Subtracted from a logit per earlier occurrence in the output, in [-2, 2].
        presence_penalty: Subtracted once from the logit of every token that is in the output, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output, in [0.01, 2].
        logit_bias: Pairs (token id, value in [-100, 100]) added to the logits; or a dict.
        sampling_seed: The same seed gives the same tokens; None draws a seed.
        ignore_eos: Do not stop at EOS.
        n: The number of answers; answer i uses seed + i.
        skip_special_tokens: Leave special tokens out of the text.
        no_stop_trim: Keep the stop string or stop token in the text.
        grammar: The grammar that the whole output must match; None allows any output. EOS is allowed only where the
            output is complete.
        jump_forward: What to do where the grammar allows only one text: "draft" proposes its tokens and lets the model
            verify them, "retokenize" appends them, "off" generates them one by one. None is the engine's default.
        speculative: Whether drafts are copied from earlier text: "auto" or "off". None is the engine's default.
        return_constraint: Report in `RequestOutput.constraint` what the grammar did.
        return_drafts: Report in `RequestOutput.drafts` how many draft tokens there were.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: GrammarSpec | str | None = None
    jump_forward: JumpForward | None = None
    speculative: Speculative | None = None
    return_constraint: bool = False
    return_drafts: bool = False

    def __post_init__(self) -> None:
        for name, parameter in _SAMPLING.items():
            given, default = getattr(self, name), parameter.default
            if given is default or (type(given) is type(default) and given == default):
                continue
            kept = parameter.kind.read(name, given)
            if kept is not given:  # lists, one string and a dict are what people write; tuples are what is kept
                object.__setattr__(self, name, kept)
        if self.min_new_tokens > self.max_new_tokens:
            said = f" = {self.max_new_tokens}, but got {self.min_new_tokens}; leave it out for the default"
            least, most = FieldName("min_new_tokens"), FieldName("max_new_tokens")
            raise RequestError((least, " must be at most ", most, said), least.name)
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.grammar is None:
            for name in ("jump_forward", "return_constraint"):
                if getattr(self, name):
                    raise RequestError(f"{name} needs a grammar, but there is none; leave it out", param=name)
        elif not isinstance(self.grammar, GrammarSpec | str):
            raise RequestError(
                f"grammar must be a GrammarSpec, but got {quote(self.grammar)}; "
                f"write a grammar under what it is written in: {', '.join(GRAMMAR_FIELDS)}",
                param="grammar",
            )

    @property
    def grammar_key(self) -> str | None:
        """Names the grammar to an engine; None without one."""
        return self.grammar.key if isinstance(self.grammar, GrammarSpec) else self.grammar

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SamplingParams":
        """Builds from a client's JSON object. An unknown name is an error; null means the default.

        The object may have one of `GRAMMAR_FIELDS` in place of `grammar`, with `whitespace`, `property_order` and
        `additional_properties` beside it. Its value is a text, or the JSON value itself if the text is JSON.
        """
        fields = _with_grammar(fields)
        known = cls.__dataclass_fields__.keys()
        if unknown := sorted(fields.keys() - known):
            name = unknown[0][:100]
            raise RequestError(f"unknown sampling parameter {name!r}; known are {', '.join(sorted(known))}", param=name)
        values = {name: value for name, value in fields.items() if value is not None}
        return cls(**values)


def _with_grammar(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with `grammar` in place of the names that describe one."""
    rest = {name: value for name, value in fields.items() if name not in _GRAMMAR_NAMES}
    given: list[GrammarKind] = [name for name in GRAMMAR_FIELDS if fields.get(name) is not None]
    if len(given) + (fields.get("grammar") is not None) > 1:
        raise RequestError(f"only one grammar may be given, but got {' and '.join(given)}; leave one out", given[0])
    options = {name: fields[name] for name in GRAMMAR_OPTIONS if fields.get(name) is not None}
    if isinstance(rest.get("grammar"), str):  # the key of a grammar is no client's to give
        raise RequestError(
            f"grammar must be a GrammarSpec, but got text; say what it is written in: {', '.join(GRAMMAR_FIELDS)}",
            param="grammar",
        )
    if not given:
        for name in options:
            raise RequestError(f"{name} needs a json_schema, but got none; leave it out", param=name)
        return rest
    kind = given[0]
    grammar = GrammarSpec(kind, grammar_text(kind, fields[kind]), **options)
    for name in options:
        _check_takes_options(kind, name)
    return rest | {"grammar": grammar}


def grammar_text(kind: GrammarKind, value: Any) -> str:
    """The text of a grammar that a client wrote as a text or, if it is JSON, as its value. Raises GrammarError."""
    if kind == "json_schema" and value == SGLANG_ANY_JSON:
        value = ANY_OBJECT
    if kind in ("regex", "ebnf") or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise GrammarError(f"{kind} must be JSON, but got {quote(value)}; correct it", param=kind) from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtLimit:
    """How many tokens a model may think, at the beginning of its output.

    Attributes:
        begin: The bytes that open the thoughts, as a grammar reads them.
        end: The bytes that close the thoughts. When so many tokens were thought, the output goes on with them.
        is_inside: Whether the prompt has opened the thoughts.
        max_tokens: Tokens between the two.
    """

    begin: bytes
    end: bytes
    is_inside: bool
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """What a prompt and the requests for its answers have in common.

    Attributes:
        return_logprob: Report the log-probability of every output token.
        logprob_start_len: Report prompt tokens too, from this index on; -1 for none.
        top_logprobs_num: How many of the most likely tokens to report at each reported position.
        token_ids_logprob: Report these token ids at each reported position.
        namespace: Only requests of one namespace share cached prefixes (tenant, salt, adapter).
        priority: A larger value goes first in the waiting queue, as far as the bound on passing allows.
        return_cache_info: Report why the cached prefix ended where it did.
        sees_all: The report on the cached prefix may say what other namespaces have.
        return_waited: Report for what it waited, and for how long.
        hold: Generate nothing, but keep the prompt in the cache. One output without `finish` says that the prompt is
            cached. The request stays until it is aborted, or until its memory is needed (`FinishType.STOP`).
        position_jumps: Pairs of an index and a number. The positions of the token at the index, and of all tokens
            after it, are larger by the number. Indices ascend; `len(input_ids)` is that of the first new token.
        joined: The index at which each branch of a joined prompt begins, and the index at which the last branch ends.
            The tokens before the first branch are common to all branches. A branch sees these and itself, and its
            positions go on from there (a jump inside a branch ends with it). The tokens after the branches see all,
            and their positions go on from the largest position in a branch. Empty for a plain prompt.
        media: Images and videos, in the order of the tokens that they stand for.
        thought_limit: How long the model may think. The grammar of the request allows thoughts then.
        post: What all requests of one post have in common; empty for a request that came alone. Posts take turns, so
            that one with many prompts does not keep the others waiting.
        snapshot_at: Ascending lengths of prefixes of the prompt at which other requests are known to part from it. A
            model that keeps a state of each request can use a cached prefix only where a snapshot of it was kept.
        turn_end: How many tokens of the prompt the next turn of its conversation is sure to begin with, so that a
            snapshot is kept there too; 0 if that is not known. If it is not the whole prompt, no later turn repeats
            the answer.
        prediction: What the client expects the answer to be for the most part. Drafts are copied from it.
    """

    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    namespace: str = ""
    priority: int = 0
    return_cache_info: bool = False
    sees_all: bool = False
    return_waited: bool = False
    hold: bool = False
    position_jumps: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()
    media: tuple[MediaInput, ...] = ()
    thought_limit: ThoughtLimit | None = None
    post: str = ""
    snapshot_at: tuple[int, ...] = ()
    turn_end: int = 0
    prediction: PromptIds | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request(RequestFields):
    """One sequence to continue.

    Attributes:
        rid: The client's name for the request. No two live requests have the same name.
        input_ids: The tokens of the prompt, at least one. Any sequence of integers may be given.
        sampling: Its `n` is 1, since the front makes one request for each answer.
        is_streamed: Whether outputs come as they are made. Otherwise nobody reads the answer while it grows, and
            several outputs may come as one: the first comes at once, the later ones at most ten times a second.
    """

    rid: str
    input_ids: PromptIds
    sampling: SamplingParams = SamplingParams()
    is_streamed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", PromptIds.of(self.input_ids))
        TokenIds(MAX_TOP_LOGPROBS).read("token_ids_logprob", self.token_ids_logprob)
        for name in ("namespace", "post"):
            require(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        require(self.sampling.n == 1, "n", "1 in an engine request", self.sampling.n)
        if all(map(operator.is_, _PLAIN_OF(self), _PLAIN.values())):
            return
        _PRIORITY.read("priority", self.priority)
        _TOP_LOGPROBS.read("top_logprobs_num", self.top_logprobs_num)
        num_prompt = len(self.input_ids)
        start_rule = f"an integer from -1 to {num_prompt}, the length of the prompt"
        Integer(-1, num_prompt, start_rule).read("logprob_start_len", self.logprob_start_len)
        if not self.return_logprob:
            for name, default in (("logprob_start_len", -1), ("top_logprobs_num", 0), ("token_ids_logprob", ())):
                require(getattr(self, name) == default, name, "left out without return_logprob", getattr(self, name))
        if self.thought_limit is not None:
            require(self.sampling.grammar is not None, "thought_limit", "left out without a grammar", None)
        self._check_program_fields()
        if self.media:
            self._check_media()
        if self.snapshot_at:
            ends = (0, *self.snapshot_at, num_prompt + 1)
            require(
                all(map(is_int, ends)) and all(low < high for low, high in itertools.pairwise(ends)),
                "snapshot_at",
                f"ascending integers from 1 to {num_prompt}, the length of the prompt",
                self.snapshot_at,
            )
        rule = f"an integer from 0 to {num_prompt}, the length of the prompt"
        Integer(0, num_prompt, rule).read("turn_end", self.turn_end)

    def _check_program_fields(self) -> None:
        """Holds, position jumps and joined prompts."""
        for name in ("is_streamed", "hold"):
            Flag().read(name, getattr(self, name))
        if self.hold:
            require(self.sampling.max_new_tokens == 0, "max_new_tokens", "0 in a hold", self.sampling.max_new_tokens)
            require(not self.return_logprob, "return_logprob", "left out of a hold", self.return_logprob)
            require(not self.joined, "joined", "left out of a hold, which keeps a prompt without branches", self.joined)
        if self.position_jumps:
            indices = [index for index, _ in self.position_jumps]
            are_whole = all(is_int(index) and is_int(extra) for index, extra in self.position_jumps)
            require(
                are_whole
                and all(0 <= index <= len(self.input_ids) for index in indices)
                and all(low < high for low, high in itertools.pairwise(indices))
                and all(0 < extra < 2**31 for _, extra in self.position_jumps),
                "position_jumps",
                f"pairs of an ascending index in [0, {len(self.input_ids)}] and a jump in [1, 2^31)",
                self.position_jumps,
            )
        if self.joined:
            require(
                2 <= len(self.joined) <= MAX_BRANCHES + 1
                and all(is_int(index) for index in self.joined)
                and self.joined[0] >= 0
                and all(low <= high for low, high in itertools.pairwise(self.joined)),
                "joined",
                f"where each of 1 to {MAX_BRANCHES} branches begins and the last ends, never descending",
                self.joined,
            )
            require(
                0 < self.joined[-1] < len(self.input_ids),
                "joined",
                f"such that branches end in [1, {len(self.input_ids)}), since tokens must come before and behind them",
                self.joined[-1],
                "put at least one token behind the branches",
            )
            require(
                not self.wants_prompt_logprobs,
                "logprob_start_len",
                "-1 in a joined prompt, whose tokens do not all follow one another",
                self.logprob_start_len,
                "leave it out",
            )

    def _check_media(self) -> None:
        ends = [0, *(item.end for item in self.media)]
        starts = [*(item.start for item in self.media), len(self.input_ids)]
        is_ordered = all(end <= start for end, start in zip(ends, starts, strict=True))
        require(is_ordered, "media", "in the order of their tokens, inside the prompt", starts[:-1], "correct them")
        for name in ("position_jumps", "joined"):
            value = getattr(self, name)
            require(not value, name, "left out of a prompt with images or videos", value, "leave it out")
        require(
            not self.wants_prompt_logprobs or self.logprob_start_len >= ends[-1],
            "logprob_start_len",
            f"at least {ends[-1]}, behind the images and videos, whose tokens are placeholders that nothing predicts",
            self.logprob_start_len,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are scored."""
        return self.return_logprob and 0 <= self.logprob_start_len < len(self.input_ids)


_PLAIN = {
    field.name: field.default
    for field in dataclasses.fields(Request)
    if field.name not in ("rid", "input_ids", "sampling", "namespace", "post")
}
"""What most requests have, and what breaks no rule."""
_PLAIN_OF = operator.attrgetter(*_PLAIN)


class FinishType(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended, and the token or string that ended it.

    Attributes:
        type: Why.
        matched: The stop token, stop string or stop pattern.
        message: What went wrong, with ERROR.
        blames_grammar: With ERROR, whether the request's grammar is the cause, so that the client can do something.
    """

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    blames_grammar: bool = False

    def to_error(self, grammar: GrammarSpec | str | None = None) -> JsgError:
        """The exception for a request that ended with ERROR, whose grammar this is."""
        message = self.message or "the engine failed this request"
        field = grammar.field if isinstance(grammar, GrammarSpec) else None
        return GrammarError(message, field=field) if self.blames_grammar else JsgError(message)


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step added to one request. A frozen class would be four times as slow to build.

    Attributes:
        rid: The name of the request.
        token_ids: New output tokens. There may be none at an abort or a failure, and for a request without output.
        finish: Why the request ended. It is set in the last output only.
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens whose keys and values were cached at the first admission.
        logprobs: One for each new token, if the request asked for them.
        prompt_logprobs: Set in the first output only, if the request asked for them.
        queue_s: Seconds from the arrival at the engine to the first admission.
        waited: For how long the request has waited for what, if it has waited since the last output.
        cache_report: Set in the first output only, if the request asked for it.
        constraint: Set in every output that has tokens, if the request asked for it.
        drafts: Those of all steps so far, if there were some and the request asked for it.
        passed_ids: Set in the last output only: the tokens of the outputs that a hub has passed on to a worker unread.
        vector: Set in the first output only, where the model embeds: the hidden state of the last prompt token after
            the final norm, in float32. The output token beside it means nothing.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: TokenScores | None = None
    queue_s: float = 0.0
    waited: Waited | None = None
    cache_report: CacheReport | None = None
    constraint: ConstraintReport | None = None
    drafts: DraftReport | None = None
    vector: bytes | None = None
    passed_ids: tuple[int, ...] = ()

    @staticmethod
    def join(outputs: "Sequence[RequestOutput]") -> "RequestOutput":
        """One output of several that follow one another."""
        reports = [output.constraint for output in outputs if output.constraint is not None]
        return RequestOutput(
            rid=outputs[0].rid,
            token_ids=tuple(itertools.chain.from_iterable(output.token_ids for output in outputs)),
            finish=outputs[-1].finish,
            prompt_tokens=max(output.prompt_tokens for output in outputs),
            cached_tokens=max(output.cached_tokens for output in outputs),
            logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in outputs)),
            prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
            queue_s=max(output.queue_s for output in outputs),
            waited=sum_of(output.waited for output in outputs),
            cache_report=next((o.cache_report for o in outputs if o.cache_report is not None), None),
            constraint=ConstraintReport.join(reports) if reports else None,
            drafts=outputs[-1].drafts,
            vector=next((o.vector for o in outputs if o.vector is not None), None),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """How the vector of a text is made of the hidden state of its last token.

    Attributes:
        width: The length of a whole vector.
        is_normed: Whether vectors have the length 1 in the Euclidean norm.
        dimensions: The lengths to which the model's vectors may be cut; None for every length.
    """

    width: int
    is_normed: bool = True
    dimensions: tuple[int, ...] | None = ()


def namespace_digest(namespace: str) -> str:
    """A digest that tells namespaces apart and may be shown, since it hides the name of a tenant or a salt."""
    return hashlib.sha256(namespace.encode(errors="surrogatepass")).hexdigest()[:16]


def expand_answers(sampling: SamplingParams, fresh_seed: int) -> Sequence[SamplingParams]:
    """One `SamplingParams` with n = 1 and a seed of its own for each of the n answers."""
    seed = fresh_seed if sampling.sampling_seed is None else sampling.sampling_seed
    return [altered(sampling, n=1, sampling_seed=(seed + i) % 2**64) for i in range(sampling.n)]


def altered[Record](record: Record, **values: Any) -> Record:
    """A copy of a dataclass with other values, which are known to be right.

    Nothing is checked again, as `dataclasses.replace` would do: one HTTP request may make a thousand such copies.
    """
    made = object.__new__(type(record))
    names, values_of = _fields_of(type(record))
    for name, value in zip(names, values_of(record), strict=True):
        object.__setattr__(made, name, value)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@functools.cache
def _fields_of(kind: Any) -> tuple[Sequence[str], Callable[[object], tuple[Any, ...]]]:
    names = [field.name for field in dataclasses.fields(kind)]
    return names, operator.attrgetter(*names)
