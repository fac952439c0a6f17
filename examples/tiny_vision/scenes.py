"""Pictures of coloured shapes: what is in one, and its pixels.

A scene is up to four shapes in the cells of a 3 × 3 grid. For each color one shape is held out at six of the nine
places: no training scene shows it there and no training question names it there.
"""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]

COLORS: dict[str, Rgb] = {
    "red": (215, 40, 40),
    "green": (50, 150, 60),
    "blue": (45, 80, 205),
    "yellow": (245, 225, 50),
    "orange": (240, 120, 20),
    "purple": (130, 50, 160),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring")
PLACES = (
    "in the top left",
    "at the top",
    "in the top right",
    "on the left",
    "in the center",
    "on the right",
    "in the bottom left",
    "at the bottom",
    "in the bottom right",
)
"""Names of the cells, in reading order."""
HELD_OUT = frozenset(
    (color, SHAPES[(2 * index + 1) % len(SHAPES)], cell)
    for index, color in enumerate(COLORS)
    for cell in range(len(PLACES))
    if (index + cell) % 3 != 0
)
"""What training never shows and never names: one shape of each color, at six of the nine places."""
MAX_SHAPES = 4


@dataclass(frozen=True)
class Shape:
    """One shape: its cell counts in reading order; width and offsets are in cells."""

    color: str
    kind: str
    cell: int
    width: float = 0.75
    offset: tuple[float, float] = (0.0, 0.0)
    turn: float = 0.0
    shade: Rgb = (0, 0, 0)

    @property
    def place(self) -> str:
        """Where it is, such as "at the top"."""
        return PLACES[self.cell]

    @property
    def name(self) -> str:
        """Such as "a red circle"."""
        return f"{article(self.color)} {self.color} {self.kind}"

    @property
    def is_held_out(self) -> bool:
        """Training shows nothing like it in its place."""
        return (self.color, self.kind, self.cell) in HELD_OUT


@dataclass(frozen=True)
class Scene:
    """Shapes in reading order on a plain or grainy background."""

    shapes: tuple[Shape, ...]
    background: Rgb = (255, 255, 255)
    grain: float = 0.0
    seed: int = 0

    def counted(self, color: str | None = None, kind: str | None = None) -> int:
        """How many shapes have this color and this kind, where given."""
        return len([shape for shape in self.shapes if color in (None, shape.color) and kind in (None, shape.kind)])


def article(word: str) -> str:
    """The indefinite article in front of a word."""
    return "an" if word[0] in "aeiou" else "a"


def random_scene(rng: random.Random, count: int, *, held_out: int = 0) -> Scene:
    """A scene of `count` shapes, of which `held_out` are of held-out combinations."""
    cells, shapes = rng.sample(range(len(PLACES)), count), []
    for cell, rare in sorted((cell, index < held_out) for index, cell in enumerate(cells)):
        pairs = [pair for pair in itertools.product(COLORS, SHAPES) if ((*pair, cell) in HELD_OUT) == rare]
        color, kind = rng.choice(pairs)
        width = rng.uniform(0.6, 0.9)
        room = (1 - width) / 2
        shade = tuple(min(255, max(0, value + rng.randint(-14, 14))) for value in COLORS[color])
        offset = (rng.uniform(-room, room), rng.uniform(-room, room))
        shapes.append(Shape(color, kind, cell, width, offset, rng.uniform(-0.15, 0.15), shade))
    light = rng.choice((255, rng.randint(195, 255)))
    background = tuple(min(255, light + rng.randint(-10, 10)) for _ in range(3)) if light < 255 else (255, 255, 255)
    return Scene(tuple(shapes), background, rng.choice((0.0, 0.0, rng.uniform(0, 12))), rng.getrandbits(32))


def draw(scene: Scene, side: int) -> Image.Image:
    """The scene as a square RGB picture of `side` pixels."""
    image = Image.new("RGB", (side, side), scene.background)
    pen, cell = ImageDraw.Draw(image), side / 3
    for shape in scene.shapes:
        center_x = (shape.cell % 3 + 0.5 + shape.offset[0]) * cell
        center_y = (shape.cell // 3 + 0.5 + shape.offset[1]) * cell
        _draw_shape(pen, shape, center_x, center_y, shape.width * cell / 2)
    if scene.grain == 0:
        return image
    noise = np.random.default_rng(scene.seed).normal(0, scene.grain, (side, side, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, x: float, y: float, radius: float) -> None:
    if shape.kind in ("circle", "ring"):
        box = (x - 0.92 * radius, y - 0.92 * radius, x + 0.92 * radius, y + 0.92 * radius)
        if shape.kind == "circle":
            pen.ellipse(box, fill=shape.shade)
        else:
            pen.ellipse(box, outline=shape.shade, width=max(1, round(0.32 * radius)))
        return
    sine, cosine = math.sin(shape.turn), math.cos(shape.turn)
    corners = [
        (x + radius * (cosine * a - sine * b), y + radius * (sine * a + cosine * b)) for a, b in _OUTLINES[shape.kind]
    ]
    pen.polygon(corners, fill=shape.shade)


def _star() -> list[tuple[float, float]]:
    """Five points, each between two corners nearer to the center."""
    angles = [math.pi * (index / 5 - 0.5) for index in range(10)]
    return [
        (math.cos(angle) * (0.42 if index % 2 else 1), math.sin(angle) * (0.42 if index % 2 else 1))
        for index, angle in enumerate(angles)
    ]


_ARM = 0.28
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
    "triangle": [(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)],
    "cross": [
        *((-_ARM, -0.95), (_ARM, -0.95), (_ARM, -_ARM), (0.95, -_ARM), (0.95, _ARM), (_ARM, _ARM)),
        *((_ARM, 0.95), (-_ARM, 0.95), (-_ARM, _ARM), (-0.95, _ARM), (-0.95, -_ARM), (-_ARM, -_ARM)),
    ],
    "star": _star(),
}
"""Corners of the shapes that have some, for a radius of one; y points down."""
