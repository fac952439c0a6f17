"""`bench.peers` with a scripted engine and a clock of its own: what is asked, and how figures follow from times."""

import dataclasses
import io
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import __main__ as peers
from bench.peers import engines, figures, machine, plot
from bench.peers.clients import Answer, HttpClient, Ran, WorkerClient, WrongAnswerError, select
from bench.peers.engines import CannotStartError, Engine, Setting
from bench.peers.figures import Turn
from bench.peers.workloads import CHARACTER, DEFAULT, TITLES, WORKLOADS, Draw, Request, requests_of
from bench.report import Report
from bench.roofline import Rates
from bench.shapes import LLAMA_SMALL, write_model
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec
from tests.server.conftest import ServerMaker

CAN_FORM = lambda schema: {"json_schema": schema}  # noqa: E731


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(write_model(tmp_path_factory.mktemp("model"), LLAMA_SMALL))


class Fake:
    """A client that takes `wall_s` for every load, and does what its requests ask for."""

    def __init__(self, wall_s: float, missing: str | None = None):
        self.walls = itertools.count(wall_s, wall_s)
        self.missing = missing
        self.loads: list[Any] = []

    def cannot(self, load) -> str | None:
        return self.missing

    def run(self, load) -> Ran:
        self.loads.append(load)
        answers = [Answer(len(r.prompt), r.output_tokens or 0, 3, "", 0.5, 2.5) for r in requests_of(load)]
        return Ran(next(self.walls), answers)


def engine(name: str, client: Any, **knobs) -> Engine:
    sizes = {"weight_itemsize": 4, "head_itemsize": 4, "kv_itemsize": 4} | knobs
    return Engine(name=name, pid=os.getpid(), client=client, **sizes)


def turn(wall_s: float, *answers: Answer) -> Turn:
    return Turn(ran=Ran(wall_s, list(answers)), cpu_s=1.5, others_cpu_s=0.25, pss=2**21)


def test_a_workload_is_the_same_for_every_engine_and_another_in_each_round():
    for make in WORKLOADS.values():
        load = make(Draw("1", 1024, 8))
        assert load == make(Draw("1", 1024, 8)) != make(Draw("2", 1024, 8))
        assert all(request.max_tokens or request.choices for request in requests_of(load))
    assert WORKLOADS.keys() == TITLES.keys()


def test_sizes_are_those_of_the_page():
    def shape(name: str) -> tuple[int, int, set[int], set[int]]:
        load = WORKLOADS[name](Draw("1", 16_384))
        found = requests_of(load)
        return len(load), len(found), {len(r.prompt) for r in found}, {r.max_tokens * r.num_answers for r in found}

    assert shape("a") == (1, 1, {256}, {128}) and shape("b32") == (32, 32, {256}, {128})
    assert shape("c8") == (8, 8, {1024}, {1}) and shape("d") == (64, 64, {544}, {8})
    assert shape("e") == (100, 100, {450}, {1}) and shape("m") == (8, 32, {128, 256, 384, 512}, {32})
    assert shape("forks") == (4, 4, {512}, {512})
    d = [request.prompt for request in requests_of(WORKLOADS["d"](Draw("1", 16_384)))]
    assert len({prompt[:512] for prompt in d}) == 1 and len({prompt[512:] for prompt in d}) == 64
    m = WORKLOADS["m"](Draw("1", 16_384))[0]
    assert all(later.prompt[: len(before.prompt)] == before.prompt for before, later in itertools.pairwise(m))
    assert set(DEFAULT) == {*"adefm", "b8", "b32", "c1", "c8", "choices", "forks"}


def test_a_server_answers_what_is_asked(make_server: ServerMaker):
    with make_server() as server:
        client = HttpClient(str(server.http.base_url), "fake", CAN_FORM)
        for name in ("a", "b2", "c1", "d", "m", "forks"):
            load = WORKLOADS[name](Draw("1", 100, 16))
            ran, asked = client.run(load), requests_of(load)
            assert [answer.prompt_tokens for answer in ran.answers] == [len(request.prompt) for request in asked]
            assert [answer.output_tokens for answer in ran.answers] == [request.output_tokens for request in asked]
            assert ran.wall_s > 0 and (name != "a" or ran.answers[0].last_s is not None)
        of_one = HttpClient(str(server.http.base_url), "fake", CAN_FORM, usage_is_of_one=True)
        with pytest.raises(WrongAnswerError, match="256 tokens came, but 32 were asked for"):
            of_one.run(WORKLOADS["forks"](Draw("1", 100, 16)))
        with pytest.raises(WrongAnswerError, match="http_400"):
            client.run([[Request(prompt=(1,) * 9000, max_tokens=1)]])


