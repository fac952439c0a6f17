"""API speculation on a text API: fewer calls, and always the result that separate calls would give."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from jsg.errors import BackendError, ConfigError
from jsg.lang.remote.ahead import Ahead, Unit, UnitReader, shared_settings
from jsg.lang.remote.arguments import Unsupported, normalised
from jsg.lang.remote.openai import OpenAI
from jsg.lang.remote.remote_backend import RemoteBackend
from jsg.lang.remote.retry import RetryPolicy
from jsg.lang.remote.wire import Abilities, Bill, Call, Delta, Failure, Message, Scored, Token
from jsg.lang.words.backend import Session
from jsg.lang.words.ir import Gen, SamplingArgs, Select, Text
from tests.lang.wire_servers import PAGE, TOKENS, HashToy, Parrot, Toy, ask, speak, tell, tokenize, write

ARTICLE = "Augusta Ada King, Countess of Lovelace, was an English mathematician and writer. " * 12
VOCABULARY = ["a", "b", "ab", "ba", "\n", "a\n", '"', 'b"', "é", "aé", '"\n']


class ToyApi:
    """An `Api` in this process.

    Attributes:
        num_calls: So far.
        chunk_len: Tokens of one delta.
    """

    name = "toy"
    failures = ()

    def __init__(self, toy: Toy, *, tells: bool = True, chunk_len: int = 1, continues: bool = True):
        self.toy = toy
        self.abilities = Abilities(continues=continues, reports_tokens=tells, max_stops=99)
        self.num_calls = 0
        self.chunk_len = chunk_len
        self.prompts: list[str] = []
        self.asked: list[SamplingArgs] = []

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        self.num_calls += 1
        prompt = call.prompt if isinstance(call.prompt, str) else shown(call.prompt)
        self.prompts.append(prompt)
        self.asked.append(call.args)
        spoken = speak(self.toy, prompt, call.args.max_tokens or 0, call.args.stop or (), lambda _text: True)
        position = 0
        tokens = [Token(token) for token, _, _ in spoken.tokens]
        for start in range(0, len(tokens), self.chunk_len):
            some = tokens[start : start + self.chunk_len]
            length = sum(len(token.text) for token in some)
            text = spoken.text[position : position + length]
            position += length
            yield Delta(text=text, tokens=tuple(some) if call.wants_tokens else None)
        yield Delta(finish=spoken.finish, bill=Bill(self.toy.count(prompt), spoken.num_generated, 0))

    def explain(self, error: Exception) -> Failure:
        raise AssertionError(error)

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        return None

    async def models(self) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def shown(messages: Sequence[Message]) -> str:
    """A conversation as the toy sees it; the assistant's turn is always open."""
    text = "".join(f"<{message.role}>{message.text}" for message in messages)
    return text if messages[-1].role == "assistant" else f"{text}<assistant>"


