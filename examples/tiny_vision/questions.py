"""Questions about a scene, each with its only accepted answer, and the held-out cases of every kind of question.

Training asks about scenes of trained combinations of color, shape and place, and names no other. The evaluation asks
about scenes that show a held-out combination, and about that one where a question is about one shape.
"""

import json
import random
from collections.abc import Callable
from typing import NamedTuple

from scenes import COLORS, HELD_OUT, MAX_SHAPES, PLACES, SHAPES, Scene, Shape, article, random_scene

NUMBERS = ("Zero", "One", "Two", "Three", "Four")


class Question(NamedTuple):
    """What is asked about a scene and what is right; `names` is a combination that it speaks of, seen or not."""

    kind: str
    prompt: str
    answer: str
    names: tuple[str, str, int] | None = None


class Case(NamedTuple):
    """A held-out scene and a question about it."""

    scene: Scene
    question: Question


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _alone(rng: random.Random, scene: Scene, field: str) -> Shape | None:
    """A random shape that shares its color, its kind or both with no other; held-out ones first."""
    found = []
    for shape in scene.shapes:
        color, kind = (getattr(shape, part) if field in (part, "both") else None for part in ("color", "kind"))
        if scene.counted(color, kind) == 1:
            found.append(shape)
    rare = [shape for shape in found if shape.is_held_out]
    return rng.choice(rare or found) if found else None


def shape_of(rng: random.Random, scene: Scene) -> Question | None:
    """Which shape has a color that only one has."""
    shape = _alone(rng, scene, "color")
    prompt = rng.choice(("What shape is {}?", "Which shape is {}?", "What is {}?"))
    return shape and Question("shape", prompt.format(shape.color), _sentence(f"{article(shape.kind)} {shape.kind}"))


def color_of(rng: random.Random, scene: Scene) -> Question | None:
    """Which color the only shape of its kind has."""
    shape = _alone(rng, scene, "kind")
    prompt = rng.choice(("What color is the {}?", "Which color is the {}?", "Which color does the {} have?"))
    return shape and Question("color", prompt.format(shape.kind), _sentence(shape.color))


def place_of(rng: random.Random, scene: Scene) -> Question | None:
    """Where a shape is that is named by its color, its kind or both."""
    field = rng.choice(("kind", "color", "both"))
    shape = _alone(rng, scene, field)
    if shape is None:
        return None
    name = {"kind": shape.kind, "color": f"{shape.color} shape", "both": f"{shape.color} {shape.kind}"}[field]
    return Question("place", f"Where is the {name}?", _sentence(shape.place))


def thing_at(rng: random.Random, scene: Scene) -> Question | None:
    """What is in a cell, which may be empty."""
    prompt = rng.choice(("What is {}?", "What do you see {}?"))
    if rng.random() < 0.25:
        free = [cell for cell in range(9) if cell not in [shape.cell for shape in scene.shapes]]
        return Question("thing", prompt.format(PLACES[rng.choice(free)]), "Nothing.")
    rare = [shape for shape in scene.shapes if shape.is_held_out]
    shape = rng.choice(rare or scene.shapes)
    return Question("thing", prompt.format(shape.place), _sentence(shape.name))


def count_of(rng: random.Random, scene: Scene) -> Question | None:
    """How many shapes there are, or how many of a color or kind."""
    shape, chance = rng.choice(scene.shapes), rng.random()
    if chance < 0.4:
        name, number = "shapes", len(scene.shapes)
    elif chance < 0.7:
        color = shape.color if rng.random() < 0.8 else rng.choice(list(COLORS))
        name, number = f"{color} shapes", scene.counted(color=color)
    else:
        kind = shape.kind if rng.random() < 0.8 else rng.choice(SHAPES)
        name, number = f"{kind}es" if kind == "cross" else f"{kind}s", scene.counted(kind=kind)
    prompt = rng.choice(("How many {} are there?", "How many {} are in the picture?", "Count the {}."))
    return Question("count", prompt.format(name), NUMBERS[number] + ".")


def yes_no(rng: random.Random, scene: Scene) -> Question | None:
    """Whether something is in the picture; a wrong one is half right."""
    shape = _alone(rng, scene, "both") or scene.shapes[0]
    color, kind, truth = shape.color, shape.kind, rng.random() < 0.5
    if not truth and rng.random() < 0.5:
        color = rng.choice(list(COLORS))
    elif not truth:
        kind = rng.choice(SHAPES)
    truth = scene.counted(color, kind) > 0
    prompt = rng.choice(("Is there {} {} {}?", "Is there {} {} {} in the picture?", "Do you see {} {} {}?"))
    return Question("yes_no", prompt.format(article(color), color, kind), "Yes." if truth else "No.")


