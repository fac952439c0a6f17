"""What the embedded models answer on so many devices, as JSON: `python -m tests.engine.parallel_embedded 2 CACHE`.

With `deterministic` behind it the engines are deterministic.
"""

import io
import json
import sys

from PIL import Image, ImageDraw

import jsg
from tests.engine.late import late_programs

PROPERTIES = {"name": {"enum": ["Rome", "Paris"]}, "size": {"type": "integer", "maximum": 9999}}
SCHEMA = json.dumps(
    {"type": "object", "properties": PROPERTIES, "required": ["name", "size"], "additionalProperties": False}
)


def square() -> bytes:
    """A red square, as a PNG."""
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).rectangle((16, 16, 48, 48), fill="red")
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def main() -> None:
    knobs = {
        "tp_size": int(sys.argv[1]),
        "compilation_cache_dir": sys.argv[2],
        "max_running_requests": 4,
        "max_total_tokens": 2048,
        "chunked_prefill_size": 64,
        "deterministic": "deterministic" in sys.argv,
    }
    answers = []
    with late_programs():
        tiny, seeing = jsg.Engine("tiny", **knobs), jsg.Engine("tiny-vision", **knobs)
    with tiny as engine:
        prompts = ["The capital of Italy is", "The capital of France is"]
        for mode in ("draft", "retokenize", "off"):
            params = {"temperature": 0.5, "sampling_seed": 1, "max_new_tokens": 40, "json_schema": SCHEMA}
            answers += [answer["text"] for answer in engine.generate(prompts, params | {"jump_forward": mode})]
        answers += [answer["text"] for answer in engine.generate(prompts, {"temperature": 0, "max_new_tokens": 16})]
    with seeing as engine:
        for question in ("What color is the square?", "How many shapes are there?"):
            params = {"temperature": 0, "max_new_tokens": 8}
            answers.append(engine.generate(f"<image>\n{question}", params, image_data=square())["text"])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
