"""`jsg.Engine` as its users call it, on the embedded model."""

import asyncio
import dataclasses
import itertools
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

import jsg
from jsg.engine.offline.driver import Driver, Sink
from jsg.errors import ConfigError, EngineDeadError, RequestError
from jsg.types import Request, RequestOutput
from tests.engine.late import late_programs

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def engine(tiny_engine: jsg.Engine) -> jsg.Engine:
    return tiny_engine


def test_one_prompt_gives_a_result_and_a_list_gives_a_list(engine: jsg.Engine):
    one = engine.generate("Hello", GREEDY)
    assert one["meta_info"]["completion_tokens"] == 6
    assert [r["text"] for r in engine.generate(["Hello", "Hello"], GREEDY)] == [one["text"]] * 2
    assert engine.generate(input_ids=engine.tokenizer.encode("Hello"), sampling_params=GREEDY)["text"] == one["text"]
    assert len(engine.generate("Hello", GREEDY | {"n": 3})) == 3
    each = engine.generate(["Hello", "Hello"], [GREEDY, GREEDY | {"max_new_tokens": 2}])
    assert [r["meta_info"]["completion_tokens"] for r in each] == [6, 2]


def test_a_stream_grows_to_the_same_result(engine: jsg.Engine):
    results = list(engine.generate("Hello", GREEDY | {"speculative": "off"}, stream=True))
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(results))
    assert results[-1]["output_ids"] == engine.generate("Hello", GREEDY)["output_ids"] and len(results) == 6


def test_a_second_time_the_prompt_is_cached(engine: jsg.Engine):
    text = "A prompt that nobody else in this file has used"
    first, second = (engine.generate(text, GREEDY)["meta_info"] for _ in range(2))
    assert first["cached_tokens"] < second["cached_tokens"] == second["prompt_tokens"] - 1


def test_it_says_why_a_prompt_is_not_cached(engine: jsg.Engine):
    engine.generate("Why is it not", {"max_new_tokens": 1}, namespace="why", priority=2)
    answer = engine.generate("Why is it so", {"max_new_tokens": 1}, namespace="why", return_cache_info=True)
    cache, cached_tokens = answer["meta_info"]["cache"], answer["meta_info"]["cached_tokens"]
    assert 0 < cached_tokens == cache["matched_tokens"] == cache["first_difference"]["position"]


def test_closing_a_stream_ends_its_request(engine: jsg.Engine):
    stream = engine.generate("Hello", GREEDY | {"max_new_tokens": 2000}, stream=True)
    next(stream)
    assert engine.get_server_info()["num_running"] == 1
    stream.close()
    assert engine.get_server_info()["num_running"] == 0 and engine.flush_cache()


def test_a_stop_string_ends_the_request_in_the_engine(engine: jsg.Engine):
    text = engine.generate("Hello", GREEDY | {"max_new_tokens": 40})["text"]
    stop = text[5:7]
    result = engine.generate("Hello", GREEDY | {"max_new_tokens": 2000, "stop": stop})
    assert result["text"] == text[: text.index(stop)]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert engine.get_server_info()["num_running"] == 0


def test_a_stop_pattern_ends_the_request_in_the_engine(engine: jsg.Engine):
    text = engine.generate("Hello", GREEDY | {"max_new_tokens": 20})["text"]
    end = text.index(text[5:7])
    pattern = "".join(f"[{char}]" if char.isalnum() else re.escape(char) for char in text[5:7])
    result = engine.generate("Hello", GREEDY | {"max_new_tokens": 2000, "stop_regex": pattern})
    assert result["text"] == text[:end]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    assert engine.get_server_info()["num_running"] == 0
    with pytest.raises(RequestError, match=r"the stop pattern 'a\*' is refused"):
        engine.generate("Hello", {"stop_regex": "a*"})


def test_what_comes_after_a_stop_string_shows_no_second_end(engine: jsg.Engine, monkeypatch: pytest.MonkeyPatch):
    """The engine makes more tokens until it hears of the stop string: the first answer here, before the second ends."""
    letters = [engine.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "xay"]

    class Eager:
        """Says everything at once, heedless of aborts."""

        def submit(self, request: Request, sink: Sink) -> None:
            for token in letters:
                sink(RequestOutput(rid=request.rid, token_ids=(token,)))

        def abort(self, rid: str) -> None:
            pass

    monkeypatch.setattr(engine, "_driver", Eager())
    monkeypatch.setattr(engine._grammars, "_driver", engine._driver)
    results = list(engine.generate(["p", "q"], {"stop": "a"}, stream=True))
    assert [(r["index"], r["text"]) for r in results] == [(0, "x"), (0, "x"), (1, "x"), (1, "x")]
    assert [bool(r["meta_info"]["finish_reason"]) for r in results] == [False, True, False, True]


async def test_the_asynchronous_twin_gives_the_same(engine: jsg.Engine):
    several = await asyncio.gather(*(engine.async_generate("Hello", GREEDY) for _ in range(8)))
    assert {r["text"] for r in several} == {engine.generate("Hello", GREEDY)["text"]}
    streamed = [r async for r in await engine.async_generate("Hello", GREEDY, stream=True)]
    assert streamed[-1]["text"] == several[0]["text"]
    endless = asyncio.create_task(engine.async_generate("Hello", GREEDY | {"max_new_tokens": 3000}))
    await asyncio.sleep(0.2)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert engine.get_server_info()["num_running"] == 0


