"""`/v1/decisions`: typed questions about an input, answered with probabilities."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jsg.lang.words.decisions import BETWEEN, Decision
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.http.failures import json_response
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import CurrentRules, new_router
from jsg.server.openai.decisions_body import DecisionItem, DecisionPart, DecisionQuestion, DecisionsBody
from jsg.server.openai.response_store import Picture, Turn
from jsg.server.openai.responses_tools import arguments_of
from jsg.server.openai.turns import messages_of
from jsg.server.shared.deciding import Decided, Input, decide_all

router = new_router()


@router.post("/v1/decisions")
async def create_decision(
    body: DecisionsBody, request: Request, rules: CurrentRules, call: CurrentCall, front: ReadyFront
) -> Response:
    """Answers questions about an input with probabilities: is something so, which choice is right, which level is it.

    The input is computed once. `label_mass` says how likely the model's answer begins with one of the labels at all.
    """
    front.check_model(body.model)
    names = [f"questions[{index}]" for index in range(len(body.questions))]
    questions = [asked.question(name) for asked, name in zip(body.questions, names, strict=True)]
    decided = await decide_all(
        request,
        front,
        dataclasses.replace(call, user=body.safety_identifier),
        _input(body, front, rules),
        questions,
        names=names,
        namespace=call.caller.namespace(body.cache_salt, body.extra_key),
        priority=body.priority or 0,
    )

    def response() -> Response:
        answers = [_answer(*pair) for pair in zip(body.questions, decided.decisions, strict=True)]
        return json_response({"model": front.model_name, "answers": answers, "usage": _usage(decided)})

    return await front.generator.beside(response, decided.num_chars)


def _input(body: DecisionsBody, front: Front, rules: FieldRules) -> Input:
    turns = [Turn("", "user", body.input)] if isinstance(body.input, str) else _merged(map(_turn, body.input))
    size = sum(len(turn.text) + sum(len(picture.url) for picture in turn.pictures) for turn in turns)
    return Input(lambda: messages_of(turns, front.chat.template, rules)[0], size, "input")


def _turn(item: DecisionItem) -> Turn:
    if item.name is not None:
        arguments = arguments_of(item.input or "") if item.arguments is None else item.arguments
        return Turn("", "assistant", arguments, call_id=item.call_id, name=item.name)
    text, pictures = "", list[Picture]()
    for part in item.parts:
        if isinstance(part, DecisionPart) and part.image_url is not None:
            pictures.append(Picture(len(text), part.image_url))
        text += part if isinstance(part, str) else part.words
    return Turn("", item.role or "tool", text, call_id=item.call_id, pictures=tuple(pictures))


def _merged(turns: Any) -> list[Turn]:
    """The turns, with one for turns of the user behind one another, which many chat templates refuse."""
    made: list[Turn] = []
    for turn in turns:
        if made and made[-1].role == turn.role == "user":
            before = made[-1].text + BETWEEN
            moved = (Picture(len(before) + picture.place, picture.url) for picture in turn.pictures)
            pictures = (*made[-1].pictures, *moved)
            made[-1] = dataclasses.replace(turn, text=before + turn.text, pictures=pictures)
        else:
            made.append(turn)
    return made


def _answer(asked: DecisionQuestion, decision: Decision) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": asked.type, "name": asked.name}
    match asked.type:
        case "predicate":
            shown["probability"] = decision.probabilities[0]
        case "choice":
            values = [choice.value for choice in asked.choices or ()]
            shown |= {"choice": values[decision.best], "confidence": decision.confidence}
            shown["probabilities"] = _pairs("value", values, decision)
        case "score":
            labels = [level.label for level in asked.levels or ()]
            shown |= {"score": decision.level, "confidence": decision.confidence}
            pairs = _pairs("label", labels, decision)
            shown["probabilities"] = [{"value": index, **pair} for index, pair in enumerate(pairs)]
    return shown | {"label_mass": decision.label_mass}


def _pairs(name: str, values: Sequence[Any], decision: Decision) -> list[dict[str, Any]]:
    return [{name: value, "probability": p} for value, p in zip(values, decision.probabilities, strict=True)]


def _usage(decided: Decided) -> dict[str, Any]:
    details = {"cached_tokens": decided.num_cached, "cache_write_tokens": decided.num_computed}
    return {
        "input_tokens": decided.num_input,
        "input_tokens_details": details,
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": decided.num_input,
    }
