"""Pictures on a real engine over a real socket, and in this process: the same tokens, computed once."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import jsg as sgl
from tests.server.running import RunningServer
from tests.server.vision_model import PATCHES, base64_of, data_url, png
from tests.server.vision_server import vision_server

pytestmark = pytest.mark.slow

OPTIONS = {"deterministic": True, "max_running_requests": 4, "max_total_tokens": 4096}  # those of `vision_server`
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model_dir: Path, compile_cache_dir: str) -> Iterator[RunningServer]:
    with vision_server(model_dir, compile_cache_dir) as made:
        yield made


@pytest.fixture(scope="module")
def engine(model_dir: Path, compile_cache_dir: str) -> Iterator[sgl.Engine]:
    with sgl.Engine(str(model_dir), compilation_cache_dir=compile_cache_dir, **OPTIONS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _empty_cache(server: RunningServer) -> None:
    assert server.http.post("/flush_cache").status_code == 200


@sgl.function
def judge(s, data):
    """A judge of several sides: every branch looks at the one picture."""
    s += sgl.user(sgl.image(data) + "Look.")
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += sgl.user(f"Side {i}?")
        fork += sgl.assistant(sgl.gen("opinion", max_tokens=5, **GREEDY))
    forks.join()
    s += sgl.user("Which?") + sgl.assistant(sgl.select("choice", ["yes", "no"]))
    s["opinions"] = [fork["opinion"] for fork in forks]
    s["cached"] = [fork.get_meta_info("opinion")["cached_tokens"] for fork in forks]


def encoded_tiles(server: RunningServer) -> int:
    return server.stats()["num_encoded_tiles"]


def test_a_second_question_finds_the_picture_in_the_cache(server):
    before = encoded_tiles(server)

    def ask(client: openai.OpenAI, question: str, seed: int = 0) -> Any:
        content: Any = [
            {"type": "image_url", "image_url": {"url": data_url(png(seed))}},
            {"type": "text", "text": question},
        ]
        return client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": content}], max_tokens=4
        ).usage

    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client:
        first, second, other = ask(client, "what?"), ask(client, "Where?"), ask(client, "what?", seed=1)
    lead = len("user\n") + 1  # what the template writes before the picture
    assert first.prompt_tokens == lead + PATCHES + len("\nwhat?\nassistant\n") + 2
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == lead + PATCHES + 1
    assert other.prompt_tokens_details.cached_tokens == lead, "another picture is no hit"
    assert encoded_tiles(server) == before + 2


def test_every_way_gives_the_same_tokens(server, engine):
    body = {"sampling_params": {"max_new_tokens": 8, **GREEDY}}
    by_text = server.http.post("/generate", json=body | {"text": "a<image>b", "image_data": base64_of(png())}).json()
    part = {"image": base64_of(png()), "media_type": "image/png"}
    by_part = server.http.post("/generate", json=body | {"prompt": ["a", part, "b"]}).json()
    inside = engine.generate("a<image>b", body["sampling_params"], image_data=png())
    assert by_text["output_ids"] == by_part["output_ids"] == inside["output_ids"]
    later = asyncio.run(engine.async_generate("a<image>b", body["sampling_params"], image_data=png()))
    assert later["output_ids"] == inside["output_ids"]
    others = engine.generate(["a<image>b", "a<image>b"], body["sampling_params"], image_data=[png(), png(1)])
    assert others[0]["output_ids"] == inside["output_ids"] != others[1]["output_ids"]


def test_branches_of_a_program_share_a_picture(server, engine):
    before = encoded_tiles(server)
    with sgl.RuntimeEndpoint(str(server.http.base_url)) as endpoint:
        over_http = judge.run(png(), backend=endpoint)
        assert encoded_tiles(server) == before + 1
        inside = judge.run(png(), backend=engine)
    assert over_http["opinions"] == inside["opinions"] and over_http["choice"] == inside["choice"]
    for state in (over_http, inside):
        assert all(state["opinions"]) and min(state["cached"]) > PATCHES
    assert over_http.text() == inside.text()


def test_a_program_sent_whole_brings_its_picture(server, engine):
    @sgl.function
    def look(s, picture):
        s += sgl.user(sgl.image(picture) + "what?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=5, **GREEDY))

    picture = {"image": base64_of(png()), "media_type": "image/png"}
    body = {"graph": json.loads(look.compile().to_json()), "arguments": {"picture": picture}}
    posted = server.http.post("/v1/programs", json=body)
    assert posted.status_code == 200, posted.text
    assert posted.json()["variables"]["answer"] == look.run(png(), backend=engine)["answer"]