def backend_over(api: ToyApi, *, is_chat: bool = False) -> RemoteBackend:
    return RemoteBackend(api, Unsupported("toy", "error"), RetryPolicy(), is_chat=is_chat, model="toy")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a random program.

    Attributes:
        constant: Text to append; "foreseen" takes so many characters of what the model would write.
        foreseen: See there.
        stop: Of a gen.
        max_tokens: Of a gen; 0 for a constant.
    """

    constant: str = ""
    foreseen: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int = 0


CONSTANTS = st.builds(Step, constant=st.text('ab\n"é', min_size=1, max_size=3))
FORESEEN = st.builds(Step, foreseen=st.integers(1, 4))
GENS = st.builds(
    Step,
    stop=st.lists(st.sampled_from(["\n", '"', "ab", "a\n", "éa", "bb"]), max_size=3, unique=True).map(tuple),
    max_tokens=st.integers(1, 8),
)
STEPS = st.lists(st.one_of(CONSTANTS, FORESEEN, GENS), min_size=1, max_size=12)


def whats_next(toy: Toy, text: str, length: int) -> str:
    return speak(toy, text, length, (), lambda _text: True).text[:length]


async def run(session: Session, toy: Toy, steps: Sequence[Step]) -> list[str]:
    """The values of the gens; the whole text last."""
    text = "p"
    await tell(session, text)
    values = []
    for step in steps:
        if step.max_tokens:
            written = await write(session, stop=step.stop or None, max_tokens=step.max_tokens)
            values.append(written.text)
            text += written.text
        elif constant := step.constant or whats_next(toy, text, step.foreseen):
            await tell(session, constant)
            text += constant
    return [*values, text]


@settings(max_examples=200)
@given(
    steps=STEPS,
    num_ahead=st.integers(1, 40),
    tells=st.booleans(),
    chunk_len=st.integers(1, 3),
    end_share=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_f17_speculation_never_changes_a_greedy_result(steps, num_ahead, tells, chunk_len, end_share):
    toy = HashToy(VOCABULARY, end_share)

    async def both() -> tuple[list[str], list[str]]:
        plain = await run(backend_over(ToyApi(toy)).open(), toy, steps)
        ahead = backend_over(ToyApi(toy, tells=tells, chunk_len=chunk_len))
        return plain, await run(ahead.open(num_api_spec_tokens=num_ahead), toy, steps)

    plain, ahead = asyncio.run(both())
    assert ahead == plain


@settings(max_examples=200)
@given(
    steps=st.lists(st.one_of(FORESEEN, GENS, GENS), min_size=2, max_size=8)
    | STEPS.filter(lambda steps: len(steps) > 2),
    num_ahead=st.integers(1, 60),
    tells=st.booleans(),
    cut=st.integers(0, 12),
)
def test_f17_a_whole_turn_has_the_values_of_gens_asked_for_one_by_one(steps, num_ahead, tells, cut):
    """By a model that goes on in its turn, where every character is a token: then every gen begins where one begins.

    A whole turn may fail, where a constant is not what the model writes, but then it says so. White space that the turn
    begins with need not be written: there it may differ.
    """
    toy = HashToy(["a", "b", "\n", '"', "é"], 0.05)
    items: list[Text | Gen] = []

    async def one_by_one() -> list[str]:
        session = backend_over(ToyApi(toy), is_chat=True).open()
        await ask(session, "?")
        text, values = "<user>?<assistant>", []
        for step in steps:
            args = SamplingArgs(temperature=0.0, max_tokens=step.max_tokens, stop=step.stop or None)
            if step.max_tokens:
                items.append(Gen("x", args))
                values.append((await write(session, max_tokens=step.max_tokens, stop=step.stop or None)).text)
                text += values[-1]
            elif constant := step.constant or whats_next(toy, text, step.foreseen):
                items.append(Text(constant))
                await tell(session, constant)
                text += constant
        return values

    async def at_once() -> list[str]:
        session = backend_over(ToyApi(toy, tells=tells, continues=False), is_chat=True).open(
            num_api_spec_tokens=num_ahead
        )
        await ask(session, "?")
        blocks = [block for block in (items[:cut], items[cut:]) if block]
        return [piece.text for block in blocks for piece in await session.generate_block(block)]

    expected = asyncio.run(one_by_one())
    answers = iter(expected)
    said = [(item, item.text if isinstance(item, Text) else next(answers)) for item in items]
    first = next((item for item, text in said if text), None)
    assume(not (isinstance(first, Text) and first.text.startswith("\n")))
    try:
        assert asyncio.run(at_once()) == expected
    except BackendError as error:
        event("failed")
        assert "for a whole turn" in str(error)  # noqa: PT017
    else:
        event("matched" if sum(isinstance(item, Gen) for item in items) > 1 else "matched, one gen at most")


@settings(max_examples=100)
@given(st.data())
def test_a_saved_gen_has_the_tokens_that_its_own_call_would_have_made(data):
    """And the prompt that it saved is the one that this call would have sent."""
    toy = Parrot(PAGE, TOKENS)
    limits = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))

    async def metas(num_ahead: int | None) -> tuple[list[Any], ToyApi, RemoteBackend]:
        api = ToyApi(toy)
        backend = backend_over(api)
        session = backend.open(num_api_spec_tokens=num_ahead)
        await tell(session, "Name")
        written = [await write(session, max_tokens=limit, stop=("5",)) for limit in limits]
        return (
            [(one.text, one.meta["completion_tokens"], one.meta["finish_reason"]["type"]) for one in written],
            api,
            backend,
        )

    async def both() -> None:
        plain, plain_api, plain_backend = await metas(None)
        ahead, api, backend = await metas(60)
        assert ahead == plain
        assert api.num_calls <= plain_api.num_calls
        usage, plain_usage = backend.usage(), plain_backend.usage()
        assert usage.calls + usage.saved_calls == plain_usage.calls
        assert usage.prompt_tokens + usage.saved_prompt_tokens == plain_usage.prompt_tokens

    asyncio.run(both())


async def extract(session: Session) -> list[str]:
    """The paper's example: three fields of a long page."""
    await tell(session, ARTICLE, "\nName:")
    name = await write(session, "name", stop=("\n",), max_tokens=16)
    await tell(session, "\n", "Born:")
    born = await write(session, "born", stop=("\n",), max_tokens=16)
    await tell(session, "\nField:")
    field = await write(session, "field", stop=("\n",), max_tokens=16)
    return [name.text, born.text, field.text]


