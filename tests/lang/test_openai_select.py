"""`select` on OpenAI's APIs: by scores, by force, by a race, by asking."""

import asyncio
import contextlib
import math
from collections.abc import Iterator

import pytest

from jsg.errors import BackendError, RequestError, UnsupportedError
from jsg.lang.remote.choosing import chosen, race_step
from jsg.lang.remote.openai import OpenAI
from jsg.lang.words.ir import RoleEnd, Select
from tests.lang.wire_servers import HashToy, WireServer, ask, closing, tell, tokenize, write

WORDS = ["New", " York", " Jersey", " Mexico", "Old", "Paris", "."]


class Fixed:
    """Says after which text which tokens come, with what probability."""

    def __init__(self, after: dict[str, dict[str, float]]):
        self.after = after
        self.vocabulary = WORDS

    def ranked(self, text: str) -> list[tuple[str, float]]:
        known = next((probs for end, probs in self.after.items() if text.endswith(end)), {"?": 1.0})
        return sorted(((token, math.log(p)) for token, p in known.items()), key=lambda item: -item[1])

    def count(self, text: str) -> int:
        return len(tokenize(text, WORDS))


CITIES = Fixed(
    {
        "in ": {"Paris": 0.5, "New": 0.3, "Old": 0.2},
        "New": {" York": 0.6, " Jersey": 0.2, " Mexico": 0.2},
        "York": {".": 1.0},
    }
)
CHOICES = ("New York", "New Jersey", "Paris")


@pytest.fixture
def wire() -> Iterator[WireServer]:
    with WireServer(CITIES).running() as server:
        yield server


def backend_of(wire: WireServer, **options):
    return closing(OpenAI("toy", **{"base_url": wire.openai_url, "api": "completions", **options}))


async def test_f16_a_server_that_scores_its_prompt_gives_probabilities_in_one_call(wire):
    async with backend_of(wire, dialect="jsg") as backend:
        session = backend.open()
        await tell(session, "in ")
        selection = await session.select(Select("x", CHOICES, "token_trie"))
        assert selection.choice == "Paris"
        assert selection.probabilities == pytest.approx([0.18 / 0.74, 0.06 / 0.74, 0.5 / 0.74])
        assert selection.meta["prompt_tokens"] == wire.toy.count("in ") * 4 + 5
        assert selection.meta["input_token_logprobs"][0] == [
            [pytest.approx(math.log(0.3)), None, "New"],
            [pytest.approx(math.log(0.6)), None, " York"],
        ]
        mean = await (await session.fork(1))[0].select(Select("x", CHOICES, "token_length_normalized"))
        assert mean.choice in CHOICES
        with pytest.raises(UnsupportedError, match="unconditional"):
            await session.select(Select("x", CHOICES, "unconditional_likelihood_normalized"))
        await tell(session, "!")
        await write(session, max_tokens=1)
    scoring = wire.requests[0]
    assert scoring["prompt"] == ["in ", "in New York", "in New Jersey", "in Paris"]
    assert (scoring["max_tokens"], scoring["echo"]) == (0, True)
    assert wire.requests[-1]["prompt"] == "in Paris!"


def test_a_choice_is_drawn_by_its_probability_when_asked(wire):
    async def main() -> set[str]:
        async with backend_of(wire, dialect="jsg") as backend:
            session = backend.open()
            await tell(session, "in ")
            branches = await session.fork(12)
            return {
                (await branch.select(Select("x", CHOICES, "token_trie", temperature=1.0, seed=seed))).choice
                for seed, branch in enumerate(branches)
            }

    drawn = asyncio.run(main())
    assert {"Paris", "New York"} <= drawn <= set(CHOICES)


async def test_without_a_prompt_the_first_token_has_no_score(wire):
    async with backend_of(wire, dialect="jsg") as backend:
        with pytest.raises(RequestError, match="needs a prompt"):
            await backend.open().select(Select("x", CHOICES, "token_trie"))


async def test_a_race_by_the_likeliest_tokens(wire):
    """OpenAI's own API tells five tokens at each place. "Paris" is likelier than "New" at once."""
    async with backend_of(wire, dialect="openai") as backend:
        session = backend.open()
        await tell(session, "in ")
        first = await session.select(Select("x", CHOICES, "greedy_token_selection"))
        assert (first.choice, first.probabilities) == ("Paris", None)
        other = backend.open()
        await tell(other, "in ")
        second = await other.select(Select("x", ("New Jersey", "New York"), "token_trie"))
        assert second.choice == "New York" and second.meta["api_calls"] == 2
        assert second.meta["completion_tokens"] == 2  # added up, not only the last
        assert second.meta["prompt_tokens"] == 3 + 4
        with pytest.raises(UnsupportedError, match="token_length_normalized"):
            await other.select(Select("x", CHOICES, "token_length_normalized"))
    assert [request["prompt"] for request in wire.requests] == ["in ", "in ", "in New"]
    assert {request["max_tokens"] for request in wire.requests} == {1}


