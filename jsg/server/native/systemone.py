"""`/v1/systemone`: the decisions of `/v1/decisions` in the form of TypeSafe's System One."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.lang.words import decisions
from jsg.lang.words.decisions import MAX_LABELS, MAX_QUESTIONS, Decision, Question, check_labels
from jsg.server.caller import CurrentCall
from jsg.server.front import ReadyFront
from jsg.server.http.body import Body, Checked, ClientNames
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.shared.deciding import Input, as_text, decide_all, names_of_input
from jsg.server.shared.fields import CACHE_SALT, EXTRA_KEY, MAX_NAME_CHARS, MODEL, PRIORITY

_JSON = "What is no text is read as JSON."

type Content = str | dict[str, Any] | list[Any]

router = new_router()


class SystemOneQuestion(Body):
    """A question about the state."""

    type: Literal["noul", "choice", "score"] = Field(description="`noul` asks whether something is so.")
    instructions: Content | None = Field(None, description=f"The question. {_JSON}")
    criteria: dict[str, Content | None] | Checked[Content] | None = Field(
        None,
        description="For `noul`: when it is `true` and when it is `false`; may be left out. For `choice`: the choices "
        f"with their descriptions or null, up to {MAX_LABELS}. For `score`: a list of levels from the lowest to the "
        f"highest, 2 to {MAX_LABELS}.",
    )

    def question(self, field: str) -> Question:
        """The question. `field` is where the client wrote it. Raises RequestError."""
        place, asked, criteria = f"{field}.criteria", as_text(self.instructions or ""), self.criteria
        if self.type == "score":
            levels = [as_text(each) for each in self._list(place)]
            check_labels(levels, place)
            return decisions.score(asked, [(level, None) for level in levels])
        described = {} if criteria is None and self.type == "noul" else self._object(place)
        texts = {name: None if text is None else as_text(text) for name, text in described.items()}
        if self.type == "choice":
            check_labels(list(texts), place, least=1)
            return decisions.choice(asked, list(texts.items()))
        if unknown := texts.keys() - {"true", "false"}:
            raise RequestError(
                f"{place} must have true and false only for noul, but has {min(unknown)[:100]!r}; leave it out", place
            )
        if not asked and not any(texts.values()):
            raise RequestError(f"{field} must have instructions or criteria, but has neither; add one", field)
        return decisions.predicate(asked, texts.get("true"), texts.get("false"))

    def _object(self, place: str) -> Mapping[str, Content | None]:
        if isinstance(self.criteria, dict):
            return self.criteria
        raise RequestError(f"{place} must be an object for {self.type}, but is none; send one", place)

    def _list(self, place: str) -> list[Content]:
        if isinstance(self.criteria, list):
            return self.criteria
        raise RequestError(f"{place} must be a list for {self.type}, but is none; send one", place)


class SystemOneBody(Body):
    """What `/v1/systemone` takes: a state, and named questions about it."""

    ERROR_NAMES: ClassVar[ClientNames] = names_of_input("state")

    state: Content = Field(description=f"What the questions are about. {_JSON}")
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)] = Field(
        description="Questions by their names. They do not see each other."
    )
    model: str | None = Field(None, description=MODEL)
    cache_salt: str | None = Field(None, max_length=MAX_NAME_CHARS, description=CACHE_SALT)
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description=EXTRA_KEY)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description=PRIORITY)


@router.post("/v1/systemone")
async def system_one(body: SystemOneBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Answers named questions about a state with probabilities, as `/v1/decisions` does, in the form of System One."""
    front.check_model(body.model)
    names = [f"questions.{name[:100]}" for name in body.questions]
    questions = [asked.question(name) for asked, name in zip(body.questions.values(), names, strict=True)]
    state = as_text(body.state)
    decided = await decide_all(
        request,
        front,
        call,
        Input(lambda: [{"role": "user", "content": state}], len(state), "state"),
        questions,
        names=names,
        namespace=call.caller.namespace(body.cache_salt, body.extra_key),
        priority=body.priority or 0,
    )
    usage = {"input_tokens": decided.num_input, "output_tokens": 0, "cached_tokens": decided.num_cached}

    def response() -> Response:
        answers = [_answer(*each) for each in zip(body.questions.values(), questions, decided.decisions, strict=True)]
        shown = dict(zip(body.questions, answers, strict=True))
        return json_response({"model": front.model_name, "answers": shown, "usage": usage})

    return await front.generator.beside(response, decided.num_chars)


def _answer(asked: SystemOneQuestion, question: Question, decision: Decision) -> dict[str, Any]:
    mass = {"label_mass": decision.label_mass}
    if asked.type == "noul":
        return {"type": "noul", "noul": decision.probabilities[0]} | mass
    if asked.type == "choice":
        said: dict[str, Any] = {"choice": question.labels[decision.best]}
        keys = question.labels
    else:
        criteria = asked.criteria if isinstance(asked.criteria, list) else []
        keys = tuple(map(str, range(len(criteria))))
        said = {"score": decision.level, "legend": dict(zip(keys, criteria, strict=True))}
    probabilities = dict(zip(keys, decision.probabilities, strict=True))
    return {"type": asked.type, **said, "confidence": decision.confidence, "probabilities": probabilities} | mass