async def test_three_fields_of_a_page_need_a_third_of_the_input_tokens(wire):
    """Over HTTP and the real package; counted by the server."""
    backend = OpenAI("toy", base_url=wire.openai_url, api="completions")
    plain = await extract(backend.open())
    paid_plain = wire.prompt_tokens
    ahead = await extract(backend.open(num_api_spec_tokens=64))
    assert plain == ahead == [" Ada Lovelace", " 1815", " mathematics"]
    usage = backend.usage()
    assert (usage.calls, usage.saved_calls) == (3 + 1, 2) and usage.prompt_tokens == wire.prompt_tokens
    assert usage.saved_prompt_tokens == paid_plain - (wire.prompt_tokens - paid_plain)
    await backend.close()
    paid_plain, paid_ahead = (paid_plain, wire.prompt_tokens - paid_plain)
    assert paid_ahead * 3 <= paid_plain and paid_ahead > 800


async def test_pieces_come_while_the_model_goes_on(wire):
    """The gen's own text is shown as it comes, and nothing of what follows it."""
    backend = OpenAI("toy", base_url=wire.openai_url, api="completions")
    session = backend.open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    written = await write(session, stop=(" Lovelacy", "\n"))
    assert written.pieces == [" Ada", " Lovelace"]  # " " and " Love" could have begun a stop
    await backend.close()


async def test_a_constant_that_the_model_did_not_foresee_costs_a_call():
    api = ToyApi(Parrot(PAGE, TOKENS))

    session = backend_over(api).open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    await write(session, stop=("\n",))
    await tell(session, "\nField:")
    assert (await write(session, stop=("\n",))).text == " mathematics"
    assert api.prompts == ["Name:", "Name: Ada Lovelace\nField:"]


async def test_a_gen_never_begins_inside_of_a_token():
    """The model wrote "lace" as one token, so nothing is known of what it would write behind "Name: Ada Lovel"."""
    api = ToyApi(Parrot(PAGE, TOKENS))

    session = backend_over(api).open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    assert (await write(session, stop=("ace",))).text == " Ada Lovel"
    assert (await write(session, max_tokens=2)).text == "ac"
    assert (await write(session, max_tokens=1)).text == "e"
    assert api.prompts == ["Name:", "Name: Ada Lovel"]


@pytest.mark.parametrize(
    "args",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"return_logprob": True},
        {"n": 2},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"temperature": 0.7, "seed": 1},
    ],
)
async def test_a_gen_that_asks_for_something_else_has_a_call_of_its_own(args):
    api = ToyApi(Parrot(PAGE, TOKENS))
    api.abilities = dataclasses.replace(api.abilities, has_n=False)

    session = backend_over(api).open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    await write(session, stop=("\n",))
    await tell(session, "\nBorn:")
    await write(session, stop=("\n",), **args)
    assert api.num_calls == 1 + args.get("n", 1)


@pytest.mark.parametrize("args", [{"temperature": 0.7, "seed": 1}, {"frequency_penalty": 0.5}, {"min_tokens": 1}])
async def test_a_gen_whose_sampler_begins_anew_with_each_call_asks_for_no_more_than_it_needs(args):
    asked = normalised(SamplingArgs(max_tokens=5, stop=("\n",), **args))
    api = ToyApi(Parrot(PAGE, TOKENS))

    session = backend_over(api).open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    await write(session, max_tokens=5, stop=("\n",), **args)
    assert api.asked[0] == dataclasses.replace(asked, temperature=args.get("temperature", 0.0))


async def test_f17_a_gen_without_a_stop_ends_after_its_tokens_not_its_characters():
    api = ToyApi(Parrot(PAGE, TOKENS))

    session = backend_over(api).open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    texts = [(await write(session, max_tokens=2)).text for _ in range(3)]
    assert texts == [" Ada", " Lovelace", "\nBorn"]
    assert api.num_calls == 1


async def test_f17_programs_at_the_same_time_share_nothing(wire):
    wire.answer = lambda body: f" {body['prompt'].split('#')[1]}-1\nB: {body['prompt'].split('#')[1]}-2\n"

    async def program(backend: OpenAI, number: int) -> list[str]:
        session = backend.open(num_api_spec_tokens=64)
        await tell(session, f"#{number}# A:")
        first = await write(session, stop=("\n",))
        await asyncio.sleep(0)
        await tell(session, "\nB:")
        return [first.text, (await write(session, stop=("\n",))).text]

    backend = OpenAI("toy", base_url=wire.openai_url, api="completions")
    results = await asyncio.gather(*(program(backend, number) for number in range(16)))
    assert results == [[f" {number}-1", f" {number}-2"] for number in range(16)]
    assert backend.usage().calls == backend.usage().saved_calls == 16
    await backend.close()


