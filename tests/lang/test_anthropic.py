"""`jsg.Anthropic`: the real package, a real socket, a toy model behind the rules of the real API."""

import base64

import pytest

from jsg.errors import BackendError, RequestError, UnsupportedError
from jsg.lang.remote.anthropic import Anthropic
from jsg.lang.remote.retry import RetryPolicy
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Select, Text
from tests.lang.wire_servers import Fault, WireServer, ask, closing, tell, write

PNG = b"\x89PNG\r\n1"
QUICK = RetryPolicy(first_wait_s=0.0, seed=0)


def backend_of(wire: WireServer, **options):
    return closing(Anthropic("toy", **{"base_url": wire.url, "retry": QUICK, **options}))


async def test_f18_the_system_prompt_stays_for_every_gen(wire):
    async with backend_of(wire) as backend:
        session = backend.open()
        await tell(session, RoleBegin("system"), "Be short.", RoleEnd("system"))
        await ask(session)
        first = await write(session, stop=("\nB",))
        assert first.text == "Name: Ada Lovelace"
        assert first.meta["finish_reason"] == {"type": "stop", "matched": "\nB"}
        assert first.meta["completion_tokens"] == 8
        assert (first.meta["prompt_tokens"], first.meta["cached_tokens"]) == (wire.prompt_tokens, 1)
        await tell(session, RoleEnd("assistant"))
        await ask(session, "And?")
        await write(session, max_tokens=1)
        assert backend.usage().prompt_tokens == wire.prompt_tokens
    first, second = wire.requests
    assert first["system"] == second["system"] == [{"type": "text", "text": "Be short."}]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert first["stop_sequences"] == ["\nB"] and first["max_tokens"] == 128
    assert first["temperature"] == 0.0


async def test_a_system_turn_later_is_refused(wire, session):
    await tell(session, RoleBegin("user"), "a", RoleEnd("user"), RoleBegin("system"), "b", RoleEnd("system"))
    await tell(session, RoleBegin("assistant"))
    with pytest.raises(UnsupportedError, match="before all others"):
        await write(session)
    assert not wire.requests


@pytest.mark.parametrize("blank", ["", " ", "\n \n"])
async def test_a_turn_that_has_begun_goes_on_whatever_it_ends_with(wire, blank, session):
    """The API takes no prompt that ends in white space, so it is taken off, and found again in the answer or not."""
    wire.answer = lambda _body: f"{blank}Ada."

    await ask(session)
    await tell(session, f"Name:{blank}")
    assert (await write(session, stop=(".",))).text == "Ada"
    wire.answer = lambda _body: "and more"
    assert (await write(session)).text == "and more"
    await tell(session, " \n")
    wire.answer = lambda _body: " "
    assert (await write(session)).text == " "
    await tell(session, " \n")
    wire.answer = lambda _body: ""
    assert (await write(session)).text == ""
    assert wire.requests[0]["messages"][-1]["content"] == [{"type": "text", "text": "Name:"}]
    assert wire.requests[1]["messages"][-1]["content"] == [{"type": "text", "text": f"Name:{blank}Ada"}]


@pytest.mark.parametrize("blank", ["", " \n"])
async def test_s7_a_turn_that_says_nothing_does_not_spoil_the_conversation(wire, blank, session):
    """The model may end at once; the API takes no such turn but at the end."""
    await ask(session, "One?")
    wire.answer = lambda _body: blank
    assert (await write(session)).text == blank
    await tell(session, RoleEnd("assistant"))
    await ask(session, "Two?")
    assert (await write(session)).text == blank
    await tell(session, RoleEnd("assistant"))
    await ask(session, "Three?")
    wire.answer = lambda _body: "Ada"
    assert (await write(session)).text == "Ada"
    await tell(session, RoleEnd("assistant"))
    await ask(session, "Four?")
    assert (await write(session)).text == "Ada"
    said = [(one["role"], [part["text"] for part in one["content"]]) for one in wire.requests[-1]["messages"]]
    assert said == [("user", ["One?", "Two?", "Three?"]), ("assistant", ["Ada"]), ("user", ["Four?"])]


