"""The expressions that a program appends: `gen`, `select`, turns, pictures. Each checks its arguments only."""

import json
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jsg.errors import RequestError
from jsg.lang.words.ir import (
    GEN,
    Expr,
    ExprList,
    Gen,
    MediaOf,
    Role,
    RoleBegin,
    RoleEnd,
    SamplingArgs,
    Select,
    SeparateReasoning,
    Symbol,
    check_forms,
    parts_of,
)
from jsg.lang.words.keywords import checked_keywords
from jsg.lang.words.media import image_of, video_of
from jsg.parameters import Flag, Integer, Kind, Number, OneOf, Texts, TokenIds
from jsg.speech.answers.thoughts import markers_of

DEFAULT_CHOICES_METHOD = "token_trie"
_TYPES = (int, float, bool, str)


@checked_keywords
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: Any = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    ebnf: str | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Expr:
    """Lets the model continue; the continuation becomes the variable `name`. With `choices` it is a `select`.

    An argument that is None is left to the run, and then to the backend.

    Args:
        name: The variable; None where only the text matters.
        max_tokens, min_tokens, n: The largest and smallest number of new tokens, and the number of continuations. With
            more than one the variable is a list, and the prompt goes on after the first.
        stop, stop_token_ids, stop_regex: Where the continuation ends. The match belongs neither to the text nor to the
            variable.
        temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, seed, ignore_eos:
            The fields of `jsg.SamplingParams`.
        return_logprob, logprob_start_len, top_logprobs_num, return_text_in_logprobs: Reports of `get_meta_info`.
        dtype: The answer is written as a value of that type: int, float, bool or str.
        choices, choices_method, temperature, seed: The arguments of `select`; no others can be given with `choices`.
        regex, json_schema, ebnf: The answer matches it. A schema is JSON text or a dict. Only one of these and `dtype`
            may be given.

    Raises:
        RequestError: An argument is wrong, or cannot be given with another one.
    """
    arguments = dict(locals())  # a copy, because `locals` may change while it is read
    given = {key: value for key, value in arguments.items() if value is not None and key in GEN}
    if choices is not None:
        extra = [key for key in given if key not in ("temperature", "seed")]
        if extra:
            raise RequestError(
                f"gen with choices chooses one of them and cannot honour {', '.join(extra)}; leave out that or choices",
                param=extra[0],
            )
        return select(name, choices, given.get("temperature", 0.0), choices_method, seed=seed)
    if choices_method is not None:
        raise RequestError("choices_method goes with choices, but there are none", param="choices_method")
    return Gen(_checked_name(name), sampling_args(**given))


@checked_keywords
def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """Lets the model write a whole number. The variable is text. Arguments and errors are those of `gen`."""
    return gen(**locals(), dtype=int)


@checked_keywords
def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """Lets the model write a JSON string. Its double quotes are part of the variable.

    Every character is possible, punctuation included; `json.loads(s[name])` is the bare text. Arguments and errors are
    those of `gen`.
    """
    return gen(**locals(), dtype=str)


@checked_keywords
def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: Any = None,
    *,
    seed: int | None = None,
) -> Expr:
    """Lets the model choose one of `choices`, which is appended and becomes the variable `name`.

    `get_meta_info(name)["probabilities"]` has the probability of each choice.

    Args:
        name: The variable; None where only the text matters.
        choices: The texts, at least one.
        temperature: 0 takes the best choice; above it one is drawn by the probabilities.
        choices_method: One of `jsg.token_trie` (the default: exact probabilities), `token_length_normalized`,
            `greedy_token_selection`, `unconditional_likelihood_normalized`, or its name.
        seed: The seed of the draw.

    Raises:
        RequestError: There are no choices, or an argument has the wrong type.
    """
    if choices is not None and not isinstance(choices, str):
        choices = [str(choice) if isinstance(choice, Symbol) else choice for choice in choices]
    if choices is None or isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
        raise RequestError(f"choices must be a list of texts, at least one, but got {choices!r}", param="choices")
    args = sampling_args(temperature=temperature, seed=seed)
    chosen_at = float(args.temperature or 0.0)
    return Select(_checked_name(name), tuple(choices), _method_name(choices_method), chosen_at, args.seed)


