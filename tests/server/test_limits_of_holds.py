"""What a program and a hold may cost, and how a hold's timer ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jsg.config import ServerConfig
from jsg.errors import RequestError, ShuttingDownError
from jsg.processing.parts import TextPart, TokenPart
from jsg.server.caller import ApiCall, Caller
from jsg.server.generation import MAX_PROMPT_TOKENS, MAX_SCORES, Generator
from jsg.server.limits import Admission
from jsg.server.native.lang_backend import Budget, FrontModel
from jsg.speech.answers.answer import Prompt
from jsg.types import SamplingParams
from tests.server.scripted import ScriptedServer

CALL = ApiCall(caller=Caller(), route="/generate")


@pytest.fixture
def server(tokenizer_dir: Path) -> ScriptedServer:
    return ScriptedServer(tokenizer_dir)


class TestTimers:
    async def test_a_hold_whose_time_is_over_does_not_keep_the_server_from_ending(self, server: ScriptedServer):
        """Its client does not read on, so it has not left when the server ends."""
        client = server.engine
        generator = Generator(client, server.tokenizer, random_seed=0, config=ServerConfig(hold_timeout=0.01))  # pyright: ignore[reportArgumentType]
        held = Prompt(rid="r", input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=0), hold=True)
        with (await generator.begin(CALL, [held])).hold() as deltas:
            await anext(deltas)
            while client.held:
                await asyncio.sleep(0.005)
            generator.admission.close()
            generator.admission.end()

    async def test_the_server_ends_those_that_have_not_ended(self):
        admission, ended = Admission(ServerConfig(hold_timeout=0.001)), list[int]()
        with admission.hold("") as watch:
            watch(lambda: ended.append(1))
        with admission.hold("") as watch:
            watch(lambda: ended.append(2))
            admission.close()
            assert ended == [2]
        await asyncio.sleep(0.005)
        admission.close()
        assert ended == [2]
        with pytest.raises(ShuttingDownError), admission.hold(""):
            pass


class TestBudget:
    def test_what_is_refused_costs_nothing(self):
        budget = Budget()
        most = Prompt(rid="r", input_ids=(1,), sampling=SamplingParams(max_new_tokens=MAX_PROMPT_TOKENS - 1))
        more = Prompt(rid="r", input_ids=(1,), sampling=SamplingParams(max_new_tokens=MAX_PROMPT_TOKENS))
        for _ in range(2):
            with pytest.raises(RequestError, match="tokens"):
                budget.spend([more])
        budget.spend([most])

    def test_holds_are_counted_apart(self):
        budget = Budget()
        sampling = SamplingParams(max_new_tokens=0)
        ids = (1,) * (MAX_PROMPT_TOKENS // 2)
        held = Prompt(rid="r", input_ids=ids, sampling=sampling, hold=True)
        budget.spend([held, held])
        with pytest.raises(RequestError, match="held"):
            budget.spend([held])
        budget.spend([Prompt(rid="r", input_ids=ids, sampling=sampling)] * 2)

    async def test_a_hint_that_is_refused_takes_nothing_from_the_calls(self, server: ScriptedServer):
        app: Any = server.http.app
        front = app.state.door.front
        budget = Budget()
        model = FrontModel(front, CALL, namespace="", budget=budget)
        with pytest.raises(RequestError):
            await model.hold((TokenPart((1,) * 9000),))  # longer than the context
        budget.spend([Prompt(rid="r", input_ids=(), sampling=SamplingParams(max_new_tokens=0), hold=True)])
        ids = (1,) * (MAX_PROMPT_TOKENS // 2)
        full = Prompt(rid="r", input_ids=ids, sampling=SamplingParams(max_new_tokens=0), hold=True)
        budget.spend([full, full])

    def test_a_call_that_is_too_much_is_refused_before_it_is_prepared(
        self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ):
        """Preparing takes time on the event loop, and the branches of a program go on calling after the refusal."""
        app: Any = server.http.app
        front = app.state.door.front
        budget = Budget()
        budget.spend([Prompt(rid="r", input_ids=(1,), sampling=SamplingParams(max_new_tokens=MAX_PROMPT_TOKENS - 1))])
        monkeypatch.setattr(front.generator, "begin", lambda *_: pytest.fail("the call was prepared"))
        model = FrontModel(front, CALL, namespace="", budget=budget)
        with pytest.raises(RequestError, match="the calls of a program"):
            asyncio.run(anext(model._run([Prompt(rid="r", input_ids=(1,), sampling=SamplingParams())])))


class TestScores:
    async def score(self, server: ScriptedServer, prompt: str, choices: list[str]) -> None:
        app: Any = server.http.app
        front = app.state.door.front
        await FrontModel(front, CALL, namespace="").score((TextPart(prompt),), choices)

    def test_sizes_are_checked_before_anything_is_multiplied(
        self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ):
        """The prompts of choices repeat what stands before them: none is made where they are too large together."""
        monkeypatch.setattr("jsg.lang.tokens.scoring.ScorePlan._prompt", None)
        monkeypatch.setattr("jsg.server.native.lang_backend.MAX_PROMPT_TOKENS", 10_000)
        choices = [f"{number} {number}" for number in range(100)]
        with pytest.raises(RequestError, match="at most 10000 tokens"):
            asyncio.run(self.score(server, "a" * 300, choices))

    def test_choices_with_too_many_tokens(self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("jsg.lang.tokens.scoring.TokenTrie", None)
        monkeypatch.setattr("jsg.server.native.lang_backend.MAX_SCORES", 1000)
        with pytest.raises(RequestError, match="at most 1000 tokens"):
            asyncio.run(self.score(server, "So? ", [str(number) * 300 for number in range(9)]))
        assert MAX_SCORES > 1000
