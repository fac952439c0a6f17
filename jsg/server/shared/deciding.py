"""Decides: an input, computed once, with many questions after it, whose labels are scored.

The input is a conversation. It and the text of a question are one turn of the user, unless the input ends in another
turn. So the prompts of all questions begin with the same tokens, the first of them computes these, and the others find
them in the cache. A model without a chat template reads plain text.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, final

from fastapi import Request

from jsg.errors import RequestError
from jsg.lang.tokens.choices import decide
from jsg.lang.tokens.scoring import ScoreLimits, ScorePlan
from jsg.lang.tokens.trie import TokenTrie
from jsg.lang.words.decisions import BETWEEN, RAW_CUE, Decision, Question
from jsg.processing.parts import TextPart
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import ApiCall
from jsg.server.front import Front
from jsg.server.generation import MAX_ANSWERS, MAX_PROMPT_TOKENS, MAX_SCORES, new_rid
from jsg.server.http.body import ClientNames
from jsg.server.http.event_stream import until_disconnect
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.client_text import Stretch, cut, encode_stretches
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt, encode_parts
from jsg.speech.prompts.turns import ChatTurns, Opening
from jsg.speech.rules.thinking import ThoughtWish

Messages = Sequence[dict[str, Any]]

_CHARS_OF_ONE = 32  # a label and its probability


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """What the questions are about.

    Attributes:
        build: Makes the conversation, in the form of chat templates with a `MediaSource` for each picture.
        size: Its size in characters.
        field: The field of the body that holds it.
    """

    build: Callable[[], Messages]
    size: int
    field: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """The answers to all questions.

    Attributes:
        decisions: One for each question.
        num_input: The number of tokens of the input and of all questions with their labels.
        num_computed: How many tokens were computed for them. The others came from the prefix cache.
    """

    decisions: tuple[Decision, ...]
    num_input: int
    num_computed: int

    @property
    def num_cached(self) -> int:
        """The number of input tokens that were cached before, or that several questions have in common."""
        return max(0, self.num_input - self.num_computed)

    @property
    def num_chars(self) -> int:
        """About how many characters its probabilities take in a response."""
        return _CHARS_OF_ONE * sum(len(decision.probabilities) for decision in self.decisions)


def as_text(value: Any) -> str:
    """A text as it is, and any other JSON value as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def decide_all(
    request: Request,
    front: Front,
    call: ApiCall,
    given: Input,
    questions: Sequence[Question],
    *,
    names: Sequence[str],
    namespace: str,
    priority: int = 0,
) -> Decided:
    """Asks all questions about an input.

    All are in the engine at once, as far as the limits of one generation allow; the others follow.

    Args:
        request: The HTTP request.
        front: The server.
        call: The HTTP request as the generations know it.
        given: The input.
        questions: The questions.
        names: The field of the body that holds each question.
        namespace, priority: As in `types.Request`.

    Raises:
        JsgError: The input or a question does not fit the model or a limit, or as `Generation.run`.
    """
    if front.generator.info.embedder is not None:
        raise front.lacks(call.route, "a model that generates text")
    shared = await _shared(front, given, namespace)
    size = shared.num_chars(questions)
    tails = await front.generator.beside(lambda: [shared.tail(question) for question in questions], size)
    asked = _Asked(front, call, names, namespace=namespace, priority=priority)
    decisions: list[Decision] = []
    async for wave in asked.waves(shared, tails):
        answers = await asked.answers(request, wave)
        for plan in wave:
            own, answers = answers[: len(plan.prompts)], answers[len(plan.prompts) :]
            index = len(decisions)
            work = functools.partial(_decision, questions[index], plan, own, front)
            with _naming(names[index]):
                decisions.append(await front.generator.beside(work, tails[index].num_tokens))
    num_input = len(shared.prompt.input_ids) + sum(tail.num_tokens for tail in tails)
    return Decided(tuple(decisions), num_input, asked.num_computed)


