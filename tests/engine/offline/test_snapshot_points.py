"""What goes on from a state that another request was asked to keep, with an engine of a hybrid model."""

import asyncio
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import jsg
from jsg import cli
from jsg.processing.snapshot_points import PlacedText, joined_text
from jsg.speech.answers.answer import Prompt
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.types import SamplingParams
from tests.engine import small
from tests.engine.late import late_programs
from tests.engine.test_states import HYBRID
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.test_snapshot_points import DROPPING, MOST_LOST

SHOTS = "Q: What has wings?\nA: A bird.\n"
QUESTIONS = ("Who are you?", "When?", "Where do they go?")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[jsg.Engine]:
    directory = small.write_model(tmp_path_factory.mktemp("hybrid"), **HYBRID, vocab_size=300, eos_token_id=257)
    write_byte_tokenizer(directory, DROPPING)
    knobs = {"load_format": "dummy", "max_running_requests": 4, "chunked_prefill_size": 64, "max_total_tokens": 1024}
    with late_programs(), jsg.Engine(str(directory), compilation_cache_dir=compile_cache_dir, **knobs) as engine:
        yield engine


@pytest.fixture
def found(hybrid: jsg.Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each request that has ended the tokens of its prompt, and how many of them were cached."""
    assert hybrid.flush_cache()
    ended: list[tuple[int, int]] = []
    real = jsg.Engine._answers_of

    def answers_of(engine: jsg.Engine, prompts: Any) -> list[Any]:
        for answer in (answers := real(engine, prompts)):
            push = answer.push

            def seen(output: Any, push: Any = push) -> Any:
                if output.finish is not None:
                    ended.append((output.prompt_tokens, output.cached_tokens))
                return push(output)

            answer.push = seen
        return answers

    monkeypatch.setattr(jsg.Engine, "_answers_of", answers_of)
    return ended


def test_a_chat_in_the_terminal_goes_on_at_the_end_of_the_turn(
    hybrid: jsg.Engine, found: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jsg.engine.offline.engine.Engine", lambda **knobs: hybrid)
    monkeypatch.setattr(hybrid, "close", lambda: None)
    generate, short = hybrid.generate, {"max_new_tokens": 4, "ignore_eos": True}
    monkeypatch.setattr(hybrid, "generate", lambda **fields: generate(**(fields | {"sampling_params": short})))
    monkeypatch.setattr("sys.stdin", io.StringIO("Why is it so?\nAnd now?\nReally?\n"))
    assert cli.main(["chat"]) == 0
    assert found[0][1] == 0 and len(found) == 3
    for (before, _), (_, cached) in itertools.pairwise(found):
        assert before - MOST_LOST <= cached < before, "the thought that the prompt opens is dropped"


def test_conversations_go_on_from_what_a_client_has_marked(hybrid: jsg.Engine, found: list[tuple[int, int]]):
    """As `cache_control` does, in the system message and before what differs in it."""
    chat = ChatPrompt(hybrid.tokenizer, caches_states=True)
    common = PlacedText("Be brief. " * 4)
    for own in ("It is noon.", "It is three.", "It is night."):
        messages = [{"role": "system", "content": joined_text([common, own])}, {"role": "user", "content": "Why?"}]
        encoded = chat.prompt(messages)
        prompt = Prompt(rid=own, **encoded.fields, sampling=SamplingParams(max_new_tokens=2))
        asyncio.run(ended(hybrid, prompt))
    [point] = encoded.snapshot_at
    assert [cached for _, cached in found] == [0, point, point] and point >= len(common)


async def ended(engine: jsg.Engine, prompt: Prompt) -> None:
    async for _ in engine.answer_async([prompt]):
        pass


@jsg.function
def asked(s: Any, question: str, shots: str) -> None:
    s += shots
    s += "Q: " + question + "\nA:" + jsg.gen("answer", max_tokens=2, ignore_eos=True)


@jsg.function
def asking(s: Any, question: str, shots: str) -> None:
    for name in "ab":
        asked(question + name, shots)["answer"]


def test_the_programs_that_a_run_of_a_batch_calls_do_so_too(hybrid: jsg.Engine, found: list[tuple[int, int]]):
    items = [{"question": question, "shots": SHOTS} for question in QUESTIONS]
    for state in asking.run_batch(items[:2], backend=hybrid, num_threads=1):
        state.sync()
    assert [cached for _, cached in found] == [0, *[len(SHOTS + "Q:")] * 3]


def test_the_runs_of_a_batch_go_on_from_what_they_have_in_common(hybrid: jsg.Engine, found: list[tuple[int, int]]):
    """A text that several runs have is no run's own, be it of all of them or not."""
    items = [{"question": question, "shots": SHOTS} for question in QUESTIONS]
    items = [*items, {"question": "Else?", "shots": "Nothing that others have. " * 2}]
    for state in asked.run_batch(items, backend=hybrid, num_threads=1):
        state["answer"]
    assert [cached for _, cached in found] == [0, *[len(SHOTS + "Q:")] * 2, 0]