async def test_branches_share_what_was_foreseen_only_where_nothing_is_sampled():
    async def calls(temperature: float) -> int:
        api = ToyApi(Parrot(PAGE, TOKENS))
        session = backend_over(api).open(num_api_spec_tokens=64)
        await tell(session, "Name:")
        await write(session, stop=("\n",), temperature=temperature)
        for branch in await session.fork(2):
            await branch.extend(Text("\nBorn:"))
            await write(branch, stop=("\n",), temperature=temperature)
        return api.num_calls

    assert (await calls(0.0), await calls(1.0)) == (1, 3)


async def test_a_choice_ends_what_was_foreseen(wire):
    backend = OpenAI("toy", base_url=wire.openai_url, api="completions")
    session = backend.open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    await write(session, stop=("\n",))
    await session.select(Select("x", ("\nBorn", "\nField"), "token_trie"))
    await tell(session, ":")
    assert (await write(session, stop=("\n",))).text == " 1815"
    await backend.close()
    assert wire.requests[-1]["prompt"] == "Name: Ada Lovelace\nBorn:"


async def test_an_api_that_tells_no_tokens_is_asked_for_no_more_than_the_gen_may_have(wire):
    """It was asked for more once, because it was said to tell them."""
    wire.has_tokens = False

    backend = OpenAI("toy", base_url=wire.openai_url, api="completions")
    session = backend.open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    assert (await write(session, max_tokens=3)).text == " Ada Love"
    assert (await write(session, stop=("\n",), max_tokens=20)).text == "lace"
    await tell(session, "\nBorn:")
    assert (await write(session, stop=("\n",), max_tokens=20)).text == " 1815"
    await backend.close()
    assert [request["max_tokens"] for request in wire.requests] == [64, 3, 20]


def test_tokens_that_are_parts_of_a_character_are_counted_and_never_parted():
    r"""OpenAI names such tokens "bytes:\xe2", and shows their text with the last of them."""
    reader = UnitReader()
    deltas = [
        Delta(text="a", tokens=(Token("a"),)),
        Delta(text="", tokens=(Token("bytes:\\xe2"), Token("bytes:\\x82"))),
        Delta(text="€b", tokens=(Token("bytes:\\xac"), Token("b"))),
        Delta(text="c", tokens=(Token("c"), Token("<|end|>"))),
        Delta(text="d", tokens=(Token("d"),)),
        Delta(text="rest", tokens=None),
    ]
    units = [unit for delta in deltas for unit in reader.push(delta)]
    assert units == [Unit("a", 1), Unit("€b", 4), Unit("c", 1), Unit("d", 2), Unit("rest", None)]

    args = normalised(SamplingArgs(max_tokens=3, temperature=0.0))
    ahead = Ahead(
        units=tuple(units[:4]), finish="length", total_tokens=9, settings=shared_settings(args), prompt_tokens=5
    )
    taken = ahead.take(args)
    assert taken is not None
    assert (taken.text, taken.finish) == ("a", "length")  # three tokens show no whole character more
    taken = ahead.take(dataclasses.replace(args, max_tokens=5))
    assert taken is not None and (taken.text, taken.num_tokens) == ("a€b", 5)
    assert ahead.take(dataclasses.replace(args, max_tokens=9)) is None  # it would have gone on


def test_without_tokens_a_limit_is_proven_by_bytes_or_not_at_all():
    args = normalised(SamplingArgs(max_tokens=6, stop=("\n",), temperature=0.0))
    units = (Unit("abc", None), Unit("d\ne", None))
    ahead = Ahead(units=units, finish="stop", total_tokens=50, settings=shared_settings(args), prompt_tokens=5)
    taken = ahead.take(args)
    assert taken is not None and (taken.text, taken.num_tokens) == ("abcd", None)
    assert ahead.take(dataclasses.replace(args, max_tokens=4)) is None
    proven = dataclasses.replace(ahead, total_tokens=4)
    assert proven.take(dataclasses.replace(args, max_tokens=4)) is not None


def test_zero_tokens_ahead_is_refused(wire):
    backend = OpenAI("toy", base_url=wire.openai_url)
    with pytest.raises(ConfigError, match="num_api_spec_tokens"):
        backend.open(num_api_spec_tokens=0)
    asyncio.run(backend.close())


def test_the_toy_tokenizer_takes_the_longest_token():
    assert tokenize("Lovelace 18", [" 18", "Love", "lace", "l"]) == ["Love", "lace", " 18"]
