"""Two real engines behind one address answer as one does, and share the work."""

import concurrent.futures
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jsg as sgl
from bench.served import engines_of
from tests.server.running import RunningServer, wait_until
from tests.server.scrape import scrape_until
from tests.server.threads import ServerMaker
from tests.server.vision_model import PATCHES, base64_of, png, write_vision_model
from tests.server.vision_server import vision_server

pytestmark = pytest.mark.slow

NUM_REQUESTS = 400
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 4}


def ids_of(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(size)]


def bodies(count: int, shared_len: int) -> list[dict[str, Any]]:
    shared = ids_of(-1, shared_len)
    sizes = random.Random(1)
    return [
        {"input_ids": shared + ids_of(seed, sizes.randrange(16, 96)), "sampling_params": GREEDY}
        for seed in range(count)
    ]


def answer_all(server: RunningServer, asked: list[dict[str, Any]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return [response.json() for response in pool.map(lambda body: server.http.post("/generate", json=body), asked)]


@pytest.fixture(scope="module")
def two(make_real_server: ServerMaker) -> Iterator[RunningServer]:
    with make_real_server("--dp-size", "2") as server:
        yield server


@pytest.fixture
def one(real_server: RunningServer) -> RunningServer:
    real_server.reset()
    return real_server


def states(server: RunningServer) -> list[dict[str, Any]]:
    return server.http.get("/get_server_info").json()["internal_states"]


def test_greedy_answers_are_those_of_one_engine(one: RunningServer, two: RunningServer):
    asked = bodies(40, 200)
    expected = [answer["output_ids"] for answer in answer_all(one, asked)]
    assert [answer["output_ids"] for answer in answer_all(two, asked)] == expected


@sgl.function
def judge(s, topic):
    """Branches that are joined: what a branch has computed only its own engine holds."""
    s += "Of " + topic + ", at a length that several engines would see as a prefix of its own: "
    s += sgl.gen("essay", max_tokens=40, temperature=0, ignore_eos=True)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f" ({number}) " + sgl.gen("mark", max_tokens=4, temperature=0, ignore_eos=True)
    branches.join()
    s += " so " + sgl.select("verdict", ["good", "bad"])


def test_programs_say_and_compute_what_they_do_on_one_engine(one: RunningServer, two: RunningServer):
    graph = json.loads(judge.compile().to_json())
    told = []
    for server in (one, two):
        with sgl.RuntimeEndpoint(str(server.http.base_url)) as backend:
            called = judge.run_batch([{"topic": f"{seed} things"} for seed in range(6)], backend=backend, num_threads=4)
            said = [[state[name] for name in ("essay", "verdict")] for state in called]
        before = num_computed(server)
        for topic in ("apples", "books", "clocks"):
            answer = server.http.post("/v1/programs", json={"graph": graph, "arguments": {"topic": topic}}).json()
            assert answer["errors"] == []
            said.append([answer["variables"][name] for name in ("essay", "mark", "verdict")])
        wait_until(
            lambda server=server: all(state["num_running"] == state["num_holds"] == 0 for state in states(server))
        )
        told.append((said, num_computed(server) - before))
    assert told[0] == told[1]


def num_computed(server: RunningServer) -> int:
    """Prompt tokens that no cache had."""
    return sum(state["prompt_tokens"] - state["cached_tokens"] for state in states(server))


def test_questions_about_a_picture_go_to_who_has_seen_it(tmp_path: Path, compile_cache_dir: str):
    model = write_vision_model(tmp_path / "model")
    told = []
    for size in ("2", "1"):
        with vision_server(model, compile_cache_dir, "--dp-size", size) as server:
            answers = [
                server.http.post(
                    "/generate",
                    json={
                        "text": "<image> of which there is much to say, much more than a block holds: " + question,
                        "image_data": base64_of(png(seed)),
                        "sampling_params": GREEDY,
                    },
                ).json()
                for question in ("What?", "Where?", "Why?")
                for seed in range(4)
            ]
            assert all(answer["meta_info"]["cached_tokens"] > PATCHES for answer in answers[4:])
            counts = [state["num_encoded_tiles"] for state in states(server)]
            assert sum(counts) == 4 and min(counts) > 0
            told.append([answer["output_ids"] for answer in answers])
    assert told[0] == told[1]


def test_without_shared_prefixes_engines_do_as_much(two: RunningServer):
    """All come at once: of those that come later an engine that the machine lets run less would get fewer."""
    before, asked = states(two), bodies(NUM_REQUESTS, 0)
    (answers,) = answer_all(two, [asked[0] | {"input_ids": [body["input_ids"] for body in asked]}])
    assert all(len(answer["output_ids"]) == 4 for answer in answers)
    for key in ("prompt_tokens", "generated_tokens"):
        counts = [after[key] - b[key] for after, b in zip(states(two), before, strict=True)]
        mean = sum(counts) / 2
        assert all(abs(count - mean) <= 0.2 * mean for count in counts), (key, counts)


def test_a_shared_prefix_is_computed_once_or_once_for_each(two: RunningServer):
    """Of 64 prompts with 512 common tokens, two engines find at most one prefix less than one engine would."""
    shared = ids_of(-5, 512)
    asked = [{"input_ids": shared + ids_of(seed, 32), "sampling_params": GREEDY} for seed in range(64)]
    answers = answer_all(two, asked)
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert cached / (64 * 544) >= 0.95 * 63 * 512 / (64 * 544)


def test_a_chat_goes_on_where_it_is_cached(two: RunningServer):
    said, known = ids_of(-7, 100), 1
    for turn in range(6):
        body = {"input_ids": said, "sampling_params": GREEDY | {"max_new_tokens": 40}}
        told = two.http.post("/generate", json=body).json()
        assert told["meta_info"]["cached_tokens"] >= known - 1
        known = len(said) + 40
        said = said + told["output_ids"] + ids_of(turn, 20)


def test_one_dies_and_the_other_goes_on(make_real_server: ServerMaker):
    """A request that moves to the other engine keeps its seed."""
    with make_real_server("--dp-size", "2") as server, concurrent.futures.ThreadPoolExecutor(32) as pool:
        # Without drafts: the tree has seen them, and they would end before anyone sees them run.
        drawn = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 20, "speculative": "off"}
        asked = [body | {"sampling_params": drawn | {"sampling_seed": seed}} for seed, body in enumerate(bodies(60, 0))]
        alone = [server.http.post("/generate", json=body).json()["output_ids"] for body in asked]
        engines = engines_of(server.process.pid)
        answers = [pool.submit(server.http.post, "/generate", json=body) for body in asked]
        scrape_until(server.http, lambda found: found.get("jsg:requests_running") >= 2)
        os.kill(engines[0], signal.SIGKILL)
        responses = [answer.result() for answer in answers]
        assert {response.status_code for response in responses} <= {200, 503}
        answered = [number for number, response in enumerate(responses) if response.status_code == 200]
        assert len(answered) >= 30, "those that waited went over"
        assert [responses[number].json()["output_ids"] for number in answered] == [alone[number] for number in answered]
        wait_until(lambda: server.http.get("/health").json() == {"status": "degraded"})