def either(rng: random.Random, scene: Scene) -> Question | None:
    """Which of two colors or kinds a shape has."""
    by_color = rng.random() < 0.5
    shape = _alone(rng, scene, "kind" if by_color else "color")
    if shape is None:
        return None
    right, choices = (shape.color, list(COLORS)) if by_color else (shape.kind, SHAPES)
    pair = [right, rng.choice([word for word in choices if word != right])]
    rng.shuffle(pair)
    if by_color:
        return Question("either", f"Is the {shape.kind} {pair[0]} or {pair[1]}?", _sentence(right))
    first, second = (f"{article(kind)} {kind}" for kind in pair)
    prompt = f"Is the {shape.color} shape {first} or {second}?"
    return Question("either", prompt, _sentence(f"{article(right)} {right}"))


def describe(rng: random.Random, scene: Scene) -> Question | None:
    """All there is, in reading order."""
    *front, last = (f"{shape.name} {shape.place}" for shape in scene.shapes)
    prompt = rng.choice(("Describe the picture.", "What is in the picture?", "What do you see?"))
    return Question("describe", prompt, f"There is {', '.join(front)}{' and ' if front else ''}{last}.")


def as_json(rng: random.Random, scene: Scene) -> Question | None:
    """The only shape as JSON."""
    if len(scene.shapes) != 1:
        return None
    shape = scene.shapes[0]
    place = shape.place.removeprefix("in ").removeprefix("at ").removeprefix("on ").removeprefix("the ")
    prompt = rng.choice(("Write color, shape and place as JSON.", "Describe it as JSON."))
    return Question("json", prompt, json.dumps({"color": shape.color, "shape": shape.kind, "place": place}))


def essay(rng: random.Random, scene: Scene) -> list[Question]:
    """An essay about the only shape, beside what is seen; the first question brings the essay along.

    The model reads both, and whoever asks compares: that much a program does better than a model of this size.
    """
    shape = scene.shapes[0]
    color, kind, place = shape.color, shape.kind, shape.place
    wrong = rng.choice(("", "", "color", "kind", "place", "all"))
    color = rng.choice(list(COLORS)) if wrong in ("color", "all") else color
    kind = rng.choice(SHAPES) if wrong in ("kind", "all") else kind
    place = rng.choice(PLACES) if wrong in ("place", "all") else place
    text = f"Essay: I see {article(color)} {color} {kind} {place}."
    pairs = {
        "color": (color, shape.color),
        "shape": (f"{article(kind)} {kind}", f"{article(shape.kind)} {shape.kind}"),
        "place": (place, shape.place),
    }
    asked = [(f"Compare the {word}.", f"Essay: {told}. Picture: {seen}.") for word, (told, seen) in pairs.items()]
    rng.shuffle(asked)
    return [
        Question("essay", question if index else f"{text} {question}", answer, (color, kind, PLACES.index(place)))
        for index, (question, answer) in enumerate(asked)
    ]


def one_of_essay(rng: random.Random, scene: Scene) -> Question | None:
    """An essay about the only shape and one part of it."""
    return essay(rng, scene)[0] if len(scene.shapes) == 1 else None


KINDS: dict[str, tuple[Callable[[random.Random, Scene], Question | None], float]] = {
    "shape": (shape_of, 1.0),
    "color": (color_of, 1.0),
    "place": (place_of, 1.2),
    "thing": (thing_at, 2.0),
    "count": (count_of, 7.0),
    "yes_no": (yes_no, 2.5),
    "either": (either, 1.0),
    "describe": (describe, 1.0),
    "json": (as_json, 2.0),
    "essay": (one_of_essay, 0.0),
}
"""Every kind of question with its share of the training turns; essays come in rows of their own."""


def training_scene(rng: random.Random) -> Scene:
    """A scene of trained combinations."""
    return random_scene(rng, rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4)))


def training_questions(rng: random.Random, scene: Scene) -> list[Question]:
    """One question, or an essay with its parts, that name no held-out combination."""
    while True:
        if len(scene.shapes) == 1 and rng.random() < 0.5:
            asked = essay(rng, scene)
        else:
            kind = rng.choices(list(KINDS), [share for _, share in KINDS.values()])[0]
            question = KINDS[kind][0](rng, scene)
            asked = [question] if question else []
        if asked and not any(question.names in HELD_OUT for question in asked):
            return asked


def held_out_cases(kind: str, count: int = 100, seed: int = 7) -> list[Case]:
    """`count` cases of one kind about scenes with a held-out combination, the same ones at every call."""
    rng = random.Random(f"{kind}/{seed}")
    cases: list[Case] = []
    while len(cases) < count:
        size = 1 if kind in ("json", "essay") else rng.randint(1, MAX_SHAPES)
        scene = random_scene(rng, size, held_out=rng.randint(1, min(2, size)))
        question = KINDS[kind][0](rng, scene)
        if question is not None:
            cases.append(Case(scene, question))
    return cases