async def test_a_race_that_no_choice_can_enter_is_an_error(wire):
    async with backend_of(wire, dialect="openai") as backend:
        session = backend.open()
        await tell(session, "in ")
        with pytest.raises(BackendError, match="none of the 5 tokens"):
            await session.select(Select("x", ("Rome", "Oslo"), "token_trie"))


async def test_with_a_tokenizer_the_choices_alone_are_allowed(wire):
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [WORDS.index(token) for token in tokenize(text, WORDS)]

    async with backend_of(wire, dialect="openai", tokenizer=Tokenizer()) as backend:
        session = backend.open()
        await tell(session, "by ")  # where the toy says "?"
        selection = await session.select(Select("x", ("Old York", "New Mexico"), "token_trie"))
        assert selection.choice == "New Mexico" and selection.meta["api_calls"] == 2
    assert wire.requests[1]["logit_bias"] == {"4": 100, "0": 100}


@pytest.mark.parametrize(
    ("prefix", "top", "step"),
    [
        ("", {"N": -2.0, "O": -1.0}, "N"),
        ("", {"Ne": -1.0, "New Y": -0.5}, "New Y"),
        ("New York", {" City": -1.0, ".": -0.5}, "New York"),
        ("New York", {" City": -0.5, ".": -1.0}, "New York City"),
        ("New York", {}, "New York"),
        ("New", {" York.": -0.5}, "New York"),
        ("New", {"": -0.1, "x": -0.2}, None),
    ],
)
def test_one_step_of_a_race(prefix, top, step):
    choices = ("New York", "New York City", "New Jersey")
    assert race_step([choice for choice in choices if choice.startswith(prefix)], prefix, top) == step


async def test_a_chat_model_is_held_to_the_choices(wire):
    async with backend_of(wire, api="chat", dialect="openai") as backend:
        session = backend.open()
        await ask(session)
        selection = await session.select(Select("x", CHOICES, "token_trie"))
        assert selection.choice in CHOICES
        await tell(session, RoleEnd("assistant"))
        await ask(session, "Sure?")
        await write(session, max_tokens=1)
        assert wire.requests[1]["messages"][1] == {"role": "assistant", "content": selection.choice}
    schema = wire.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == list(CHOICES)


async def test_a_server_that_knows_choices_is_held_to_them_within_a_turn(wire):
    async with backend_of(wire, api="chat", dialect="jsg") as backend:
        session = backend.open()
        await ask(session)
        await tell(session, "in ")
        assert (await session.select(Select("x", CHOICES, "token_trie"))).choice in CHOICES
    async with backend_of(wire, api="chat", dialect="sglang") as backend:
        session = backend.open()
        await ask(session)
        with contextlib.suppress(BackendError):  # the toy knows no regex
            await session.select(Select("x", ("a.b", "c"), "token_trie"))
    assert wire.requests[0]["choices"] == list(CHOICES) and wire.requests[1]["regex"] == r"a\.b|c"


async def test_a_server_without_any_means_is_asked_and_checked(wire):
    answers = iter(["I do not know", "New York City"])
    wire.answer = lambda _body: next(answers)

    async with backend_of(wire, api="chat") as backend:
        session = backend.open()
        await ask(session)
        selection = await session.select(Select("x", ("New York", "New York City"), "token_trie"))
        assert selection.choice == "New York City" and selection.meta["api_calls"] == 2


async def test_one_choice_needs_no_call_and_none_is_refused(wire, session):
    await tell(session, "in ")
    assert (await session.select(Select("x", ("a",), "token_trie"))).probabilities == (1.0,)
    with pytest.raises(RequestError, match="one choice at least"):
        await session.select(Select("x", (), "token_trie"))
    assert not wire.requests


def test_the_longest_choice_counts():
    assert chosen(" Ada Lovelace!", ["Ada", "Ada Lovelace"], is_forced=False) == "Ada Lovelace"
    assert chosen("Adam", ["Bo"], is_forced=False) is None and chosen("Ada ", ["Ada"], is_forced=True) is None


@pytest.mark.parametrize("seed", range(5))
async def test_a_race_always_ends_in_a_choice(wire, seed):
    wire.toy = HashToy(["a", "b", "ab", "ba"], 0.0)
    choices = ("ab", "aba", "ba", "bb", "abab")

    async with backend_of(wire, dialect="openai") as backend:
        session = backend.open()
        await tell(session, f"{seed}:")
        assert (await session.select(Select("x", choices, "token_trie"))).choice in choices