def names_of_input(field: str) -> ClientNames:
    """The names in errors where an input is in this field."""
    return ClientNames(dict.fromkeys(("messages", "prompt", "input_ids"), field), {"text": field})


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """An error about choices that is raised inside names the question that has them."""
    try:
        yield
    except RequestError as error:
        ClientNames({"choices": field}).give(error)
        raise


def _decision(question: Question, plan: ScorePlan, answers: Sequence[Answer], front: Front) -> Decision:
    selection = decide(question.labels, plan.read(answers, front.generator.tokenizer))
    return Decision.of(question.kind, selection, front.server_config.decision_temperature)


# Prompts.


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Tail:
    """The end of the prompt of a question.

    Attributes:
        ids: The tokens of the question.
        labels: The tokens of each label after these.
        num_tokens: The number of all these tokens. Equal beginnings of labels count once.
    """

    ids: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    num_tokens: int


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """The beginning of the prompts of all questions.

    Attributes:
        prompt: Its tokens.
        between: The text between it and a question.
        behind: The text after a question, as a template wrote it or as the end of a plain prompt.
        blank: What comes before a label.
    """

    tokenizer: Tokenizer
    plain: frozenset[str]
    max_tokens: int
    prompt: EncodedPrompt
    between: str
    behind: str
    blank: str

    def num_chars(self, questions: Sequence[Question]) -> int:
        """The number of characters to encode for questions."""
        around = len(self.between) + len(self.behind)
        return sum(around + len(each.text) + sum(map(len, each.labels)) for each in questions)

    def tail(self, question: Question) -> _Tail:
        """Encodes a question. Words of clients never become special tokens."""
        text = [Stretch(self.between + question.text, is_markup=False), Stretch(self.behind, is_markup=True)]
        ids = self._encode(text, self.prompt.input_ids)
        labels = [self._encode([Stretch(self.blank + label, is_markup=False)], ids) for label in question.labels]
        return _Tail(ids, tuple(labels), len(ids) + len(TokenTrie(labels).children) - 1)

    def choices(self, tail: _Tail) -> EncodedChoices:
        """The prompt of a question, with its labels as choices."""
        whole = dataclasses.replace(self.prompt, input_ids=self.prompt.input_ids + tail.ids)
        return EncodedChoices(before=whole, common_ids=(), choice_ids=tail.labels)

    def _encode(self, text: list[Stretch], before: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            encode_stretches(
                self.tokenizer,
                cut(self.tokenizer, text, self.plain),
                param="questions",
                last_id=before[-1] if before else None,
                max_tokens=self.max_tokens,
            )
        )


async def _shared(front: Front, given: Input, namespace: str) -> _Shared:
    tokenizer, chat = front.generator.tokenizer, front.chat
    limit = front.generator.info.max_request_tokens
    messages = await front.threads.run(given.build, given.size)
    if messages[-1]["role"] != "user":
        messages = [*messages, {"role": "user", "content": ""}]
    if tokenizer.chat_template is None:
        text = _plain_text(messages, given.field)
        prompt = await front.generator.beside(
            lambda: encode_parts(tokenizer, [TextPart(text)], max_tokens=limit), given.size
        )
        behind, blank = RAW_CUE, " "
    else:
        kwargs = ThoughtWish(is_on=False).template_kwargs(chat.template, {})
        prompt, behind = await front.media.encode(
            chat.until_end, lambda: messages, given.size, chat.max_tokens, namespace=namespace, template_kwargs=kwargs
        )
        behind, blank = before_answer(lambda: front.turns, behind)
    between = BETWEEN if messages[-1]["content"] else ""
    return _Shared(tokenizer, frozenset(front.media.placeholders.values()), limit, prompt, between, behind, blank)


def before_answer(turns: Callable[[], ChatTurns], behind: str) -> tuple[str, str]:
    """The text between a question and an answer that is given, and the blank before the answer if there is one.

    A generation prompt may leave a blank to the model, or open a thought, where the template writes a given answer
    otherwise. Where it has ended a thought, a given answer may have more after that. A blank is encoded with the word
    after it.
    """
    try:
        opening = turns().opening(("user", "assistant"))
    except RequestError:  # the template does not write one turn after another
        return behind, ""
    if behind.endswith(opening.reply):
        behind = behind.removesuffix(opening.reply) + opening.text
    else:
        behind += _rest(opening, behind)
    text = behind.rstrip(" ")
    return text, behind[len(text) :]