def test_threads_share_one_engine(engine: jsg.Engine):
    expected = engine.generate("Hello", GREEDY)["text"]
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(engine.generate("Hello", GREEDY)["text"])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 8


def test_ids_outside_the_vocabulary_never_match(engine: jsg.Engine):
    sampling = GREEDY | {"stop_token_ids": [10**6], "logit_bias": {str(10**6): 5}}
    assert engine.generate("Hello", sampling)["output_ids"] == engine.generate("Hello", GREEDY)["output_ids"]


def test_reports_without_logprobs_ask_for_nothing(engine: jsg.Engine):
    reports = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3], "return_text_in_logprobs": True}
    assert "output_top_logprobs" not in engine.generate("Hello", GREEDY, **reports)["meta_info"]
    meta = engine.generate("Hello", GREEDY, return_logprob=True, **reports)["meta_info"]
    assert [text for _, _, text in meta["output_token_logprobs"]] == [
        engine.tokenizer.token_bytes(token).decode() for _, token, _ in meta["output_token_logprobs"]
    ]
    streamed = list(engine.generate("Hello", GREEDY, return_logprob=True, stream=True, **reports))
    assert streamed[-1]["meta_info"]["output_top_logprobs"] == meta["output_top_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_new_tokens_the_next_token_has_alternatives(engine: jsg.Engine, stream: bool):
    usual = engine.generate("Hello", GREEDY, return_logprob=True, top_logprobs_num=2)
    sampling = GREEDY | {"max_new_tokens": 0}
    answer = engine.generate("Hello", sampling, return_logprob=True, top_logprobs_num=2, stream=stream)
    last = list(answer)[-1] if stream else answer
    assert (last["text"], last["output_ids"], last["meta_info"]["output_token_logprobs"]) == ("", [], [])
    [alternatives] = last["meta_info"]["output_top_logprobs"]
    assert [token for _, token, _ in alternatives] == [t for _, t, _ in usual["meta_info"]["output_top_logprobs"][0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of prompt and input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one of prompt and input_ids"),
        ({"prompt": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "one item for each of 2"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 10**6}}, "4096"),
        ({"input_ids": []}, "at least one"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(engine: jsg.Engine, arguments: dict, message: str):
    with pytest.raises(RequestError, match=message):
        engine.generate(**arguments)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="page_sise"):
        jsg.Engine(page_sise=16)


def test_several_engines_are_the_servers():
    with pytest.raises(ConfigError, match="jsg serve --dp-size"):
        jsg.Engine(dp_size=2)
    with pytest.raises(ConfigError, match="page-size"):  # with one it gets as far as the next wrong option
        jsg.Engine(dp_size=1, page_size=0)


def test_a_closed_engine_says_so(compile_cache_dir: str):
    with late_programs():
        engine = jsg.Engine(max_running_requests=4, deterministic=True, compilation_cache_dir=compile_cache_dir)
    running = engine.generate("Hello", GREEDY | {"max_new_tokens": 3000}, stream=True)
    next(running)
    engine.close()
    with pytest.raises(EngineDeadError):
        for _ in running:
            pass
    with pytest.raises(EngineDeadError):
        engine.generate("Hello", GREEDY)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_its_engine_ends_well(compile_cache_dir: str):
    program = (
        "import jsg\n"
        f"engine = jsg.Engine(compilation_cache_dir={compile_cache_dir!r})\n"
        "print(engine.generate('Hello', {'max_new_tokens': 2})['meta_info']['completion_tokens'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip() in {"1", "2"}


@jsg.function
def _forked(s: Any) -> None:
    s += SHARED
    for branch, text in zip(s.fork(2), (" one", " two"), strict=True):
        branch += text + jsg.gen("answer", max_tokens=1)


SHARED = "The quick brown fox jumps over the lazy dog. " * 8


def test_requests_say_where_they_part_if_the_cache_keeps_states(engine: jsg.Engine, monkeypatch: pytest.MonkeyPatch):
    sent: list[Request] = []
    submit = Driver.submit

    def seen(driver: Driver, request: Request, sink: Any) -> None:
        sent.append(request)
        submit(driver, request, sink)

    monkeypatch.setattr(Driver, "submit", seen)
    monkeypatch.setattr(engine, "info", dataclasses.replace(engine.info, caches_states=True))
    num_shared = len(engine.tokenizer.encode(SHARED))
    for run in (
        lambda: engine.generate([SHARED + "Who?", SHARED + "Why?"], {"max_new_tokens": 1}),
        lambda: _forked.run(backend=engine.as_backend()).sync(),
    ):
        sent.clear()
        run()
        asked = [request for request in sent if not request.hold]
        points = {request.snapshot_at for request in asked}
        assert len(asked) > 1
        assert len(points) == len({request.input_ids[:point] for request in asked for [point] in points}) == 1
        assert all(num_shared - 8 <= point <= num_shared for [point] in points)
