"""Programs on a real server over a real socket: common text is computed once, and ended programs free all.

Whatever needs that server stands here, because each worker that runs such a file starts one, for six CPU seconds.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

import jsg as sgl
from jsg.errors import ContextLengthError, GrammarError, RequestError
from jsg.lang.http.runtime import Runtime
from jsg.processing.tokenizer import Tokenizer
from tests.lang.test_decide import TEAMS, TICKET, triage

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def backend(runtime: Runtime) -> Iterator[Runtime]:
    """The server with an empty cache."""
    assert runtime.flush_cache()
    yield runtime
    wait_until(lambda: num_of(runtime, "num_holds") == num_of(runtime, "num_running") == 0)


@pytest.fixture
def tokenizer(tiny: Tokenizer) -> Tokenizer:
    return tiny


def num_of(runtime: Runtime, name: str) -> int:
    return runtime.get_server_info()["internal_states"][0][name]


def wait_until(holds: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


class TestReuse:
    """F6: every token that exists is found again. Of an answer all tokens but the last have been computed."""

    def test_f6_a_continuation_computes_only_what_is_new(self, backend, tokenizer):
        @sgl.function
        def program(s):
            s += "The quick brown fox"
            s += " jumps over"
            for name in ("a", "b", "c"):
                s += sgl.gen(name, max_tokens=12, **GREEDY)
                s += " and then what"

        state = program.run(backend=backend)
        first, second, third = (state.get_meta_info(name) for name in "abc")
        assert first["cached_tokens"] == 0
        for before, after in ((first, second), (second, third)):
            known = before["prompt_tokens"] + before["completion_tokens"]
            assert after["cached_tokens"] == known - 1
            assert after["prompt_tokens"] == known + num_tokens(tokenizer, " and then what")

    def test_f6_forks_compute_only_what_is_their_own(self, backend, tokenizer):
        @sgl.function
        def program(s):
            s += "Once upon a time there was" + sgl.gen("start", max_tokens=10, **GREEDY) + ". Now"
            outer = s.fork(3)
            for i, branch in enumerate(outer):
                branch += f" number {i}" + sgl.gen("middle", max_tokens=5, **GREEDY) + ". So"
                inner = branch.fork(2)
                inner += [
                    " one" + sgl.gen("end", max_tokens=3, **GREEDY),
                    " two" + sgl.gen("end", max_tokens=3, **GREEDY),
                ]
                inner.join()
                metas.append([each.get_meta_info("end") for each in inner])
            outer.join()
            branch_metas.extend(branch.get_meta_info("middle") for branch in outer)

        metas, branch_metas = [], []
        state = program.run(backend=backend)
        start = state.get_meta_info("start")
        common = start["prompt_tokens"] + start["completion_tokens"] + num_tokens(tokenizer, ". Now")
        assert [len(group) for group in state["end"]] == [2, 2, 2]
        for middle, ends in zip(branch_metas, metas, strict=True):
            assert middle["prompt_tokens"] == common + num_tokens(tokenizer, " number 0")
            assert middle["cached_tokens"] >= common
            inner_common = middle["prompt_tokens"] + middle["completion_tokens"] + num_tokens(tokenizer, ". So")
            for end, own in zip(ends, (" one", " two"), strict=True):
                assert end["prompt_tokens"] == inner_common + num_tokens(tokenizer, own)
                assert end["cached_tokens"] >= inner_common

    def test_a_prefix_is_held_while_branches_are_open(self, backend):
        @sgl.function
        def program(s):
            s += "A long prefix of a few words that several branches share"
            branches = s.fork(2)
            branches += sgl.gen("a", max_tokens=2, **GREEDY)
            branches[0].sync()
            held.append(num_of(backend, "num_holds"))
            branches.join()

        held: list[int] = []
        program.run(backend=backend).sync()
        assert held == [1]


class TestTheSameAsOtherwise:
    def test_a_chat_is_what_the_chat_api_answers(self, backend):
        question = "What is the capital of Italy?"

        @sgl.function
        def program(s):
            s += sgl.system("You are a helpful assistant.")
            s += sgl.user(question) + sgl.assistant(sgl.gen("a", max_tokens=20, temperature=0))

        state = program.run(backend=backend)
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": question},
        ]
        body = {"messages": messages, "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{backend.url}/v1/chat/completions", json=body).json()
        assert state["a"] == answer["choices"][0]["message"]["content"]
        assert state.get_meta_info("a")["prompt_tokens"] == answer["usage"]["prompt_tokens"]

    def test_what_is_streamed_is_the_variable(self, backend):
        @sgl.function
        def program(s):
            s += "Once upon a time" + sgl.gen("a", max_tokens=20, **GREEDY)

        state = program.run(backend=backend, stream=True)
        pieces = list(state.text_iter("a"))
        assert "".join(pieces) == state["a"] == program.run(backend=backend)["a"] and len(pieces) > 1


class TestSentWhole:
    def test_a_compiled_program_runs_in_one_round_trip(self, backend):
        @sgl.function
        def program(s, country):
            s += sgl.user(f"What is the capital of {country}?")
            s += sgl.assistant(sgl.gen("city", max_tokens=20, temperature=0))
            s += sgl.user("What is 2 + 3?") + sgl.assistant(sgl.gen("sum", max_tokens=20, temperature=0))

        whole = program.compile().run(country="France", backend=backend)
        first, second = whole.get_meta_info("city"), whole.get_meta_info("sum")
        assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"] - 1
        here = program.run("France", backend=backend)  # not before: the two would compute for each other
        assert [whole[name] for name in ("city", "sum")] == [here[name] for name in ("city", "sum")]
        assert whole.text() == here.text()

    def test_a_compiled_program_that_streams(self, backend):
        @sgl.function
        def program(s, start):
            s += start + sgl.gen("a", max_tokens=20, **GREEDY)

        state = program.compile().run(start="Once upon a time", backend=backend, stream=True)
        assert "".join(state.text_iter("a")) == state["a"] == program.run("Once upon a time", backend=backend)["a"]


class TestEnds:
    def test_cancelling_a_program_aborts_its_requests(self, backend):
        @sgl.function
        def program(s):
            s += "Once upon a time"
            branches = s.fork(3)
            branches += sgl.gen("a", max_tokens=900, **GREEDY)
            for branch in branches:
                branch.text()

        state = program.run(backend=backend, stream=True)
        wait_until(lambda: num_of(backend, "num_running") == 3)
        state.cancel()
        wait_until(lambda: num_of(backend, "num_running") == num_of(backend, "num_holds") == 0)

    @pytest.mark.parametrize(
        ("arguments", "kind", "why"),
        [
            ({"temperature": 1000.0}, RequestError, "temperature must be"),
            ({"max_tokens": 5000}, ContextLengthError, "at most"),
            ({"regex": "(a"}, GrammarError, "not closed"),
            ({"stop_regex": ["a*"]}, GrammarError, "the stop pattern 'a\\*' is refused"),
        ],
    )
    def test_a_refusal_is_raised_at_the_read_with_the_line(self, backend, arguments, kind, why):
        @sgl.function
        def program(s):
            s += "a" + sgl.gen("a", **arguments)

        state = program.run(backend=backend)
        with pytest.raises(kind, match=why) as raised:
            state["a"]
        assert type(raised.value) is kind
        assert any("test_endpoint_real.py" in note for note in raised.value.__notes__)


def test_live_forks_take_no_thread_each(runtime):
    @sgl.function
    def program(s):
        s += "Some words"
        branches = s.fork(200)
        branches += sgl.gen("a", max_tokens=1, **GREEDY)
        threads.append(threading.active_count())
        branches.join()

    threads: list[int] = []
    before = threading.active_count()  # threads of other tests may end meanwhile, and none begins
    state = program.run(backend=runtime)
    assert len(state["a"]) == 200 and len(set(state["a"])) == 1
    assert threads[0] - before < 20


def test_a_program_on_a_server_decides_as_here_interpreted_and_posted(runtime):
    states = [run(ticket=TICKET, team="billing", backend=runtime) for run in (triage.run, triage.compile().run)]
    by_hand = {
        "input": [{"role": "user", "content": TICKET}, {"role": "assistant", "content": "Well."}],
        "questions": [
            {"type": "predicate", "instructions": "The customer paid twice."},
            {"type": "choice", "instructions": "Which team?", "choices": [{"value": team} for team in TEAMS]},
        ],
    }
    for name in ("double", "team", "anger"):
        one, other = (state.get_meta_info(name) for state in states)
        assert list(one["probabilities"]) == list(other["probabilities"]), "the server is deterministic"
        assert one["label_mass"] == other["label_mass"]

    @sgl.function
    def same(s):
        s += sgl.user(TICKET) + sgl.assistant("Well.")
        s += sgl.decide("double", "The customer paid twice.")
        s += sgl.decide("team", "Which team?", list(TEAMS))

    double, team = httpx.post(f"{runtime.url}/v1/decisions", json=by_hand).json()["answers"]
    state = same.run(backend=runtime)
    assert state.get_meta_info("double")["probability"] == pytest.approx(double["probability"], rel=1e-6)
    assert state.get_meta_info("double")["label_mass"] == pytest.approx(double["label_mass"], rel=1e-6)
    probabilities = [entry["probability"] for entry in team["probabilities"]]
    assert state.get_meta_info("team")["probabilities"] == pytest.approx(probabilities, rel=1e-6)
    assert state["team"] == team["choice"]


class TestRunning:
    def test_it_answers(self, runtime):
        sampling = {"max_new_tokens": 3, "temperature": 0}
        answer = runtime.generate("The capital of France is", sampling)
        assert answer["meta_info"]["completion_tokens"] == 3
        again = asyncio.run(runtime.async_generate("The capital of France is", sampling))
        assert again["text"] == answer["text"]
        assert [a["text"] for a in runtime.generate(["The capital of France is"], sampling)] == [answer["text"]]

    def test_a_prefix_can_be_computed_beforehand(self, runtime):
        assert runtime.flush_cache() is True
        runtime.cache_prefix("A prefix of some words")
        meta = runtime.generate("A prefix of some words and more", {"max_new_tokens": 1})["meta_info"]
        assert 0 < meta["cached_tokens"] < meta["prompt_tokens"]

    def test_it_says_what_it_is(self, runtime):
        info = runtime.get_server_info()
        assert (info["served_model_name"], info["max_total_tokens"]) == ("small", 8192)

    def test_it_is_a_backend(self, runtime):
        assert runtime.as_backend() is runtime.endpoint is runtime.endpoint.as_backend()
        assert runtime.endpoint.base_url == runtime.url
