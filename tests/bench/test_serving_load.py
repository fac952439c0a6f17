"""What the load generator sends, and when. One test runs all of it against the real front."""

import asyncio
import dataclasses
import itertools
import json
import os
import statistics
from typing import Any

import pytest

from bench.serving.__main__ import calibration_words, main, warm_up_seed
from bench.serving.client import Target, open_session
from bench.serving.dialects import DIALECTS, Ask, Prompt, joined
from bench.serving.load import Plan, Run, gaps, run_load
from bench.serving.workloads import WORKLOADS, Session, Shape, Writer

SHAPE = Shape(groups=3, shared_len=40, unique_len=10, output_len=5, turns=3, depth=2, branching=2)


def take(name: str, count: int, *, seed: int = 0, shape: Shape = SHAPE, **writer) -> list[Session]:
    return list(itertools.islice(WORKLOADS[name](shape, Writer(**writer), seed), count))


def words(prompt: Prompt) -> list[str]:
    assert isinstance(prompt, str)
    return prompt.split()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_decides_everything(name):
    assert take(name, 20) == take(name, 20) and take(name, 20) != take(name, 20, seed=1)
    assert take(name, 5, vocab_size=500) == take(name, 5, vocab_size=500)


def test_a_group_shares_its_prefix_and_nothing_else():
    sessions = take("shared-prefix", 60)
    assert {session.group for session in sessions} == {0, 1, 2}
    prefixes = {}
    for session in sessions:
        prompt = words(session.turns[0].text)
        assert len(prompt) == 50
        assert prefixes.setdefault(session.group, prompt[:40]) == prompt[:40]
    assert len({tuple(prefix) for prefix in prefixes.values()}) == 3
    assert len({session.turns[0].text for session in sessions}) == 60


@pytest.mark.parametrize("seed", [0, 1])
def test_no_text_of_a_request_is_that_of_a_prefix_or_of_another_seed(seed):
    shape = dataclasses.replace(SHAPE, groups=8, unique_len=20)
    prompts = [words(session.turns[0].text) for session in take("shared-prefix", 60, seed=seed, shape=shape)]
    starts = {tuple(prompt[:20]) for prompt in prompts}
    own = {tuple(prompt[40:]) for prompt in prompts}
    assert (len(starts), len(own)) == (8, 60) and not starts & own
    warm_up = take("shared-prefix", 60, seed=warm_up_seed(seed), shape=shape)
    assert not own & {tuple(words(session.turns[0].text)[40:]) for session in warm_up}
    asked = words(Writer().write(calibration_words(), 20))
    assert tuple(asked) not in starts | own


def test_the_warm_up_is_no_run_of_another_seed():
    first = {take("random", 1, seed=seed)[0].turns[0].text for seed in range(20)}
    assert first.isdisjoint(take("random", 1, seed=warm_up_seed(seed))[0].turns[0].text for seed in range(20))


def test_a_tree_has_its_levels():
    sessions = take("tree", 200, vocab_size=1000)
    prompts = [session.turns[0].text for session in sessions]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[:20] for prompt in prompts}) == 3, "roots"
    assert len({prompt[:40] for prompt in prompts}) == 6, "leaves"
    assert len(set(prompts)) == 200
    assert all(300 <= token < 1000 for prompt in prompts for token in prompt)


def test_a_conversation_grows_by_its_turns():
    session = take("multi-turn", 1)[0]
    assert [turn.approximate_len for turn in session.turns] == [50, 10, 10]
    assert len(words(joined([turn.text for turn in session.turns]))) == 70


def test_log_normal_lengths_have_the_mean_that_is_asked_for():
    shape = Shape(input_mean=50, input_sigma=0.8, output_mean=20, output_sigma=0.5, max_input_len=10**6)
    turns = [session.turns[0] for session in take("sharegpt", 4000, shape=shape)]
    assert statistics.mean(turn.approximate_len for turn in turns) == pytest.approx(50, rel=0.05)
    assert statistics.mean(turn.max_tokens for turn in turns) == pytest.approx(20, rel=0.05)
    assert statistics.median(turn.approximate_len for turn in turns) == pytest.approx(50 / 2.71828**0.32, rel=0.05)
    cut = [session.turns[0] for session in take("sharegpt", 500, shape=Shape(max_input_len=64, max_output_len=32))]
    assert max(turn.approximate_len for turn in cut) == 64 and max(turn.max_tokens for turn in cut) == 32


