"""`jsg.OpenAI` on the chat API: the real package, a real socket, a toy model."""

import asyncio
import base64

import pytest

from jsg.errors import BackendError, RequestError, UnsupportedError
from jsg.lang.remote.openai import OpenAI
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Select, Text, Video
from tests.lang.wire_servers import PAGE, Fault, WireServer, ask, closing, tell, write

PNG, JPEG = b"\x89PNG\r\n1", b"\xff\xd8\xff2"
LINE = SamplingArgs(stop=("\n",), temperature=0.0, max_tokens=16)


def backend_of(wire: WireServer, **options):
    return closing(OpenAI("toy", **{"base_url": wire.openai_url, **options}))


async def test_turns_become_messages_and_the_state_shows_their_markers(wire, session):
    shown = await tell(session, RoleBegin("system"), "Be ", "short.", RoleEnd("system"))
    assert shown == "<|im_start|>system\nBe short.<|im_end|>\n"
    await ask(session)
    written = await write(session, stop=("\n",))
    assert written.text == "Name: Ada Lovelace" and len(written.pieces) > 3
    await tell(session, RoleEnd("assistant"))
    await ask(session, "And?")
    await write(session, max_tokens=2)
    first, second = wire.requests
    assert first["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "Name: Ada Lovelace"},
        {"role": "user", "content": "And?"},
    ]
    assert first["max_tokens"] == 128


async def test_openais_own_api_is_told_the_limit_by_its_new_name(wire):
    async with backend_of(wire, dialect="openai") as backend:
        session = backend.open()
        await ask(session)
        await write(session, max_tokens=2)
    assert wire.requests[0]["max_completion_tokens"] == 2 and "max_tokens" not in wire.requests[0]


async def test_f8_pictures_keep_their_place_and_their_type(wire, session):
    turn = [RoleBegin("user"), "Left: ", Image(PNG), " right: ", Image(JPEG, "image/jpeg"), "?"]
    assert await tell(session, *turn, RoleEnd("user")) == (
        "<|im_start|>user\nLeft: <image> right: <image>?<|im_end|>\n"
    )
    await tell(session, RoleBegin("assistant"))
    await write(session, max_tokens=1)

    def picture(kind: str, data: bytes) -> dict:
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}

    assert wire.requests[0]["messages"][0]["content"] == [
        {"type": "text", "text": "Left: "},
        picture("image/png", PNG),
        {"type": "text", "text": " right: "},
        picture("image/jpeg", JPEG),
        {"type": "text", "text": "?"},
    ]


async def test_f7_a_picture_is_encoded_once_for_all_calls_and_forks(wire, monkeypatch, session):
    """An API without state must get it with each call; at least nothing is computed for that."""
    encoded: list[bytes] = []
    real = base64.b64encode
    monkeypatch.setattr(base64, "b64encode", lambda data: encoded.append(data) or real(data))

    await tell(session, RoleBegin("user"), Image(PNG), RoleEnd("user"), RoleBegin("assistant"))
    for branch in [session, *await session.fork(2)]:
        await write(branch, max_tokens=1)
    assert len(wire.requests) == 3
    assert encoded == [PNG]


@pytest.mark.parametrize("item", [Text("hi"), Image(PNG)])
async def test_text_outside_of_a_turn_is_an_error_that_teaches(item, session):
    with pytest.raises(RequestError, match=r"must be in a turn.*put it into system\(\), user\(\) or assistant"):
        await session.extend(item)


async def test_what_has_no_place_in_a_turn_is_refused(wire, session):
    with pytest.raises(RequestError, match="no turn is open"):
        await write(session)
    await tell(session, RoleBegin("user"))
    with pytest.raises(RequestError, match="assistant's turns"):
        await write(session)
    with pytest.raises(RequestError, match="a turn must be ended before"):
        await tell(session, RoleBegin("assistant"))
    with pytest.raises(RequestError, match="only the open turn"):
        await tell(session, RoleEnd("assistant"))
    with pytest.raises(UnsupportedError, match="videos"):
        await tell(session, Video(b"mp4", 3))
    await tell(session, RoleEnd("user"), RoleBegin("assistant"))
    with pytest.raises(UnsupportedError, match="user's turns only"):
        await tell(session, Image(PNG))
    assert not wire.requests


