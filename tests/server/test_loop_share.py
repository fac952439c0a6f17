"""Turns of the event loop: how much work begins in one, and whose."""

import asyncio
import json
import threading
from collections.abc import Sequence

import pytest

import jsg as sgl
from jsg.lang.executor.execution import Execution
from jsg.prompt_ids import PromptIds
from jsg.server import generation
from jsg.server.loop_share import PER_UNIT, UNITS, LoopShare
from jsg.server.native.programs import RUN_UNITS
from tests.server.running import key
from tests.server.threads import ServerMaker

ONE = {"max_new_tokens": 1, "stop": ["x" * 1000, "y" * 1000]}


async def test_so_much_begins_in_a_turn_and_no_more():
    share, turn, turns = LoopShare(), 0, list[int]()

    async def work() -> None:
        await share.turn("a")
        turns.append(turn)

    tasks = [asyncio.create_task(work()) for _ in range(100)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    assert max(map(turns.count, turns)) <= UNITS
    assert turn < 100 / UNITS + 5, "a turn is used"
    assert share.most_units == UNITS


async def test_tenants_take_turns_and_large_work_is_paid_for():
    share, order = LoopShare(), list[str]()

    async def work(tenant: str, units: float) -> None:
        await share.turn(tenant, units)
        order.append(tenant)

    many = [asyncio.create_task(work("a", UNITS)) for _ in range(20)]
    await asyncio.sleep(0)
    await work("b", 1)
    assert order.count("a") <= 3
    many[-1].cancel()
    await asyncio.gather(*many[:-1])
    assert order.count("a") == 19
    assert share.most_units <= 2 * UNITS


async def test_a_list_is_made_in_slices():
    share, num_others = LoopShare(), 0

    async def others() -> None:
        nonlocal num_others
        while True:
            num_others += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert await share.each("a", str, range(1000)) == [*map(str, range(1000))]
    assert num_others >= 1000 / PER_UNIT / UNITS - 1
    beside.cancel()


MANY = [
    ("/generate", {"text": ["hello"] * 512, "sampling_params": ONE}),
    ("/generate", {"text": ["hello"] * 8, "sampling_params": ONE | {"n": 64}}),
    ("/v1/completions", {"prompt": ["hello"] * 512, "max_tokens": 1, "stop": ["x" * 1000]}),
    ("/v1/completions", {"prompt": ["hello"] * 4, "max_tokens": 1, "n": 128}),
    ("/v1/score", {"query": "hello", "items": ["you"] * 512, "label_token_ids": [65, 66]}),
]


@sgl.function
def branches(s: sgl.ProgramState) -> None:
    s += "hello"
    forks = s.fork(64)
    for number in range(64):
        forks[number] += f" {number}" + sgl.gen("said", max_tokens=1)
    forks.join()


def test_large_posts_begin_in_slices(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
    shares: list[LoopShare] = []

    def made() -> LoopShare:
        shares.append(LoopShare())
        return shares[-1]

    monkeypatch.setattr(generation, "LoopShare", made)
    program = {"graph": json.loads(branches.compile().to_json())}
    with make_server(server={"api_key": ("alice", "bob")}) as server:
        for path, body in [*MANY, ("/v1/programs", program)]:
            response = server.http.post(path, json=body, headers=key("alice"), timeout=60)
            assert response.status_code == 200, response.text
        assert 2 <= shares[0].most_units <= UNITS + 128 / PER_UNIT


def test_the_ids_of_a_post_are_checked_in_slices(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
    turns, renew, check = [0], LoopShare._renew, PromptIds.of

    def renewed(share: LoopShare) -> None:
        turns.append(0)
        renew(share)

    def checked(ids: Sequence[int]) -> PromptIds:
        turns[-1] += 0 if isinstance(ids, PromptIds) else len(ids)
        return check(ids)

    monkeypatch.setattr(generation, "IDS_PER_UNIT", 100)
    monkeypatch.setattr(LoopShare, "_renew", renewed)
    monkeypatch.setattr(PromptIds, "of", checked)
    with make_server() as server:
        body = {"input_ids": [[65] * 100] * 80, "sampling_params": {"max_new_tokens": 1}}
        assert server.http.post("/generate", json=body).status_code == 200
    assert sum(turns) == 80 * 100 and max(turns) <= 100 * (UNITS + 1)


@sgl.function
def questions(s: sgl.ProgramState) -> None:
    s += "a" * 500
    forks = s.fork(4)
    for number in range(4):
        forks[number] += str(number)
        forks[number] += sgl.gen("said", max_tokens=1)
    forks.join()


def test_the_ids_of_a_text_before_branches_are_checked_once(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
    """Else each branch made as many Python objects, which the garbage collector looked at."""
    lens, check = list[int](), PromptIds.of

    def checked(ids: Sequence[int]) -> PromptIds:
        if not isinstance(ids, PromptIds):
            lens.append(len(ids))
        return check(ids)

    monkeypatch.setattr(PromptIds, "of", checked)
    with make_server() as server:
        response = server.http.post("/v1/programs", json={"graph": json.loads(questions.compile().to_json())})
        assert response.status_code == 200 and not response.json()["errors"], response.text
    assert sorted(lens) == [*[1] * 8, 500]  # each branch has its number, and a request that only checks its parameters


def test_the_ids_of_texts_and_scores_are_checked_beside_the_loop_and_those_of_a_query_once(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
):
    beside, on_loop, check = list[int](), list[int](), PromptIds.of

    def checked(ids: Sequence[int]) -> PromptIds:
        if not isinstance(ids, PromptIds):
            (beside if threading.current_thread().name.startswith("jsg-") else on_loop).append(len(ids))
        return check(ids)

    monkeypatch.setattr(PromptIds, "of", checked)
    texts, ids = [chr(97 + n) * 500 for n in range(4)], [[65 + n] * 300 for n in range(4)]
    with make_server() as server:
        for path, body, expected in (
            ("/generate", {"text": texts, "sampling_params": {"max_new_tokens": 1}}, [500] * 4),
            ("/v1/score", {"query": "ab" * 200, "items": ["c" * 300] * 3, "label_token_ids": [1]}, [700] * 3),
            ("/v1/score", {"query": [65] * 400, "items": ids, "label_token_ids": [1]}, [400, *[300] * 4]),
        ):
            beside.clear()
            response = server.http.post(path, json=body)
            assert response.status_code == 200, response.text
            assert (beside, on_loop) == (expected, [])


@sgl.function
def reply(s: sgl.ProgramState, q: str) -> None:
    s += q + sgl.gen("said", max_tokens=1)


def test_the_runs_of_a_post_begin_in_slices(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
    turns, renew, start = [0], LoopShare._renew, Execution.start

    def renewed(share: LoopShare) -> None:
        turns.append(0)
        renew(share)

    def started(execution: Execution) -> None:
        turns[-1] += 1
        start(execution)

    monkeypatch.setattr(LoopShare, "_renew", renewed)
    monkeypatch.setattr(Execution, "start", started)
    program = {"graph": json.loads(reply.compile().to_json()), "batch": [{"q": str(n)} for n in range(100)]}
    with make_server() as server:
        assert server.http.post("/v1/programs", json=program).status_code == 200
    assert sum(turns) == 100 and max(turns) <= UNITS / RUN_UNITS + 1


def test_a_key_leaves_room_for_others(make_server: ServerMaker):
    body = {"text": ["hello"] * 400, "sampling_params": ONE}
    with make_server(engine={"max_queued_requests": 500}, server={"api_key": ("alice", "bob")}) as server:
        refused = server.http.post("/generate", json=body, headers=key("alice"))
        assert refused.status_code == 503
        assert "half of the requests that others leave" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
    with make_server(engine={"max_queued_requests": 500}) as server:
        assert server.http.post("/generate", json=body).status_code == 200
