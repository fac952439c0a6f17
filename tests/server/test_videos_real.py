"""The file of a video on a real engine: however it comes, the same prompt, the same tokens, its frames encoded once."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jsg as sgl
from jsg.processing.media.base64_files import write_base64
from tests.server.films import frames_of, write_two_films
from tests.server.running import RunningServer
from tests.server.vision_model import base64_of, data_url, png, write_vision_model
from tests.server.vision_server import vision_server

pytestmark = pytest.mark.slow

OPTIONS = {"deterministic": True, "max_running_requests": 4, "max_total_tokens": 4096}  # those of `vision_server`
GREEDY = {"temperature": 0, "ignore_eos": True}
NEW_TOKENS = 8
NUM_FRAMES = 3
FRAME_TOKENS = 4
NUM_TOKENS = NUM_FRAMES * FRAME_TOKENS + len("ab")
TEXT = "a<video>b"
SAMPLING = {"max_new_tokens": NEW_TOKENS, **GREEDY}


@pytest.fixture(scope="module")
def films() -> tuple[bytes, bytes]:
    return write_two_films()


@pytest.fixture(scope="module")
def film(films: tuple[bytes, bytes]) -> bytes:
    return films[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("video") / "model", "llava_next_video")


@pytest.fixture(scope="module")
def running_server(model_dir: Path, compile_cache_dir: str) -> Iterator[RunningServer]:
    with vision_server(model_dir, compile_cache_dir) as made:
        yield made


@pytest.fixture
def server(running_server: RunningServer) -> RunningServer:
    """With an empty cache."""
    assert running_server.http.post("/flush_cache").status_code == 200
    return running_server


@pytest.fixture(scope="module")
def running_engine(model_dir: Path, compile_cache_dir: str) -> Iterator[sgl.Engine]:
    with sgl.Engine(str(model_dir), compilation_cache_dir=compile_cache_dir, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(running_engine: sgl.Engine) -> sgl.Engine:
    """With an empty cache."""
    assert running_engine.flush_cache()
    return running_engine


@sgl.function
def watch(s, film):
    """The raw prompt of the other ways."""
    s += "a" + sgl.video(film, NUM_FRAMES) + "b"
    s += sgl.gen("answer", max_tokens=NEW_TOKENS, **GREEDY)


@sgl.function
def ask(s, film):
    s += sgl.user(sgl.video(film, NUM_FRAMES) + "what?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=NEW_TOKENS, **GREEDY))


def num_encoded(stats: dict[str, Any]) -> int:
    return stats["num_encoded_tiles"]


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.http.post("/generate", json={"sampling_params": SAMPLING} | body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: RunningServer, messages: list[dict[str, Any]]) -> tuple[str, int, int]:
    """The answer; the tokens of its prompt, and how many of them were in the cache."""
    body = {"messages": messages, "max_tokens": NEW_TOKENS, **GREEDY}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return response.json()["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def told(state: sgl.ProgramState) -> tuple[str, int, int]:
    """The same of a program's call."""
    meta = state.get_meta_info("answer")
    return state["answer"], meta["prompt_tokens"], meta["cached_tokens"]


def part(film: bytes) -> dict[str, Any]:
    return {"video": base64_of(film), "media_type": "video/mp4", "num_frames": NUM_FRAMES}