def test_random_lengths_keep_their_range():
    shape = Shape(unique_len=100, output_len=40, range_ratio=0.5)
    turns = [session.turns[0] for session in take("random", 500, shape=shape)]
    assert {50, 100} <= {turn.approximate_len for turn in turns} <= set(range(50, 101))
    assert {20, 40} <= {turn.max_tokens for turn in turns} <= set(range(20, 41))


def test_words_are_fewer_where_one_is_several_tokens():
    assert len(words(take("random", 1, tokens_per_word=2.5)[0].turns[0].text)) == 4


def test_arrivals():
    assert list(itertools.islice(gaps(Plan(arrival="burst")), 3)) == [0, 0, 0]
    assert list(itertools.islice(gaps(Plan(arrival="uniform", rate=4)), 3)) == [0, 0.25, 0.25]
    poisson = list(itertools.islice(gaps(Plan(rate=4, seed=3)), 20_000))
    assert poisson == list(itertools.islice(gaps(Plan(rate=4, seed=3)), 20_000))
    assert statistics.mean(poisson) == pytest.approx(0.25, rel=0.02)
    assert statistics.stdev(poisson) == pytest.approx(0.25, rel=0.03), "exponential: as wide as its mean"


class CountingServer:
    """Answers when `wanted` requests are under way, or none has come for a while; notes how many were at once."""

    def __init__(self, wanted: int) -> None:
        self.most = 0
        self.prompts: list[str] = []
        self._wanted = wanted
        self._under_way = 0
        self._enough = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            length = 0
            while head.strip():
                name, _, value = head.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
                head = await reader.readline()
            self.prompts.append(json.loads(await reader.readexactly(length))["prompt"])
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            if self._under_way >= self._wanted:
                self._enough.set()
            await asyncio.wait_for(self._enough.wait(), 10)
            await asyncio.sleep(0.002)
            self._under_way -= 1
            event = json.dumps({"choices": [{"text": " so", "finish_reason": "stop"}]})
            body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()


def load(workload: str, plan: Plan, wanted: int) -> tuple[Run, CountingServer]:
    async def run() -> tuple[Run, CountingServer]:
        counting = CountingServer(wanted)
        server = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        target = Target(base_url=url, dialect=DIALECTS["openai-completions"], ask=Ask(model="m"))
        async with open_session(20) as http:
            done = await run_load(http, target, WORKLOADS[workload](SHAPE, Writer(), 0), plan)
        server.close()
        await server.wait_closed()
        return done, counting

    return asyncio.run(run())


def test_a_closed_loop_has_as_many_requests_under_way_as_clients():
    run, server = load("random", Plan(concurrency=4, num_requests=30), wanted=4)
    assert (len(run.outcomes), server.most, {outcome.error for outcome in run.outcomes}) == (30, 4, {None})


def test_an_open_loop_waits_for_no_answer():
    run, server = load("random", Plan(rate=500, num_requests=30), wanted=30)
    assert (len(run.outcomes), server.most) == (30, 30)
    due = [outcome.due_s for outcome in run.outcomes]
    assert due == list(itertools.accumulate(itertools.islice(gaps(Plan(rate=500)), 30)))
    assert all(outcome.sent_s >= outcome.due_s for outcome in run.outcomes)
    assert all(
        0 < outcome.sent_s <= outcome.arrivals[0][0] <= outcome.ended_s <= run.wall_s for outcome in run.outcomes
    )


def test_a_duration_ends_both_loops():
    run, _ = load("random", Plan(concurrency=2, duration_s=0.2), wanted=2)
    assert run.outcomes and run.wall_s >= 0.2
    assert sum(outcome.sent_s >= 0.2 for outcome in run.outcomes) <= 2, "a client sends nothing more when time is over"
    run, _ = load("random", Plan(arrival="uniform", rate=100, duration_s=0.095), wanted=1)
    assert len(run.outcomes) == 10