@checked_keywords
def decide(
    name: str | None = None,
    instructions: str | None = None,
    choices: Sequence[str] | Mapping[str, str | None] | None = None,
    levels: Sequence[str] | Mapping[str, str | None] | None = None,
    *,
    temperature: float = 1.0,
) -> Expr:
    """Asks a question about the prompt as it is now. Nothing is appended, so no question sees another one.

    Without `choices` and `levels` the question is whether something is so, and the variable is "Yes" or "No". Otherwise
    the variable is the likeliest choice or level. `get_meta_info(name)` has `probabilities` (of "Yes" and "No", or of
    the choices or levels in order), `label_mass`, the `probability` of "Yes", the `confidence` of a choice, and the
    `score` and `confidence` of levels.

    Args:
        name: The variable.
        instructions: The question, or what may be so.
        choices: The possible answers, 2 to 255, or a dict of them with their descriptions.
        levels: Levels from the lowest to the highest, 2 to 255, or a dict of them with their descriptions.
        temperature: The log-probabilities are divided by it, and are probabilities again then. It calibrates.

    Raises:
        RequestError: An argument is wrong, or cannot be given with another one.
    """
    if isinstance(instructions, Symbol):
        instructions = str(instructions)
    if not isinstance(instructions, str):
        raise RequestError(f"instructions must be text, but got {instructions!r}", param="instructions")
    if choices is not None and levels is not None:
        raise RequestError("a question has choices or levels, but got both; ask two questions", param="levels")
    from jsg.lang.words import decisions  # loads more than a program without decisions needs

    at = sampling_args(temperature=temperature).temperature
    if at is None or not 0 < at < math.inf:
        raise RequestError(f"temperature must be above 0 and finite, but got {temperature}", param="temperature")
    if choices is not None:
        question = decisions.choice(instructions, _options(choices, "choices"))
    elif levels is not None:
        question = decisions.score(instructions, _options(levels, "levels"))
    else:
        question = decisions.predicate(instructions)
    return Select(
        _checked_name(name), question.labels, DEFAULT_CHOICES_METHOD, float(at), None, question.text, question.kind
    )


def _options(given: Sequence[str] | Mapping[str, str | None], param: str) -> list[tuple[str, str | None]]:
    """Gives labels and descriptions. Raises RequestError."""
    from jsg.lang.words.decisions import check_labels

    pairs = given.items() if isinstance(given, Mapping) else [(each, None) for each in given]
    options: list[tuple[str, str | None]] = []
    for pair in pairs:
        label, text = (str(each) if isinstance(each, Symbol) else each for each in pair)
        if isinstance(given, str) or not isinstance(label, str) or not isinstance(text, str | None):
            raise RequestError(f"{param} must be a list of texts, or a dict of texts, but got {given!r}", param=param)
        options.append((label, text))
    check_labels([str.__str__(label) for label, _ in options], param)
    return options


def system(expr: "Expr | str | None" = None) -> ExprList:
    """A turn of the system."""
    return _turn("system", expr)


def user(expr: "Expr | str | None" = None) -> ExprList:
    """A turn of the user."""
    return _turn("user", expr)


def assistant(expr: "Expr | str | None" = None) -> ExprList:
    """A turn of the assistant."""
    return _turn("assistant", expr)


def system_begin() -> Expr:
    """Opens a turn of the system."""
    return RoleBegin("system")


def system_end() -> Expr:
    """Closes a turn of the system."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Opens a turn of the user."""
    return RoleBegin("user")