def test_every_way_over_http_is_one_prompt(server, film):
    """The first way computes it; all others find every token of it, so it was the same, and encode nothing."""
    before = num_encoded(server.stats())
    fields = {"text": TEXT, "num_frames": NUM_FRAMES}
    first = generate(server, **fields, video_data=base64_of(film))
    assert (first["meta_info"]["prompt_tokens"], first["meta_info"]["cached_tokens"]) == (NUM_TOKENS, 0)
    assert num_encoded(server.stats()) == before + NUM_FRAMES
    for body in (
        {**fields, "video_data": [data_url(film, "video/mp4")]},
        {**fields, "video_data": write_base64(frames_of(film))},
        {"prompt": ["a", part(film), "b"]},
    ):
        again = generate(server, **body)
        assert again["output_ids"] == first["output_ids"]
        assert again["meta_info"]["cached_tokens"] == NUM_TOKENS - 1
    with sgl.RuntimeEndpoint(str(server.http.base_url)) as endpoint:
        assert told(watch.run(film, backend=endpoint)) == (first["text"], NUM_TOKENS, NUM_TOKENS - 1)
        assert told(watch.run(list(frames_of(film)), backend=endpoint)) == (first["text"], NUM_TOKENS, NUM_TOKENS - 1)
    body = {"prompt": TEXT, "video_data": base64_of(film), "num_frames": NUM_FRAMES, "max_tokens": NEW_TOKENS, **GREEDY}
    completed = server.http.post("/v1/completions", json=body).json()
    assert completed["choices"][0]["text"] == first["text"]
    assert completed["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_TOKENS - 1
    assert num_encoded(server.stats()) == before + NUM_FRAMES


def test_every_way_in_this_process_is_that_prompt(server, engine, film, tmp_path):
    expected = generate(server, text=TEXT, video_data=base64_of(film), num_frames=NUM_FRAMES)
    path = tmp_path / "film.mp4"
    path.write_bytes(film)
    before = num_encoded(engine.get_server_info())

    def later(video: Any) -> dict[str, Any]:
        return asyncio.run(engine.async_generate(TEXT, SAMPLING, video_data=video, num_frames=NUM_FRAMES))

    ways: list[Callable[[], dict[str, Any]]] = [
        lambda: engine.generate(TEXT, SAMPLING, video_data=film, num_frames=NUM_FRAMES),
        lambda: engine.generate(TEXT, SAMPLING, video_data=str(path), num_frames=NUM_FRAMES),
        lambda: engine.generate(TEXT, SAMPLING, video_data=frames_of(film), num_frames=NUM_FRAMES),
        lambda: engine.generate([TEXT], [SAMPLING], video_data=[[film]], num_frames=NUM_FRAMES)[0],
        lambda: later(film),
        lambda: later(path),
    ]
    for number, way in enumerate(ways):
        answer = way()
        assert answer["output_ids"] == expected["output_ids"], number
        assert answer["meta_info"]["prompt_tokens"] == NUM_TOKENS
        assert answer["meta_info"]["cached_tokens"] == (NUM_TOKENS - 1 if number else 0), number
    assert told(watch.run(film, backend=engine)) == (expected["text"], NUM_TOKENS, NUM_TOKENS - 1)
    assert num_encoded(engine.get_server_info()) == before + NUM_FRAMES


def test_a_chat_a_program_and_its_messages_are_one_prompt(server, engine, film):
    before = num_encoded(server.stats())
    url = {"url": data_url(film, "video/mp4"), "num_frames": NUM_FRAMES}
    content = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "what?"}]
    answer, num_tokens, cached = chat(server, [{"role": "user", "content": content}])
    assert cached == 0
    with sgl.RuntimeEndpoint(str(server.http.base_url)) as endpoint:
        state = ask.run(film, backend=endpoint)
        assert told(state) == (answer, num_tokens, num_tokens - 1)
    question, reply = state.messages()
    assert chat(server, [question]) == (answer, num_tokens, num_tokens - 1), "the number of frames comes along"
    assert reply == {"role": "assistant", "content": answer}
    assert num_encoded(server.stats()) == before + NUM_FRAMES
    assert told(ask.run(film, backend=engine)) == (answer, num_tokens, 0)


def test_other_numbers_of_frames_are_other_prompts(engine, film):
    before = num_encoded(engine.get_server_info())
    lens = []
    for num_frames in (None, 2, 12, 100):
        answer = engine.generate(TEXT, SAMPLING, video_data=film, num_frames=num_frames)
        lens.append(answer["meta_info"]["prompt_tokens"] - len("ab"))
    assert lens == [FRAME_TOKENS * shown for shown in (8, 2, 12, 12)], "8 where nobody says how many"
    assert num_encoded(engine.get_server_info()) == before + 8 + 2 + 12


def test_a_picture_between_videos_is_seen_there(server, engine, films):
    text = "<video>a<image>b<video>c"
    data = [base64_of(film) for film in films]
    answer = generate(server, text=text, image_data=base64_of(png()), video_data=data, num_frames=NUM_FRAMES)
    picture = {"image": base64_of(png()), "media_type": "image/png"}
    by_parts = generate(server, prompt=[part(films[0]), "a", picture, "b", part(films[1]), "c"])
    assert by_parts["output_ids"] == answer["output_ids"]
    assert by_parts["meta_info"]["cached_tokens"] == answer["meta_info"]["prompt_tokens"] - 1
    inside = engine.generate(text, SAMPLING, image_data=png(), video_data=list(films), num_frames=NUM_FRAMES)
    assert inside["output_ids"] == answer["output_ids"]
    turned = engine.generate(text, SAMPLING, image_data=png(), video_data=list(films[::-1]), num_frames=NUM_FRAMES)
    assert turned["output_ids"] != answer["output_ids"]
