"""Pictures in sessions: the tokens of a program's prompt are those of the same conversation in a chat."""

from pathlib import Path

import pytest

from jsg.engine.media_reader import ModelMediaReader
from jsg.errors import RequestError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Select, Text
from jsg.processing.parts import MediaPart
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.turns import ChatTurns
from tests.golden.vision_variants import IMAGE_TOKEN
from tests.lang.fake_model import FakeModel
from tests.server.byte_tokenizer import CHAT_TEMPLATE
from tests.server.vision_model import PATCHES, VISION_TEMPLATE, png

QUESTION = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture
def reader(model_dir: Path, tokenizer: Tokenizer) -> ModelMediaReader:
    reader = ModelMediaReader.of_model(model_dir, tokenizer)
    assert reader is not None
    return reader


async def ask(session: TokenSession) -> None:
    """The question, and an answer to it."""
    await session.extend(RoleBegin("user"))
    await session.extend(Image(png(), "image/png"))
    await session.extend(Text("what?"))
    await session.extend(RoleEnd("user"))
    await session.extend(RoleBegin("assistant"))
    async for _ in session.generate(Gen("a", SamplingArgs(max_tokens=3))):
        pass


async def test_a_programs_tokens_are_those_of_a_chat(tokenizer, reader):
    model = FakeModel(tokenizer, ["."], media=reader)
    await ask(TokenSession(model))
    expected = ChatPrompt(tokenizer, media=reader).prompt(
        [QUESTION], media=reader.read([MediaPart("image", png(), "image/png")])
    )
    (prompt,) = model.prompts
    assert prompt.input_ids == expected.input_ids
    assert [(item.start, item.digest) for item in prompt.media] == [
        (item.start, item.digest) for item in expected.media
    ]
    assert prompt.input_ids.count(IMAGE_TOKEN) == PATCHES


async def test_branches_and_choices_go_on_behind_the_same_picture(tokenizer, reader):
    model = FakeModel(tokenizer, [".", "!"], media=reader, next_logprobs=lambda _: [-6.0] * 512)
    session = TokenSession(model)
    await session.extend(Image(png(), "image/png"))
    branches = await session.fork(2)
    for branch, text in zip(branches, "ab", strict=True):
        await branch.extend(Text(text))
        async for _ in branch.generate(Gen("a", SamplingArgs(max_tokens=3))):
            pass
    await session.extend(Text("it is "))
    await session.select(Select("c", ("yes", "no"), "token_trie"))
    assert len({prompt.media[0].digest for prompt in model.prompts}) == 1
    assert {prompt.input_ids[:PATCHES] for prompt in model.prompts} == {(IMAGE_TOKEN,) * PATCHES}
    for each in (*branches, session):
        await each.close()


async def test_offsets_are_refused(tokenizer, reader):
    model = FakeModel(tokenizer, ["."], media=reader)
    session = TokenSession(model)
    await session.extend(Image(png(), "image/png"))
    (branch,) = await session.fork(1, [7])
    await branch.extend(Text("a"))
    with pytest.raises(RequestError, match="offsets of positions"):
        async for _ in branch.generate(Gen("a", SamplingArgs(max_tokens=3))):
            pass
    for each in (branch, session):
        await each.close()


@pytest.mark.parametrize(
    ("template", "around"),
    [
        (VISION_TEMPLATE, ("", "\n")),
        (VISION_TEMPLATE.replace("<image>\n", "[<image>]"), ("[", "]")),
        (CHAT_TEMPLATE, ("", "\n")),  # has no place: as in the text of a chat
    ],
)
def test_what_the_template_writes_around_a_picture(template, around):
    turns = ChatTurns(template, bos_token="<s>", eos_token="</s>", placeholders={"image": "<image>"})
    assert turns.around_media("image") == around