async def test_a_turn_that_has_begun_is_refused_with_the_ways_out(wire, session):
    await ask(session)
    await tell(session, "Name:")
    with pytest.raises(UnsupportedError, match=r"begun.*num_api_spec_tokens.*dialect="):
        await write(session)
    with pytest.raises(UnsupportedError, match="select must be the first"):
        await session.select(Select("x", ("a", "b"), "token_trie"))
    assert not wire.requests


@pytest.mark.parametrize("dialect", ["jsg", "vllm", "sglang"])
async def test_a_server_that_goes_on_in_a_turn_is_let_to(wire, dialect):
    async with backend_of(wire, dialect=dialect) as backend:
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        await tell(session, "Name:")
        assert (await write(session, stop=("\n",))).text == " Ada Lovelace"
        await tell(session, "\nBorn:")
        assert (await write(session, stop=("\n",))).text == " 1815"
        assert backend.usage().saved_calls == 1
    (request,) = wire.requests
    assert request["continue_final_message"] is True
    assert request.get("add_generation_prompt") is (None if dialect == "sglang" else False)
    assert request["messages"][-1] == {"role": "assistant", "content": "Name:"}
    assert request["logprobs"] is True


async def test_f19_a_schema_is_sent_as_the_api_wants_it_and_the_rest_refused(wire):
    async with backend_of(wire, dialect="openai") as backend:
        session = backend.open()
        await ask(session)
        await write(session, json_schema='{"type": "object"}', seed=1, top_p=0.5, max_tokens=1)
        for argument, value in (("regex", "a"), ("dtype", "int"), ("ebnf", "root ::= 'a'"), ("top_k", 3)):
            session = backend.open()
            await ask(session)
            with pytest.raises(UnsupportedError, match=argument):
                await write(session, **{argument: value})
    (request,) = wire.requests
    assert request["response_format"]["json_schema"] == {
        "name": "answer",
        "schema": {"type": "object"},
        "strict": True,
    }
    assert (request["seed"], request["top_p"]) == (1, 0.5)


async def test_logprobs_and_several_answers(session):
    await ask(session)
    written = await write(session, max_tokens=2, n=2, return_logprob=True, top_logprobs_num=1)
    assert (written.text, written.others) == ("Name:", ("Name:",))
    assert written.meta["output_token_logprobs"] == [[-0.1, None, "Name"], [-0.1, None, ":"]]
    assert written.meta["output_top_logprobs"] == [[[-0.1, None, "Name"]], [[-0.1, None, ":"]]]
    assert written.meta["completion_tokens"] == 4
    first, second = written.meta["answers"]
    assert first["output_token_logprobs"] == second["output_token_logprobs"]
    assert first["output_top_logprobs"] == written.meta["output_top_logprobs"]


async def test_forks_are_copies_and_joining_side_by_side_is_refused(wire, session):
    await tell(session, RoleBegin("user"), "Who?")
    one, other = await session.fork(2)
    for branch, text in ((one, "1"), (other, "2")):
        await tell(branch, text, RoleEnd("user"), RoleBegin("assistant"))
    await asyncio.gather(write(one, max_tokens=1), write(other, max_tokens=1))
    with pytest.raises(UnsupportedError, match="side by side"):
        await session.join([one, other])
    with pytest.raises(UnsupportedError, match="position_ids_offset"):
        await session.fork(1, [7])
    assert {request["messages"][0]["content"] for request in wire.requests} == {"Who?1", "Who?2"}