def _rest(opening: Opening, behind: str) -> str:
    """What the template writes on before a given answer, where the end of `behind` goes further than both its ways."""
    for start in range(len(behind) - len(opening.certain)):
        if opening.certain and opening.text.startswith(behind[start:]):
            return opening.text[len(behind) - start :]
    return ""


def _plain_text(messages: Messages, field: str) -> str:
    """The text for a model without a chat template. Raises RequestError for what is no text of the user."""
    for message in messages:
        if message["role"] != "user" or not isinstance(message["content"], str):
            raise RequestError(
                f"{field} must be text of the user for a model without a chat template, but has other items; write "
                "everything into one text",
                field,
            )
    return BETWEEN.join(message["content"] for message in messages)


# The engine.


@final
class _Asked:
    """The requests of one call.

    Attributes:
        num_computed: The number of tokens that were computed so far.
    """

    def __init__(self, front: Front, call: ApiCall, names: Sequence[str], **fields: Any) -> None:
        """`fields` are fields of each `Prompt`; the other arguments are those of `decide_all`."""
        self.num_computed = 0
        self._front = front
        self._call = call
        self._names = names
        self._rid = f"decision-{new_rid()}"
        self._fields = fields
        self._most = min(front.generator.admission.config.max_requests_per_key or MAX_ANSWERS, MAX_ANSWERS)
        self._num_begun = 0

    async def waves(self, shared: _Shared, tails: Sequence[_Tail]) -> AsyncIterator[list[ScorePlan]]:
        """Plans the requests, and gives as many plans at a time as one generation may have, or one plan with more."""
        room = (self._most, MAX_PROMPT_TOKENS, MAX_SCORES)
        limits = ScoreLimits(prompts=MAX_ANSWERS, tokens=MAX_PROMPT_TOKENS, scores=MAX_SCORES)
        wave: list[ScorePlan] = []
        used = (0, 0, 0)
        for index, tail in enumerate(tails):
            fields = {"rid": f"{self._rid}-{index}", "limits": limits, **self._fields}
            size = len(shared.prompt.input_ids) * len(tail.labels) + tail.num_tokens
            with _naming(self._names[index]):
                work = functools.partial(_planned, shared, tail, fields)
                plan = await self._front.generator.beside(work, size)
            cost = _cost(plan.prompts)
            total = tuple(map(sum, zip(used, cost, strict=True)))
            if wave and any(spent > limit for spent, limit in zip(total, room, strict=True)):
                yield wave
                wave, total = [], cost
            wave.append(plan)
            used = total
        yield wave

    async def answers(self, request: Request, wave: Sequence[ScorePlan]) -> Sequence[Answer]:
        """The answers to all requests of a wave, which are several generations where one plan has too many for one."""
        prompts = [prompt for plan in wave for prompt in plan.prompts]
        return [
            answer for some in itertools.batched(prompts, self._most) for answer in await self._generated(request, some)
        ]

    async def _generated(self, request: Request, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        """The answers of one generation. A later one waits for the room that the first one had."""
        call = dataclasses.replace(self._call, is_let_in=self._call.is_let_in or self._num_begun > 0)
        admission, is_first = self._front.generator.admission, not self._num_begun
        async with contextlib.nullcontext() if is_first else admission.room(call.caller.tenant, len(prompts)):
            self._num_begun += 1
            generation = await self._front.generator.begin(call, prompts)
        await until_disconnect(request, generation.complete())
        self.num_computed += sum(len(each.request.input_ids) - each.cached_tokens for each in generation.answers)
        return generation.answers


def _planned(shared: _Shared, tail: _Tail, fields: Mapping[str, Any]) -> ScorePlan:
    return ScorePlan(shared.choices(tail), **fields)


def _cost(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    return (
        len(prompts),
        sum(len(prompt.input_ids) + prompt.sampling.max_new_tokens for prompt in prompts),
        sum(prompt.num_scores for prompt in prompts),
    )
