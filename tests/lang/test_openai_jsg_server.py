"""The remote backends against jsg's own server, over sockets: two programs of ours that must understand each other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import jsg as sgl
from jsg.errors import RequestError, UnsupportedError
from jsg.lang.remote.anthropic import Anthropic
from jsg.lang.remote.openai import OpenAI
from jsg.lang.streams.loop import shared_loop
from jsg.lang.words.ir import Select
from tests.lang.wire_servers import ask, serving, tell, write
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from tests.server.scripted import ScriptedServer

PAGE = "Name: Ada\nBorn: 1815\n"


@pytest.mark.slow
def test_a_real_model_says_the_same_with_speculation():
    """The embedded model, greedy: tokens of a real tokenizer, counted by the server."""

    @sgl.function
    def plain(s, text):
        s += text
        for number in range(5):
            s += sgl.gen(f"g{number}", max_tokens=4 + number, stop=[".", ","])

    ahead = sgl.function(num_api_spec_tokens=64)(plain.func)
    texts = ["The quick brown fox", "Once upon a time", "A list: 1, 2,", "def f(x):\n", "Grüße aus"]
    with sgl.Runtime(max_running_requests=8, max_total_tokens=8192, context_length=1024) as runtime:
        backend = sgl.OpenAI("tiny", base_url=f"{runtime.url}/v1", api="completions", dialect="jsg")
        try:
            for text in texts:
                states = [program.run(text, temperature=0, backend=backend) for program in (plain, ahead)]
                assert states[0].text() == states[1].text()
                assert [states[0][f"g{n}"] for n in range(5)] == [states[1][f"g{n}"] for n in range(5)]
            assert backend.usage().saved_calls > 0

            @sgl.function
            def choose(s):
                s += "The sky is"
                s += sgl.select("colour", [" blue", " green", " a", " bluer"])

            probabilities = [
                choose.run(backend=each).get_meta_info("colour")["probabilities"] for each in (backend, runtime)
            ]
            assert probabilities[0] == pytest.approx(probabilities[1], rel=1e-3)
        finally:
            shared_loop().submit(backend.close()).result(30)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory, CHAT_TEMPLATE)
    return directory


@pytest.fixture
def server(tokenizer_dir: Path) -> Iterator[tuple[ScriptedServer, str]]:
    made = ScriptedServer(tokenizer_dir)
    with serving(made.http.app) as url:
        yield made, url


async def test_completions(server):
    made, url = server
    made.engine.answer = PAGE[len("Name:") :]

    backend = OpenAI("fake", base_url=f"{url}/v1", api="completions", dialect="jsg")
    session = backend.open(num_api_spec_tokens=64)
    await tell(session, "Name:")
    name = await write(session, stop=("\n",))
    await tell(session, "\nBorn:")
    born = await write(session, stop=("\n",))
    assert (name.text, born.text) == (" Ada", " 1815") and name.meta["completion_tokens"] == 5
    assert (backend.usage().calls, backend.usage().saved_calls) == (1, 1)

    session = backend.open()
    await tell(session, "Name:")
    reported = await write(session, max_tokens=2, return_logprob=True, top_logprobs_num=1, top_k=5, min_p=0.1)
    assert [entry[2] for entry in reported.meta["output_token_logprobs"]] == [" ", "A"]
    assert (made.sampling.top_k, made.sampling.min_p) == (5, 0.1)
    assert (await write(session, stop_regex=("[0-9]+",), stop=("1815",))).text == " Ada\nBorn: "
    assert made.sampling.stop_regex == ("[0-9]+",)
    await tell(session, "?")
    with pytest.raises(RequestError, match="HTTP 400"):
        await write(session, temperature=-1.0)
    await backend.close()


async def test_chat_goes_on_in_a_turn(server):
    made, url = server
    made.engine.answer = PAGE[len("Name:") :]

    backend = OpenAI("fake", base_url=f"{url}/v1", dialect="jsg")
    session = backend.open(num_api_spec_tokens=64)
    await ask(session)
    await tell(session, "Name:")
    assert (await write(session, stop=("\n",))).text == " Ada"
    await tell(session, "\nBorn:")
    assert (await write(session, stop=("\n",))).text == " 1815"
    await backend.close()
    assert made.prompt == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nName:"
    assert len(made.engine.requests) == 1


async def test_scores_of_a_prompt_choose(server):
    """The scripted engine finds every token equally likely, so each choice's share is that of its tokens."""
    _, url = server

    backend = OpenAI("fake", base_url=f"{url}/v1", api="completions", dialect="jsg")
    session = backend.open()
    await tell(session, "Q: ")
    selection = await session.select(Select("x", ("a", "bc"), "token_trie"))
    assert selection.choice == "a" and selection.probabilities is not None
    assert sum(selection.probabilities) == pytest.approx(1)
    assert selection.probabilities[0] > selection.probabilities[1]
    await backend.close()


async def test_messages(server):
    made, url = server
    made.engine.answer = PAGE[len("Name:") :]

    backend = Anthropic("fake", base_url=url)
    session = backend.open()
    await ask(session)
    await tell(session, "Name:")
    name = await write(session, stop=("\n", "1815"))
    assert name.text == " Ada"
    await tell(session, "\n")
    with pytest.raises(UnsupportedError, match="seed"):
        await write(session, seed=1)
    assert (await write(session, max_tokens=3)).meta["completion_tokens"] == 3
    await backend.close()
    assert made.prompt == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nName: Ada"