def user_end() -> Expr:
    """Closes a turn of the user."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Opens a turn of the assistant."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """Closes a turn of the assistant."""
    return RoleEnd("assistant")


def image(path_or_expr: Any) -> Expr:
    """Appends a picture, whose file is read now.

    Args:
        path_or_expr: A path, the bytes of a file, a `data:` URL, a picture of PIL; in a trace, an argument.

    Raises:
        RequestError: It is none of these, or its bytes are of an unknown kind.
        OSError: The file cannot be read.
    """
    if isinstance(path_or_expr, Symbol):
        return MediaOf(path_or_expr)
    return image_of(path_or_expr)


def video(path: Any, num_frames: int) -> Expr:
    """Appends a video, whose file is read now.

    Args:
        path: A path, the bytes of a file, a `data:` URL, or a list of frames, each of which is an argument of `image`;
            in a trace, an argument.
        num_frames: The number of frames that the model sees.

    Raises:
        RequestError: It is none of these, or of an unknown kind, or `num_frames` is less than 1.
        OSError: The file cannot be read.
    """
    frames = _whole(num_frames)
    if frames is None or frames < 1:
        raise RequestError(f"num_frames must be at least 1, but got {num_frames!r}", param="num_frames")
    if isinstance(path, Symbol):
        return MediaOf(path, frames)
    return video_of(path, frames)


def separate_reasoning(expr: "Expr | str", model_type: str) -> Expr:
    """Appends `expr`. The reasoning of its gens becomes `<name>_reasoning_content`, and only the rest `<name>`.

    This holds while they are streamed, too. The text keeps both, because the model goes on after both. With a model
    whose tokens jsg knows, the grammar of a gen governs the answer and not the reasoning before it.

    Args:
        expr: The expression.
        model_type: The kind of the model, which decides the markers of its reasoning, such as qwen3 or deepseek-r1: a
            name of the server's `--reasoning-parser`.

    Raises:
        RequestError: `model_type` is unknown.
    """
    markers_of(model_type)
    return SeparateReasoning(ExprList(parts_of(expr)), model_type)


def sampling_args(**given: Any) -> SamplingArgs:
    """Checks arguments of a gen; None counts as not given. The backend checks the ranges of all but whole numbers.

    Raises:
        RequestError: An argument is wrong, or two exclude each other.
    """
    args = {key: checked(key, GEN[key].kind, value) for key, value in given.items() if value is not None}
    check_forms(args)
    return SamplingArgs(**args)


def checked(key: str, kind: Kind, value: Any) -> Any:
    """Gives the value as `SamplingArgs` keeps it. Raises RequestError, which names it as `key`, for a wrong value."""
    match kind:
        case Integer():
            read, rule = _whole(value), "a whole number"
        case Number():
            read, rule = _number(value), "a number"
        case Flag():
            read, rule = value if isinstance(value, bool) else None, "True or False"
        case Texts():
            read, rule = _texts(value), "a text or a list of texts"
        case TokenIds():
            read, rule = _token_ids(value), "a list of token ids"
        case OneOf(values):
            word = value.__name__ if isinstance(value, type) and value in _TYPES else value
            is_right = isinstance(word, str) and word in values
            read, rule = word if is_right else None, f"{', '.join(values[:-1])} or {values[-1]}"
        case _:
            is_schema = key == "json_schema"
            text = json.dumps(value) if is_schema and isinstance(value, Mapping) else value
            rule = "text or a dict" if is_schema else "text"
            if is_schema and hasattr(value, "model_json_schema"):  # a model of Pydantic
                rule += f" (write json_schema={getattr(value, '__name__', 'Model')}.model_json_schema())"
            read = text if isinstance(text, str) else None
    if read is None:
        raise RequestError(f"{key} must be {rule}, but got {value!r}", param=key)
    return kind.read(key, read) if isinstance(kind, Integer) else read


def _turn(role: Role, expr: "Expr | str | None") -> ExprList:
    return ExprList((RoleBegin(role), *(() if expr is None else parts_of(expr)), RoleEnd(role)))


def _method_name(method: Any) -> str:
    if method is None or method == DEFAULT_CHOICES_METHOD:
        return DEFAULT_CHOICES_METHOD
    from jsg.lang.tokens.choices import method_named  # loads more than a program without select needs

    return method_named(method if isinstance(method, str) else getattr(method, "name", repr(method))).name


def _checked_name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise RequestError(f"the name of a variable must be text, but got {name!r}", param="name")
    return name


def _texts(value: Any) -> tuple[str, ...] | None:
    texts = (value,) if isinstance(value, str) else value
    is_right = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    return tuple(texts) if is_right else None


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    ids = [token for token in map(_whole, value) if token is not None]
    return tuple(ids) if len(ids) == len(value) else None


def _whole(value: Any) -> int | None:
    """Gives a whole number of any library, NumPy included, as an int; None for any other value."""
    if isinstance(value, bool):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def _number(value: Any) -> int | float | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)
