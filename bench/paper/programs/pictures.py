"""Questions to pictures and to videos; several to each."""

import io
from typing import Any

import jsg as sgl
from bench.paper.texts import Texts
from bench.paper.workload import Need, Workload

QUESTIONS_PER_PICTURE = 2.5
SIDE = 96
NUM_FRAMES = 4


@sgl.function
def picture(s, file, question, num_tokens):
    s += sgl.user(sgl.image(file) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True))


@sgl.function
def film(s, frames, question, num_tokens):
    """A film is its frames, which models that know no videos take too."""
    with s.user():
        for frame in frames:
            s += sgl.image(frame)
        s += question
    s += sgl.assistant(sgl.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True))


def png(texts: Texts) -> bytes:
    """A picture of a few coloured rectangles."""
    from PIL import Image, ImageDraw

    image, file = Image.new("RGB", (SIDE, SIDE), "white"), io.BytesIO()
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        left, top = texts.between(0, SIDE // 2), texts.between(0, SIDE // 2)
        color = (texts.between(0, 255), texts.between(0, 255), texts.between(0, 255))
        draw.rectangle((left, top, left + SIDE // 3, top + SIDE // 3), fill=color)
    image.save(file, "PNG")
    return file.getvalue()


def asked(texts: Texts, index: int) -> dict[str, Any]:
    """A question, and how long its answer is."""
    return {"question": f"Question {index}: {texts.text(10)}", "num_tokens": texts.length(40, 10, 80)}


def picture_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Two or three questions to each picture."""
    files = [png(texts) for _ in range(round(count / QUESTIONS_PER_PICTURE) + 1)]
    return [{"file": files[int(index / QUESTIONS_PER_PICTURE)], **asked(texts, index)} for index in range(count)]


def film_runs(texts: Texts, count: int) -> list[dict[str, Any]]:
    """Two questions to each film."""
    films = [[png(texts) for _ in range(NUM_FRAMES)] for _ in range(count // 2 + 1)]
    return [{"frames": films[index // 2], **asked(texts, index)} for index in range(count)]


PICTURES = frozenset[Need]({"pictures"})
WORKLOADS = (
    Workload(name="pictures", title="LLaVA-bench", program=picture, arguments=picture_runs, count=60, needs=PICTURES),
    Workload(name="films", title="questions to films", program=film, arguments=film_runs, count=20, needs=PICTURES),
)