async def test_a_stop_of_white_space_is_honoured_here(wire, session):
    await ask(session)
    await tell(session, "Name:")
    written = await write(session, stop=("\n", "1815"))
    assert written.text == " Ada Lovelace"
    assert written.meta["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert written.meta["completion_tokens"] is None and written.meta["prompt_tokens"] == wire.prompt_tokens
    assert wire.requests[0]["stop_sequences"] == ["1815"]


async def test_f8_a_picture_has_its_type_and_its_place(wire, session):
    await tell(session, RoleBegin("user"), Image(PNG), "What?", RoleEnd("user"), RoleBegin("assistant"))
    await write(session, max_tokens=1)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    assert wire.requests[0]["messages"][0]["content"] == [
        {"type": "image", "source": source},
        {"type": "text", "text": "What?"},
    ]


async def test_several_answers_are_several_calls(wire, backend, session):
    await ask(session)
    written = await write(session, n=3, max_tokens=2)
    assert (written.text, written.others) == ("Name:", ("Name:", "Name:")) and written.meta["api_calls"] == 3
    assert written.meta["prompt_tokens"] == wire.prompt_tokens
    assert backend.usage().calls == 3


async def test_f19_what_the_api_cannot_honour(wire):
    async with backend_of(wire) as backend:
        session = backend.open()
        await ask(session)
        for argument, value in (("seed", 1), ("regex", "a"), ("frequency_penalty", 0.5), ("return_logprob", True)):
            with pytest.raises(UnsupportedError, match=argument):
                await write(session, **{argument: value})
        await write(session, json_schema='{"type": "object"}', top_k=3, temperature=1.0, max_tokens=1)
    async with backend_of(wire, sampling=False) as backend:
        session = backend.open()
        await ask(session)
        with pytest.raises(UnsupportedError, match="temperature"):
            await write(session, temperature=0.0)
        await write(session, temperature=1.0, max_tokens=1)
    first, second = wire.requests
    assert first["output_config"] == {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert first["top_k"] == 3 and "temperature" not in first
    assert "temperature" not in second


@pytest.mark.parametrize("begun", ["{", '{"name": '])
async def test_f19_a_schema_within_a_turn_that_has_begun_is_refused_before_anything_is_sent(wire, begun):
    schema = '{"type": "object"}'

    async with backend_of(wire) as strict, backend_of(wire, on_unsupported="warn") as lenient:
        session = strict.open()
        await ask(session)
        await tell(session, begun)
        with pytest.raises(UnsupportedError, match=r"Anthropic.*json_schema.*has begun") as caught:
            await write(session, json_schema=schema, n=2)
        assert caught.value.param == "json_schema"
        assert not wire.requests
        session = lenient.open()
        await ask(session)
        await tell(session, begun)
        with pytest.warns(UserWarning, match="json_schema"):
            await write(session, json_schema=schema, max_tokens=1)
    (request,) = wire.requests
    assert "output_config" not in request


async def test_white_space_begins_no_turn_of_a_schema(wire, session):
    """It is not sent, so the model begins the turn itself."""
    await ask(session)
    await tell(session, "\n")
    await write(session, json_schema='{"type": "object"}', max_tokens=1)
    assert wire.requests[0]["messages"][-1]["role"] == "user" and "output_config" in wire.requests[0]


async def test_what_the_api_refuses_is_a_request_error_with_its_words(backend, session):
    await tell(session, RoleBegin("assistant"))
    with pytest.raises(RequestError, match="first message must use the user role"):
        await write(session)
    assert backend.usage().calls == 0


async def test_an_overloaded_api_is_asked_again(wire, backend, session):
    wire.faults = [Fault(529), Fault(503)]

    await ask(session)
    assert (await write(session, max_tokens=2)).text == "Name:"
    assert backend.usage().retries == 2


def overloaded(*, comes_first: bool = False) -> Fault:
    event = {"type": "error", "error": {"type": "overloaded_error", "message": "too much"}}
    return Fault(event=event, comes_first=comes_first)


async def test_an_error_in_the_stream_is_an_error(wire, session):
    wire.faults = [overloaded()]

    await ask(session)
    with pytest.raises(BackendError, match="too much"):
        await write(session, max_tokens=2)


async def test_an_error_before_any_text_or_in_what_nobody_reads_before_its_end_is_tried_again(wire, backend, session):
    wire.faults = [overloaded(comes_first=True)]
    wire.answer = lambda _body: "Name: Ada"

    await ask(session)
    assert (await write(session, max_tokens=2)).text == "Name:"
    await tell(session, RoleEnd("assistant"))
    await ask(session)
    await tell(session, "The")
    wire.faults = [overloaded()]
    assert (await session.select(Select("x", ("Name", "Age"), "token_trie"))).choice == "Name"
    usage = backend.usage()
    assert (usage.retries, usage.calls, usage.unreported_calls) == (2, 4, 2)


async def test_speculation_goes_on_in_the_turn(wire, backend):
    """The API tells no tokens, so the gen's own limit is all that is asked for."""
    session = backend.open(num_api_spec_tokens=64)
    assert not session.wants_blocks
    await ask(session)
    await tell(session, "Name:")
    assert (await write(session, stop=("\n",), max_tokens=40)).text == " Ada Lovelace"
    await tell(session, "\nBorn:")
    assert (await write(session, stop=("\n",), max_tokens=40)).text == " 1815"
    usage = backend.usage()
    assert (usage.calls, usage.saved_calls) == (1, 1)
    assert usage.saved_prompt_tokens == usage.prompt_tokens  # at least
    assert wire.requests[0]["max_tokens"] == 40 and "stop_sequences" not in wire.requests[0]


async def test_speculation_with_a_model_that_begins_its_own_turns(wire):
    line = SamplingArgs(stop=("\n",), max_tokens=40, temperature=0.0)

    async with backend_of(wire, prefill=False) as backend:
        session = backend.open(num_api_spec_tokens=64)
        assert session.wants_blocks
        await ask(session)
        name, born = await session.generate_block([Text("Name:"), Gen("a", line), Text("\nBorn:"), Gen("b", line)])
        assert (name.text, born.text) == (" Ada Lovelace", " 1815")
        session = backend.open()
        await ask(session)
        await tell(session, "Name:")
        with pytest.raises(UnsupportedError, match="begun"):
            await write(session)
    assert len(wire.requests) == 1


class TestSelect:
    async def test_a_tool_call_holds_the_model_to_the_choices(self, wire, session):
        await ask(session)
        chosen = await session.select(Select("x", ("yes", "no", "may be"), "token_trie"))
        assert chosen.choice in ("yes", "no", "may be") and chosen.probabilities is None
        assert chosen.meta["api_calls"] == 1
        await tell(session, RoleEnd("assistant"))
        await ask(session, "Sure?")
        await write(session, max_tokens=1)
        assert wire.requests[1]["messages"][1]["content"] == [{"type": "text", "text": chosen.choice}]
        assert wire.requests[0]["tool_choice"] == {"type": "tool", "name": "choose"}

    async def test_s6_a_model_without_temperature_chooses_too(self, wire):
        async with backend_of(wire, sampling=False) as backend:
            for begun in ("", "Name:"):
                session = backend.open()
                await ask(session)
                await tell(session, begun)
                wire.answer = (lambda _body: "yes") if begun else None
                chosen = await session.select(Select("x", ("yes", "no"), "token_trie"))
                assert chosen.choice in ("yes", "no")
            session = backend.open()
            await ask(session)
            with pytest.raises(UnsupportedError, match="temperature"):
                await session.select(Select("x", ("yes", "no"), "token_trie", temperature=0.5))
        assert len(wire.requests) == 2
        assert not any("temperature" in request for request in wire.requests)

    async def test_within_a_turn_the_answer_must_begin_with_a_choice(self, wire, session):
        answers = iter(["Perhaps.", " Ada Lovelace, of course"])
        wire.answer = lambda _body: next(answers)

        await ask(session)
        await tell(session, "Name:")
        chosen = await session.select(Select("x", ("Ada", "Ada Lovelace", "Bo"), "token_trie"))
        assert chosen.choice == "Ada Lovelace" and chosen.meta["api_calls"] == 2
        assert chosen.meta["prompt_tokens"] == wire.prompt_tokens

    async def test_nothing_but_a_choice_is_ever_returned(self, wire, session):
        wire.answer = lambda _body: "Perhaps."

        await ask(session)
        await tell(session, "Name:")
        with pytest.raises(BackendError, match=r"3 times for one of \['Ada', 'Bo'\].*Perh"):
            await session.select(Select("x", ("Ada", "Bo"), "token_trie"))
        with pytest.raises(UnsupportedError, match="token_length_normalized"):
            await session.select(Select("x", ("Ada", "Bo"), "token_length_normalized"))
        assert len(wire.requests) == 3