class TestWholeTurns:
    """Speculation where the API always begins its own turn."""

    async def test_a_turn_is_one_call(self, wire, backend):
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        assert session.wants_blocks
        items = [Text("Name:"), Gen("a", LINE), Text("\nBorn:"), Gen("b", LINE), Text("\n."), Text("!")]
        name, born = await session.generate_block(items)
        assert (name.text, born.text) == (" Ada Lovelace", " 1815") and name.meta is not None
        assert born.meta is not None
        assert (name.meta["api_calls"], born.meta["api_calls"]) == (1, 0)
        assert name.meta["finish_reason"] == {"type": "stop", "matched": "\n"}
        usage = backend.usage()
        assert (usage.calls, usage.saved_calls) == (1, 1)
        await tell(session, RoleEnd("assistant"))
        await ask(session, "And?")
        await write(session, max_tokens=1)
        first, second = wire.requests
        assert first["messages"] == [{"role": "user", "content": "Who?"}] and first["max_tokens"] == 64
        assert "stop" not in first
        assert second["messages"][1]["content"] == "Name: Ada Lovelace\nBorn: 1815\n.!"

    async def test_an_ordinary_gen_stops_where_it_should(self, wire, backend):
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        (name,) = await session.generate_block([Gen("a", LINE), Text("!")])
        assert name.text == "Name: Ada Lovelace"
        assert wire.requests[0]["stop"] == ["\n"] and wire.requests[0]["max_tokens"] == 16

    async def test_a_turn_that_is_read_in_its_middle_goes_on(self, wire, backend):
        """By what the call already gave, or, behind an ordinary gen, by a call whose answer begins with the turn."""
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        await session.generate_block([Text("Name:"), Gen("a", LINE)])
        assert len(wire.requests) == 1
        (born,) = await session.generate_block([Text("\nBorn:"), Gen("b", LINE)])
        assert (born.text, len(wire.requests)) == (" 1815", 1)

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        (name,) = await session.generate_block([Gen("a", SamplingArgs(max_tokens=2, temperature=0.0))])
        assert (name.text, len(wire.requests)) == ("Name:", 2)
        await tell(session, " ")
        assert (await write(session, "b", stop=("\n",))).text == "Ada Lovelace"
        assert len(wire.requests) == 3

    async def test_f17_tries_again_and_then_says_what_went_wrong(self, wire, backend):
        answers = iter(["Born: 1815\n", "Name - Ada\n", "Name: Ada\nBorn: 1815\n", "a", "b", "nonsense", *"cc"])
        wire.answer = lambda _body: next(answers)
        items = [Text("Name:"), Gen("a", LINE), Text("\nBorn:"), Gen("b", LINE)]

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        name, born = await session.generate_block(items)
        assert (name.text, born.text, len(wire.requests)) == (" Ada", " 1815", 3)

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        with pytest.raises(BackendError, match=r"3 times.*expected 'Name:', but it wrote 'nonsense'"):
            await session.generate_block(items)
        with pytest.raises(BackendError, match="2 times"):  # which it would repeat for ever
            await session.generate_block(items)
        assert len(wire.requests) == 8

    async def test_white_space_at_the_beginning_of_a_turn_may_be_left_out(self, wire, backend):
        wire.answer = lambda _body: "Name: Ada\n"

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        (name,) = await session.generate_block([Text("\n Name:"), Gen("a", LINE)])
        assert name.text == " Ada"

    async def test_white_space_that_the_model_wrote_is_no_place_to_go_on_from(self, wire, backend):
        """The second call's answer is too short at first: it must not be taken for what follows the turn so far."""
        wire.answer = lambda _body: "\n\n\nAda\n"

        session = backend.open(num_api_spec_tokens=1)
        await ask(session)
        (blank,) = await session.generate_block([Gen("a", SamplingArgs(temperature=0.0, max_tokens=3))])
        (name,) = await session.generate_block([Gen("b", SamplingArgs(temperature=0.0, max_tokens=1))])
        assert (blank.text, name.text) == ("\n\n\n", "Ada")

    async def test_f17_a_gen_without_a_stop_takes_the_rest_and_says_so(self, backend):
        """Where SGLang raises TypeError."""
        plain = SamplingArgs(temperature=0.0, max_tokens=64)

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        (rest,) = await session.generate_block([Text("Name:"), Gen("a", plain)])
        assert rest.text == PAGE[len("Name:") :]
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        with pytest.raises(BackendError, match=r"2 times.*give the gen before it a stop"):
            await session.generate_block([Text("Name:"), Gen("a", plain), Text("\nBorn:"), Gen("b", plain)])

    async def test_an_answer_that_was_too_short_is_asked_for_at_its_full_length(self, wire, backend):
        session = backend.open(num_api_spec_tokens=3)
        await ask(session)
        short = SamplingArgs(stop=("\n",), temperature=0.0, max_tokens=8)
        name, born = await session.generate_block([Text("Name:"), Gen("a", short), Text("\nBorn:"), Gen("b", short)])
        assert (name.text, born.text) == (" Ada Lovelace", " 1815")
        assert [request["max_tokens"] for request in wire.requests] == [8, len("Name:\nBorn:") + 16]

    async def test_f17_tokens_are_counted_not_characters(self, wire, backend):
        three = SamplingArgs(max_tokens=3, temperature=0.0)

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        name, more = await session.generate_block([Text("Name:"), Gen("a", three), Gen("b", three)])
        assert (name.text, more.text) == (" Ada Love", "lace\nBorn") and name.meta is not None
        assert (name.meta["completion_tokens"], name.meta["finish_reason"]) == (3, {"type": "length"})
        assert len(wire.requests) == 1

    async def test_without_tokens_what_cannot_be_proven_is_an_error(self, wire, backend):
        wire.has_tokens = False
        tight = SamplingArgs(stop=("\n",), max_tokens=6, temperature=0.0)

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        name, born = await session.generate_block([Text("Name:"), Gen("a", LINE), Text("\nBorn:"), Gen("b", tight)])
        assert (name.text, born.text) == (" Ada Lovelace", " 1815")  # 6 bytes with the stop, 6 tokens at most
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        with pytest.raises(BackendError, match="cannot be told"):
            await session.generate_block([Text("Name:"), Gen("a", tight)])

    @pytest.mark.parametrize(
        ("args", "word"),
        [
            ({"temperature": 0.5}, "temperature"),
            ({"n": 2}, "in n"),
            ({"regex": "a"}, "regex"),
            ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ],
    )
    async def test_gens_that_cannot_share_a_call_are_refused(self, wire, args, word, backend):
        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        other = SamplingArgs(**{"temperature": 0.0, **args})
        with pytest.raises(UnsupportedError, match=f"differ.*{word}"):
            await session.generate_block([Text("Name:"), Gen("a", LINE), Text("\nBorn:"), Gen("b", other)])
        assert not wire.requests

    @pytest.mark.parametrize(
        "args", [{"frequency_penalty": 1.0}, {"n": 2}, {"regex": "a"}, {"seed": 1, "temperature": 1.0}]
    )
    async def test_what_a_shared_call_cannot_honour_is_refused(self, wire, args):
        async with backend_of(wire, dialect="jsg") as jsg, backend_of(wire) as backend:
            assert not jsg.open(num_api_spec_tokens=64).wants_blocks
            session = backend.open(num_api_spec_tokens=64)
            await ask(session)
            given = SamplingArgs(**{"temperature": 0.0, **args})
            with pytest.raises(UnsupportedError, match="can have no penalties"):
                await session.generate_block([Text("Name:"), Gen("a", given)])
        assert not wire.requests

    async def test_a_break_in_the_stream_is_no_answer(self, wire, backend):
        wire.faults = [Fault(event={"error": {"message": "overloaded", "type": "t", "code": None, "param": None}})]

        session = backend.open(num_api_spec_tokens=64)
        await ask(session)
        with pytest.raises(BackendError, match="overloaded"):
            await session.generate_block([Text("Name:"), Gen("a", LINE)])
