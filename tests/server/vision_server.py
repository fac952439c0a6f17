"""Servers by `jsg serve` of a small random model that sees, and every way in which clients send it a file."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.battery import PROGRAM
from tests.server.running import RunningServer, running

type Body = dict[str, Any]


def vision_server(
    model_dir: Path, compile_cache_dir: str, *options: str
) -> contextlib.AbstractContextManager[RunningServer]:
    """One shape for every step, of up to 64 tokens: little compiles, and answers are the same to the last bit."""
    command = ["-m", "jsg.cli", "serve", str(model_dir), "--port", "0", "--compilation-cache-dir", compile_cache_dir]
    sizes = ["--max-running-requests", "4", "--max-total-tokens", "4096", "--deterministic"]
    return running([*command, *sizes, *options])


def program(kind: str, source: Any) -> Body:
    """A program that looks at a file, as `POST /v1/programs` takes it. `source` stands in its node."""
    first, _, last = PROGRAM["nodes"]
    media = {"kind": "media", "id": 1, "stream": 0, "line": "ask:2", "source": source}
    is_argument = source == {"argument": "q"}
    media |= {"num_frames": 2} if is_argument and kind == "video" else {}
    arguments = [{"name": "q", "kind": kind}] if is_argument else []
    return PROGRAM | {"arguments": arguments, "nodes": [first, media, last]}


def _chat(field: str) -> Callable[[str], Body]:
    return lambda file: {
        "messages": [{"role": "user", "content": [{"type": field, field: {"url": f"data:;base64,{file}"}}]}]
    }


def _responses(file: str) -> Body:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{file}"}
    return {"input": [{"role": "user", "content": [part]}]}


def _anthropic(file: str) -> Body:
    source = {"type": "base64", "media_type": "image/png", "data": file}
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


def image_part(file: str) -> Body:
    """A picture in a prompt that comes in parts."""
    return {"image": file, "media_type": "image/png"}


def video_part(file: str) -> Body:
    """A video in one."""
    return {"video": file, "media_type": "video/mp4", "num_frames": 2}


FEW = {"sampling_params": {"max_new_tokens": 2}}
IMAGE_WAYS: dict[str, Callable[[str], Body]] = {
    "/generate": lambda file: {"text": "a<image>b", "image_data": file, **FEW},
    "/generate of parts": lambda file: {"prompt": ["a", image_part(file), "b"], **FEW},
    "/generate of several": lambda file: {"text": ["a", "b"], "image_data": [None, [file]], **FEW},
    "/select": lambda file: {"prompt": ["a", image_part(file)], "choices": ["c", "d"]},
    "/tokenize": _chat("image_url"),
    "/v1/chat/completions": lambda file: _chat("image_url")(file) | {"max_tokens": 2},
    "/v1/completions": lambda file: {"prompt": "a", "image_data": [file], "max_tokens": 2},
    "/v1/messages": lambda file: _anthropic(file) | {"max_tokens": 2},
    "/v1/messages/count_tokens": _anthropic,
    "/v1/programs": lambda file: {"graph": program("image", image_part(file))},
    "/v1/programs with an argument": lambda file: {
        "graph": program("image", {"argument": "q"}), "arguments": {"q": image_part(file)},
    },
    "/v1/responses": lambda file: _responses(file) | {"max_output_tokens": 2},
    "/v1/responses/input_tokens": _responses,
}  # fmt: skip
"""Path, and what is said of it → the body for a picture in base64."""

VIDEO_WAYS: dict[str, Callable[[str], Body]] = {
    "/generate": lambda file: {"text": "a<video>b", "video_data": file, "num_frames": 2, **FEW},
    "/generate of parts": lambda file: {"prompt": [video_part(file)], **FEW},
    "/v1/chat/completions": lambda file: _chat("video_url")(file) | {"max_tokens": 2},
    "/v1/completions": lambda file: {"prompt": "a", "video_data": [file], "num_frames": 2, "max_tokens": 2},
    "/v1/programs": lambda file: {"graph": program("video", video_part(file))},
    "/v1/programs with an argument": lambda file: {
        "graph": program("video", {"argument": "q"}), "arguments": {"q": video_part(file)},
    },
}  # fmt: skip
"""The same for a video."""


def path_of(way: str) -> str:
    """The path in a key of `IMAGE_WAYS` and `VIDEO_WAYS`."""
    return way.partition(" ")[0]
