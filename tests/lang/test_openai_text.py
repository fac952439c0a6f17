"""`jsg.OpenAI` on the completions API: the real package, a real socket, a toy model."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from jsg.errors import RequestError, UnsupportedError
from jsg.lang.remote.dialects import DIALECTS
from jsg.lang.remote.openai import OpenAI
from jsg.lang.words.ir import Gen, Image, RoleBegin, SamplingArgs, Video
from tests.lang.wire_servers import Fault, WireServer, ask, closing, tell, write


def backend_of(wire: WireServer, **options):
    return closing(OpenAI("toy", **{"base_url": wire.openai_url, "api": "completions", **options}))


async def test_a_gen_streams_and_the_prompt_goes_on_behind_it(wire, backend, session):
    assert await tell(session, "Who? ", "Name:") == "Who? Name:"
    first = await write(session, max_tokens=3)
    assert first.pieces == [" ", "Ada", " Love"]
    assert first.meta == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "finish_reason": {"type": "length"},
        "api_calls": 1,
    }
    second = await write(session, stop=("\n",))
    assert second.text == "lace" and second.meta["finish_reason"]["type"] == "stop"
    usage = backend.usage()
    assert (usage.calls, usage.prompt_tokens, usage.completion_tokens) == (2, 17, 5)
    assert usage.cached_tokens == 2
    assert repr(backend.token_usage) == "TokenUsage(prompt_tokens=17, completion_tokens=5)"
    backend.token_usage.reset()
    assert (backend.token_usage.prompt_tokens, backend.usage().prompt_tokens) == (0, 17)
    assert [request["prompt"] for request in wire.requests] == ["Who? Name:", "Who? Name: Ada Love"]
    assert wire.requests[1]["stop"] == ["\n"] and wire.prompt_tokens == 17


async def test_a_gen_without_a_limit_has_the_limit_of_every_backend_not_the_apis(wire, session):
    await tell(session, "Name:")
    await write(session)
    assert wire.requests[0]["max_tokens"] == 128


async def test_several_answers_are_asked_for_in_one_call(wire, session):
    await tell(session, "Name:")
    written = await write(session, n=3, stop=("\n",))
    assert written.text == " Ada Lovelace" and written.others == (" Ada Lovelace",) * 2
    assert await write(session, stop=("B",)) is not None
    assert wire.requests[0]["n"] == 3 and wire.requests[1]["prompt"] == "Name: Ada Lovelace"


async def test_f14_more_stops_than_the_api_takes_are_all_honoured_and_the_list_is_left_alone(wire, backend, session):
    stops = ("1", "2", "3", "4", "lace")

    await tell(session, "Name:")
    written = await write(session, stop=stops)
    assert written.text == " Ada Love"
    assert written.meta["finish_reason"] == {"type": "stop", "matched": "lace"}
    assert written.meta["completion_tokens"] is None
    await tell(session, "!")
    assert backend.usage().unreported_calls == 1
    assert (await write(session, n=2, stop=("1", "2", "3", "4", "5", "?"))).others == ("Name: Ada Lovelace\nBorn: ",)
    assert wire.requests[0]["stop"] == ["1", "2", "3", "4"]
    assert stops == ("1", "2", "3", "4", "lace")


async def test_stop_regex_is_honoured_by_every_api(wire):
    async with backend_of(wire) as backend:
        session = backend.open()
        await tell(session, "Name:")
        written = await write(session, stop_regex=("l[a-z]+e",), stop=("Q",), return_logprob=True)
        assert written.text == " Ada Love"
        assert written.meta["finish_reason"] == {"type": "stop", "matched": "l[a-z]+e"}
        assert [entry[2] for entry in written.meta["output_token_logprobs"]] == [" ", "Ada", " Love"]
        assert (await write(session, stop_regex=("[0-9]{2}",), n=2)).others == ("lace\nBorn: ",)
        with pytest.raises(RequestError, match="stop pattern"):
            await write(session, stop_regex=("(",))
    async with backend_of(wire, dialect="jsg") as backend:
        session = backend.open()
        await tell(session, "Name:")
        await write(session, stop_regex=("a+",))
    assert "stop_regex" not in wire.requests[0] and wire.requests[-1]["stop_regex"] == ["a+"]


async def test_closing_a_gen_early_ends_the_call(wire, backend, session):
    wire.faults = [Fault(after_tokens=2, hangs=True)]

    await tell(session, "Name:")
    pieces = session.generate(Gen("x", SamplingArgs(temperature=0.0)))
    assert (await anext(pieces)).text == " "
    await pieces.aclose()
    assert await asyncio.to_thread(wire.aborted.wait, 30)
    assert backend.usage().unreported_calls == 1
    assert wire.num_aborted == 1


async def test_logprobs_are_reported_in_the_published_form(wire, session):
    await tell(session, "Name:")
    written = await write(session, max_tokens=2, return_logprob=True, top_logprobs_num=2)
    assert written.meta["output_token_logprobs"] == [[-0.1, None, " "], [-0.1, None, "Ada"]]
    assert written.meta["output_top_logprobs"][0] == [[-0.1, None, " "], [-3.0, None, "?"]]
    assert wire.requests[0]["logprobs"] == 2


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("dialect", ["openai", "vllm"])
async def test_f19_more_alternatives_than_the_api_reports_are_refused_and_not_made_fewer(wire, api, dialect):
    most = 5 if (api, dialect) == ("completions", "openai") else 20

    options = {"api": api, "dialect": dialect}
    async with backend_of(wire, **options) as strict, backend_of(wire, on_unsupported="warn", **options) as lenient:

        async def report(backend: OpenAI, num_top: int) -> dict[str, Any]:
            session = backend.open()
            await (ask(session) if api == "chat" else tell(session, "Name:"))
            return (await write(session, max_tokens=1, return_logprob=True, top_logprobs_num=num_top)).meta

        with pytest.raises(UnsupportedError, match=f"OpenAI.*top_logprobs_num.*at most {most}") as caught:
            await report(strict, most + 1)
        assert caught.value.param == "top_logprobs_num"
        assert not wire.requests
        with pytest.warns(UserWarning, match="top_logprobs_num"):
            left_out = await report(lenient, most + 1)
        assert "output_token_logprobs" in left_out and "output_top_logprobs" not in left_out
        assert "output_top_logprobs" in await report(strict, most)
    without, with_most = wire.requests
    if api == "chat":
        assert (without["logprobs"], "top_logprobs" in without, with_most["top_logprobs"]) == (True, False, most)
    else:
        assert (without["logprobs"], with_most["logprobs"]) == (0, most)


async def test_alternatives_without_logprobs_are_refused_as_on_the_engine(wire, session):
    await tell(session, "Name:")
    with pytest.raises(RequestError, match="left out without return_logprob") as caught:
        await write(session, top_logprobs_num=2)
    assert caught.value.param == "top_logprobs_num"
    await write(session, max_tokens=1, top_logprobs_num=0)
    assert len(wire.requests) == 1


async def test_logprobs_that_the_api_does_not_report_take_their_alternatives_with_them(wire):
    blind = dataclasses.replace(DIALECTS["compatible"], has_logprobs=False)

    async with backend_of(wire, dialect=blind, on_unsupported="warn") as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.warns(UserWarning, match="return_logprob") as warned:
            written = await write(session, max_tokens=1, return_logprob=True, top_logprobs_num=9)
        assert len(warned) == 1
        assert "output_token_logprobs" not in written.meta
    assert "logprobs" not in wire.requests[0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("regex", "[a-z]+"),
        ("json_schema", "{}"),
        ("ebnf", "root ::= 'a'"),
        ("dtype", "int"),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("min_tokens", 2),
        ("stop_token_ids", (3,)),
        ("ignore_eos", True),
        ("logprob_start_len", 0),
    ],
)
async def test_f19_what_the_api_cannot_honour_is_an_error_or_a_warning_that_names_it(wire, argument, value):
    async with backend_of(wire) as strict, backend_of(wire, on_unsupported="warn") as lenient:
        session = strict.open()
        await tell(session, "Name:")
        with pytest.raises(UnsupportedError, match=f"OpenAI.*{argument}") as caught:
            await write(session, **{argument: value})
        assert caught.value.param == argument
        assert not wire.requests

        session = lenient.open()
        await tell(session, "Name:")
        with pytest.warns(UserWarning, match=argument):
            assert (await write(session, stop=("\n",), **{argument: value})).text == " Ada Lovelace"
        await write(session, **{argument: value})  # once is enough
        assert argument not in wire.requests[0]


async def test_values_that_ask_for_nothing_are_not_refused(wire, session):
    await tell(session, "Name:")
    await write(session, top_k=-1, min_p=0.0, repetition_penalty=1.0, ignore_eos=False, min_tokens=0, n=1)
    assert not {"top_k", "min_p", "n"} & wire.requests[0].keys()


async def test_what_the_dialect_knows_is_sent(wire):
    async with backend_of(wire, dialect="jsg") as backend:
        session = backend.open()
        await tell(session, "Name:")
        await write(session, top_k=5, min_p=0.1, dtype="int", top_p=0.5, seed=3)
    async with backend_of(wire, dialect="vllm") as backend:
        session = backend.open()
        await tell(session, "Name:")
        await write(session, json_schema='{"type": "string"}')
        await write(session, regex="a|b", ignore_eos=True)
    jsg, schema, regex = wire.requests
    assert {name: jsg[name] for name in ("top_k", "min_p", "top_p", "seed")} == {
        "top_k": 5,
        "min_p": 0.1,
        "top_p": 0.5,
        "seed": 3,
    }
    assert jsg["regex"] == r"[-+]?[0-9]+[ \n]*"
    assert schema["structured_outputs"] == {"json": {"type": "string"}}
    assert regex["structured_outputs"] == {"regex": "a|b"} and regex["ignore_eos"] is True


async def test_a_schema_that_is_no_json_and_two_forms_at_once_are_refused(wire):
    async with backend_of(wire, dialect="jsg") as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(RequestError, match="an answer has one form"):
            await write(session, regex="a", dtype="int")
    async with backend_of(wire, dialect="vllm") as backend:
        session = backend.open()
        await tell(session, "Name:")
        with pytest.raises(RequestError, match="json_schema must be JSON"):
            await write(session, json_schema="{")
    assert not wire.requests


async def test_turns_and_pictures_have_no_place_in_a_text(session):
    with pytest.raises(UnsupportedError, match=r'has no turns.*api="chat"'):
        await session.extend(RoleBegin("user"))
    for item in (Image(b"png"), Video(b"mp4", 3)):
        with pytest.raises(UnsupportedError, match="no pictures"):
            await session.extend(item)


async def test_f3_joining_side_by_side_is_refused_and_not_made_to_text(session):
    await tell(session, "Name:")
    branches = await session.fork(2)
    with pytest.raises(UnsupportedError, match=r"2 branches side by side.*gather_variable"):
        await session.join(branches)
    with pytest.raises(UnsupportedError, match="position_ids_offset"):
        await session.fork(2, [0, 1000])
    assert len(await session.fork(2, [0, 0])) == 2


async def test_forks_go_their_own_ways(wire, session):
    await tell(session, "Name:")
    one, other = await session.fork(2)
    await tell(one, " Ada")
    await tell(other, " Bo")
    await asyncio.gather(write(one, max_tokens=1), write(other, max_tokens=1), write(session, max_tokens=1))
    for branch in (one, other, session):
        await branch.close()
    assert {request["prompt"] for request in wire.requests} == {"Name: Ada", "Name: Bo", "Name:"}


async def test_the_model_decides_the_api(wire):
    for model, path in (("gpt-3.5-turbo-instruct", "completions"), ("gpt-4o-mini", "chat")):
        async with backend_of(wire, api=None) as unused, _named(wire, model) as backend:
            assert type(backend.open()).__name__ == {"completions": "TextSession", "chat": "ChatSession"}[path]
            assert type(unused.open()).__name__ == "ChatSession"


@contextlib.asynccontextmanager
async def _named(wire: WireServer, model: str):
    backend = OpenAI(model, base_url=wire.openai_url)
    try:
        yield backend
    finally:
        await backend.close()


async def test_server_info_lists_the_models_and_there_is_no_cache_to_flush(backend):
    info = await backend.server_info()
    assert info["model_path"] == "toy"
    assert [model["id"] for model in info["models"]] == ["toy"]
    with pytest.raises(UnsupportedError, match="cache"):
        await backend.flush_cache()