def test_a_choice_is_the_likeliest(monkeypatch):
    sent = []

    async def post(_session, url: str, body: dict) -> dict:
        sent.append((url, body))
        return {"choice": 1}

    monkeypatch.setattr("bench.peers.clients._post", post)
    client = HttpClient("http://x", "m", CAN_FORM, select, clock=itertools.count(0, 2).__next__)
    ran = client.run([[Request(prompt="Who", choices=("a", "b", "c"))]])
    assert ran == Ran(2, [Answer(0, 0, text="b")])
    assert sent == [("http://x/select", {"prompt": "Who", "choices": ("a", "b", "c"), "method": "token_trie"})]
    assert HttpClient("http://x", "m", CAN_FORM).cannot([[Request(prompt="Who", choices=("a",))]])


def worker(*lines: dict) -> tuple[WorkerClient, io.StringIO]:
    said, answers = io.StringIO(), io.StringIO("".join(json.dumps(line) + "\n" for line in lines))
    process: Any = SimpleNamespace(stdin=said, stdout=answers)
    return WorkerClient(process, 2, itertools.count(0, 3).__next__), said


def test_a_worker_gets_batches_and_must_answer_them():
    line = {"first_s": 0.5, "last_s": 1.0}
    client, said = worker({"output_tokens": [4, 4], **line}, {"output_tokens": [4], **line})
    ran = client.run([[Request(prompt=(n, n), max_tokens=4)] for n in range(3)])
    assert [json.loads(text)["prompts"] for text in said.getvalue().splitlines()] == [[[0, 0], [1, 1]], [[2, 2]]]
    assert (ran.wall_s, [answer.prompt_tokens for answer in ran.answers]) == (3, [2, 2, 2])
    short, _ = worker({"output_tokens": [3], **line})
    with pytest.raises(WrongAnswerError, match="3 tokens came, but 4"):
        short.run([[Request(prompt=(1,), max_tokens=4)]])
    with pytest.raises(WrongAnswerError, match="has ended"):
        worker()[0].run([[Request(prompt=(1,), max_tokens=4)]])


def test_a_worker_takes_only_batches_of_equal_rows():
    client, _ = worker()
    can = {name for name in WORKLOADS if client.cannot(WORKLOADS[name](Draw("1", 1024, 8))) is None}
    assert can == {"a", "b2", "b8", "b32", "c1", "c8", "d", "e"}


def test_the_bound_is_the_larger_of_bytes_and_operations(config):
    shape = LLAMA_SMALL
    width, kv = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    layers = shape["num_hidden_layers"] * (2 * width * width + 2 * width * kv + 3 * width * shape["intermediate_size"])
    head = width * shape["vocab_size"]
    per_token = 2 * shape["num_hidden_layers"] * kv
    fast_sums = Rates(1e9, 1e30)
    one = engine("jsg", None)
    moved = 4 * (layers + head)
    assert figures.bound_s(config, one, fast_sums, 1, 10, 1) == pytest.approx((moved + 4 * per_token * 10) / 1e9)
    three = 3 * moved + 4 * per_token * (10 + 2 * 12)  # the prompt, and two steps with a token behind 11 on average
    assert figures.bound_s(config, one, fast_sums, 1, 10, 3) == pytest.approx(three / 1e9)
    small = engine("jsg int8", None, weight_itemsize=1)
    saved = figures.bound_s(config, one, fast_sums, 1, 10, 1) - figures.bound_s(config, small, fast_sums, 1, 10, 1)
    assert saved == pytest.approx(3 * layers / 1e9)
    products = 2 * (10 * layers + head) * 4
    attention = 4 * width * 4 * 55 * shape["num_hidden_layers"]
    bound = figures.bound_s(config, one, Rates(1e30, 1e9), 4, 10, 1)
    assert bound == pytest.approx((products + attention) / 1e9)


def test_an_engine_that_shows_no_first_token_has_its_wall_time_only(config):
    load = WORKLOADS["a"](Draw("1", 1024, 16))
    report = Report("bench.peers", [], None)
    unseen = {"jsg": [turn(2.0, Answer(16, 8))]}
    figures.add_workload(report, "a", load, unseen, [engine("jsg", None)], config, Rates(1e9, 1e11))
    (found,) = report.figures
    assert found.samples == (2.0,) and "first_token_s" not in found.facts


def test_figures_of_a_workload(config):
    load = WORKLOADS["a"](Draw("1", 1024, 16))
    mine = [turn(2.0, Answer(16, 8, 4, "", 0.5, 1.9)), turn(4.0, Answer(16, 8, 8, "", 1.5, 2.9))]
    other = [turn(3.0, Answer(16, 8, None, "", 1.0, 2.0)), turn(8.0, Answer(16, 8, None, "", 1.0, 2.0))]
    report = Report("bench.peers", [], None)
    both = [engine("jsg", None), engine("vllm", None)]
    rates = Rates(1e9, 1e11)
    figures.add_workload(report, "a", load, {"jsg": mine, "vllm": other}, both, config, rates)
    ours, theirs, ratio = report.figures
    assert (ours.samples, ours.facts["wall_range_s"]) == ((2.0, 4.0), [2.0, 4.0])
    assert ours.facts["output_tokens_per_s"] == pytest.approx((4 + 2) / 2)
    assert ours.facts["prompt_tokens_per_s"] == pytest.approx((8 + 4) / 2)
    assert ours.facts["cached_share"] == pytest.approx((4 / 16 + 8 / 16) / 2) and "cached_share" not in theirs.facts
    assert (ours.facts["first_token_s"], ours.facts["decode_tokens_per_s"]) == (1.0, pytest.approx(5.0))
    assert (ours.facts["cpu_s"], ours.facts["others_cpu_s"], ours.facts["pss_mib"]) == (1.5, 0.25, 2.0)
    bound = figures.bound_s(config, both[0], rates, 1, 16, 8)
    assert (ours.facts["bound_s"], ours.facts["of_bound"]) == (bound, bound / 3)
    assert (ratio.name, ratio.samples) == ("a: vllm / jsg", (1.5, 2.0))