def test_each_turn_carries_the_answers_before_it():
    run, server = load("multi-turn", Plan(concurrency=1, num_requests=3), wanted=1)
    first, second, third = server.prompts
    texts = [turn.text for turn in take("multi-turn", 1)[0].turns]
    assert first == texts[0] and second == f"{first} so{texts[1]}" and third == f"{second} so{texts[2]}"
    assert [outcome.group for outcome in run.outcomes] == [run.outcomes[0].group] * 3


def num_behind_the_first_event(line: dict[str, Any]) -> int:
    """The tokens of an answer that have a gap before them. A front that is late puts several tokens into an event."""
    so_far = [count for _, count in line["arrivals"]]
    if len(so_far) == line["output_tokens"] or None not in so_far:
        return line["output_tokens"] - (so_far[0] or 1)
    return line["output_tokens"] - 1 if len(so_far) > 1 else 0


@pytest.mark.parametrize(
    ("api", "extra"),
    [
        ("openai-completions", []),
        ("openai-chat", ["--workload", "multi-turn", "--turns", "2"]),
        ("native", ["--prompt-ids", "--vocab-size", "500", "--plot", "run.png"]),
        ("openai-completions", ["--no-stream"]),
    ],
)
def test_against_the_real_front(make_server, tmp_path, monkeypatch: pytest.MonkeyPatch, api, extra):
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "run.json"
    options = ["--num-requests", "20", "--shared-len", "50", "--unique-len", "20", "--output-len", "10", "--details"]
    with make_server() as server:
        base = ["--base-url", str(server.http.base_url), "--api", api, "--output", str(output)]
        status = main(
            [*base, *options, "--concurrency", "4", "--goodput", "e2e:60000", "--warmup-requests", "2", *extra]
        )
        assert server.stats()["num_running"] == 0
    content = json.loads(output.read_text())
    found = content["summary"]
    assert status == 0
    assert (found["requests"], found["complete"], found["errors"]) == (20, 20, {})
    assert found["output_tokens"] == 200 and found["goodput"]["good"] == 20
    assert content["header"]["server"]["model"] == "fake"
    assert {line["output_tokens"] for line in content["requests"]} == {10}
    if "--prompt-ids" in extra:
        assert {line["prompt_tokens"] for line in content["requests"]} == {70}
    elif api == "openai-completions":  # how long a word is was asked of the server, whose tokens are bytes
        assert all(50 < line["prompt_tokens"] < 90 for line in content["requests"])
    if "--no-stream" not in extra:
        assert found["ttft_ms"]["count"] == 20
        assert found["itl_token_ms"]["count"] == sum(map(num_behind_the_first_event, content["requests"]))
    assert "--plot" not in extra or (tmp_path / "run.png").stat().st_size > 10_000


def test_a_load_that_fails_says_so(make_server, capsys):
    with make_server(engine={"max_total_tokens": 60}) as server:
        options = ["--base-url", str(server.http.base_url), "--api", "native", "--prompt-ids", "--vocab-size", "500"]
        assert main([*options, "--concurrency", "1", "--num-requests", "2"]) == 1
    assert "failed: http_400" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--concurrency", "1"],
        ["--concurrency", "1", "--request-rate", "1", "--num-requests", "1"],
        ["--concurrency", "0", "--num-requests", "1"],
        ["--concurrency", "1", "--num-requests", "1", "--arrival", "uniform"],
        ["--arrival", "burst", "--duration", "1"],
        ["--arrival", "burst", "--request-rate", "2", "--num-requests", "1"],
        ["--concurrency", "1", "--num-requests", "1", "--prompt-ids", "--vocab-size", "9", "--api", "openai-chat"],
        ["--concurrency", "1", "--num-requests", "1", "--prompt-ids"],
        ["--concurrency", "1", "--num-requests", "1", "--goodput", "latency:5"],
        ["--concurrency", "1", "--num-requests", "1", "--continuous-usage", "--api", "native"],
        ["--concurrency", "1", "--num-requests", "1", "--extra-body", "[1]"],
        ["--concurrency", "1", "--num-requests", "1", "--api-ke", "secret"],  # a short form would be in the report
        ["--concurrency", "1", "--num-requests", "1", "--no-stream", "--goodput", "ttft:5", "e2e:9"],
    ],
)
def test_options_that_do_not_fit_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--base-url", "http://127.0.0.1:1", "--model", "m", *options])
    assert os.linesep in capsys.readouterr().err
