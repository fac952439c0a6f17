"""A small random model that sees, with a tokenizer of bytes, and pictures to show it."""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.golden.vision_variants import IMAGE_TOKEN, SIZE, VIDEO_TOKEN, vision_tensors, write_vision_checkpoint
from tests.server.byte_tokenizer import SPECIAL_TOKENS, write_byte_tokenizer

PATCHES = 16  # of a tile: tokens that a picture of the variant "llava" takes

VISION_TEMPLATE = (  # in the form of Hugging Face's LLaVA templates: contents are lists of parts, pictures come first
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'video') %}<video>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_special_tokens() -> list[str]:
    """Special tokens, of which the placeholders have the ids that the checkpoint gives them."""
    num_bytes = 256
    fillers = [f"<|{i}|>" for i in range(num_bytes + len(SPECIAL_TOKENS), IMAGE_TOKEN)]
    assert VIDEO_TOKEN == IMAGE_TOKEN + 1
    return [*SPECIAL_TOKENS, *fillers, "<image>", "<video>"]


def write_vision_model(directory: Path, variant: str = "llava", chat_template: str | None = VISION_TEMPLATE) -> Path:
    """Config, weights from a seed, tokenizer, and how pictures are cut."""
    write_vision_checkpoint(directory, variant, vision_tensors(variant, 0))
    write_byte_tokenizer(directory, chat_template, vision_special_tokens())
    config = json.loads((directory / "config.json").read_text())
    side = {"height": SIZE, "width": SIZE}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIZE}, "crop_size": side}
    if "image_grid_pinpoints" in config:
        processor["image_processor_type"] = "LlavaNextImageProcessor"
        processor["image_grid_pinpoints"] = config["image_grid_pinpoints"]
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def png(seed: int = 0, size: tuple[int, int] = (30, 41)) -> bytes:
    """A picture of coloured noise, of this height and width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return saved(Image.fromarray(pixels))


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """Its file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"