def test_a_turn_begins_when_no_engine_computes_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "IDLE_EVERY_S", 0.0)
    used = iter([1.0, 1.2, 1.4, 1.4, 9.0])
    monkeypatch.setattr(peers, "cpu_s", lambda pid: next(used))
    peers.wait_until_idle([7])
    assert next(used) == 9.0, "it was read until it stood still"
    monkeypatch.setattr(peers, "IDLE_WITHIN_S", 0.0)
    rising = itertools.count()
    monkeypatch.setattr(peers, "cpu_s", lambda pid: next(rising))
    peers.wait_until_idle([7])


def test_engines_take_turns_and_the_first_turn_does_not_count(config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "wait_until_idle", lambda pids: None)  # this process is never idle
    report = Report("bench.peers", [], None)
    ours, peer, cannot = Fake(1.0), Fake(10.0), Fake(1.0, "it has no cache")
    settled = []
    everyone = [
        dataclasses.replace(engine("jsg", ours), settle=lambda: settled.append(len(ours.loads))),
        engine("vllm", peer),
        engine("hugging face", cannot),
    ]
    peers.measure(report, "d", everyone, config, Rates(1e9, 1e9), rounds=2, divisor=16)
    assert [figure.samples for figure in report.figures] == [(2.0, 3.0), (20.0, 30.0), (10.0, 10.0)]
    assert ours.loads == peer.loads and len({str(load) for load in ours.loads}) == 3 and settled == [1, 2, 3]
    assert cannot.loads == [] and report.header["left_out"] == {"d: hugging face": "it has no cache"}


def test_a_peer_that_fails_ends_no_other(config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "wait_until_idle", lambda pids: None)  # this process is never idle

    class Broken(Fake):
        def run(self, load) -> Ran:
            raise WrongAnswerError("http_500: out of memory")

    report = Report("bench.peers", [], None)
    everyone = [engine("jsg", Fake(1.0)), engine("vllm", Broken(1.0))]
    peers.measure(report, "b2", everyone, config, Rates(1e9, 1e9), rounds=1, divisor=16)
    assert [figure.name for figure in report.figures] == ["b2: jsg"]
    assert report.header["failures"] == {"b2: vllm": "http_500: out of memory"}


def test_an_engine_that_does_not_start_says_why(tmp_path: Path):
    setting = Setting(model=tmp_path, dtype="float32", quantization="none", logs=tmp_path, num_threads=1)
    with (
        pytest.raises(CannotStartError, match="No such file"),
        engines.hugging_face(str(tmp_path / "no"), "static")(setting),
    ):
        pass
    with pytest.raises(CannotStartError, match="must be one of f32"):
        engines.gguf_file("python", tmp_path, "q3")


def test_a_checkpoint_for_hugging_face_s_server_has_no_token_that_ends(tmp_path: Path):
    model = write_model(tmp_path / "model", LLAMA_SMALL | {"eos_token_id": 2})
    (model / "model.safetensors").write_bytes(b"weights")
    made = engines.endless(model, tmp_path / "made")
    assert json.loads((made / "config.json").read_text()) == LLAMA_SMALL | {"eos_token_id": None}
    assert json.loads((made / "generation_config.json").read_text()) == {"eos_token_id": None}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 2


def test_objects_are_judged_by_the_fields_of_the_schema():
    whole = dict.fromkeys(CHARACTER["required"], "x")
    assert figures.is_character(json.dumps(whole))
    assert not figures.is_character(json.dumps(whole)[:-1]) and not figures.is_character('{"name": "x"}')


def test_rates_of_the_machine_are_positive():
    assert all(rate > 0 for rate in machine.read_rates(2, 2**20) + machine.fma_rates(2, 100))


def test_the_plot_has_a_bar_for_each_ratio():
    facts = {"workload": "a", "peer": "vllm"}
    ratios = [{"samples": [1.0, 1.5], "median": 1.25, "facts": facts}, {"samples": [1.0], "median": 1.0, "facts": {}}]
    header = {"cpu": "x", "shape": "100m", "dtype": "float32", "date": "2026-11-26"}
    drawn = plot.draw({"header": header, "figures": ratios})
    bars = list(drawn.axes[0].patches)
    assert [bar.get_width() for bar in bars] == [1.25]
