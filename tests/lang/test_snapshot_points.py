"""Where programs say that a snapshot of the state is worth keeping: where several sessions go on from one prompt."""

import pytest

from jsg.errors import QueueFullError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import RoleBegin, RoleEnd, Select, Text
from jsg.processing.parts import JoinedPart, TextPart, TokenPart
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.prompts.encode_parts import EncodedPrompt, encode_choices, encode_parts
from tests.lang.fake_model import FakeModel, said, turn
from tests.processing.conftest import KINDS

SHOTS = "Q: What has wings?\nA: A bird.\nQ: What has wheels?\nA: A car.\nQ:"
MOST_LOST = 16


def agreeing(left: EncodedPrompt, right: EncodedPrompt) -> int:
    pairs = zip(left.input_ids, right.input_ids, strict=False)
    return next(i for i, (token, other) in enumerate(pairs) if token != other)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_branches_say_where_they_part(tiny: Tokenizer, is_refused: bool):
    """Whether their prefix is held or not: a server that has too many holds keeps none, and says nothing."""
    model = FakeModel(tiny, ["a", "b", "c", "d"])
    model.hold_error = QueueFullError("no room") if is_refused else None
    session = TokenSession(model)
    await session.extend(Text(SHOTS))
    outer = await session.fork(2)
    for branch, text in zip(outer, (" one", " two"), strict=True):
        await branch.extend(Text(text))
        await said(branch)
    common = len(tiny.encode(SHOTS))
    assert [prompt.snapshot_at for prompt in model.prompts] == [(common,)] * 2
    await outer[0].extend(Text(" and"))
    inner = await outer[0].fork(2)
    for branch in inner:
        await branch.extend(Text(" so"))
        await said(branch)
    first, second = model.prompts[2:]
    assert first.snapshot_at == second.snapshot_at == (len(first.input_ids) - len(tiny.encode(" so")),)


@pytest.mark.parametrize("kind", KINDS)
async def test_copies_say_where_they_part_and_keep_their_tokens(all_tokenizers, kind: str):
    """As the runs of a batch, which have their beginning in common. Its text is encoded together with theirs."""
    tokenizer = all_tokenizers[kind]
    model = FakeModel(tokenizer, [".", "."])
    beginning = TokenSession(model)
    await beginning.extend(Text(SHOTS))
    for text in (" What is it?", "th"):
        session = beginning.copy()
        await session.extend(Text(text))
        await said(session)
    for prompt, text in zip(model.prompts, (" What is it?", "th"), strict=True):
        assert prompt.input_ids == tuple(tokenizer.encode(SHOTS + text)), "the place changes no token"
        agree = agreeing(*model.prompts)
        [point] = prompt.snapshot_at
        assert agree - MOST_LOST <= point <= agree


async def test_messages_in_front_of_a_question_end_at_a_point(tiny: Tokenizer):
    model = FakeModel(tiny, ["."] * 3)
    sessions = [TokenSession(model) for _ in range(2)]
    for session, question in zip(sessions, ("Who is it?", "Why?"), strict=True):
        await turn(session, "system", "Be brief.")
        await turn(session, "user", question)
        await session.extend(RoleBegin("assistant"))
        await said(session)
    first, second = model.prompts
    [point] = first.snapshot_at
    assert second.snapshot_at == (point,)
    assert 0 < point <= agreeing(first, second) <= point + MOST_LOST
    await sessions[0].extend(Text(" more"))
    await said(sessions[0])
    assert model.prompts[2].snapshot_at == (), "what it has computed already is of no interest"


@pytest.mark.parametrize("in_turn", [False, True])
async def test_a_run_of_a_batch_says_where_its_own_text_begins(tiny: Tokenizer, in_turn: bool):
    """Of all pieces in which it has some the first, if enough is in front of it. The place changes no token."""
    model, whole = FakeModel(tiny, ["."] * 3), FakeModel(tiny, ["."])
    for run_on, own in ((model, {"Who is it?", "so"}), (whole, {"nowhere"})):
        session = TokenSession(run_on)
        session.own_texts = frozenset(own)
        for item in (*[RoleBegin("user")] * in_turn, Text(SHOTS), Text(" Now: Who is it? And so on")):
            await session.extend(item)
        await said(session)
    [point], (prompt,) = model.prompts[0].snapshot_at, whole.prompts
    assert prompt.snapshot_at == () and model.prompts[0].input_ids == prompt.input_ids
    assert tiny.decode(prompt.input_ids[:point], skip_special_tokens=False).endswith("Now:")
    for begin in ((Text("Q: "),), (Text(SHOTS), RoleBegin("user"))):
        session = TokenSession(model)
        session.own_texts = frozenset(["Why?"])
        for item in (*begin, Text("Why?")):
            await session.extend(item)
        await said(session)
    assert model.prompts[1].snapshot_at == () and len(model.prompts[2].snapshot_at) == 1, "a turn has its own place"


async def test_an_empty_copy_begins_as_any_prompt_does(tiny: Tokenizer):
    model = FakeModel(tiny, [".", "."])
    for session in (TokenSession(model).copy(), TokenSession(model)):
        await turn(session, "user", "hi")
        await said(session)
    assert model.prompts[0] == model.prompts[1]


async def test_a_turns_white_space_is_trimmed_across_a_place(tiny: Tokenizer):
    whole, model = [], FakeModel(tiny, [".", "."])
    for is_copied in (False, True):
        session = TokenSession(model)
        await session.extend(RoleBegin("user"))
        await session.extend(Text("hi \n"))
        session = session.copy() if is_copied else session
        await session.extend(Text(" "))
        await session.extend(RoleEnd("user"))
        await said(session)
        whole.append(model.prompts[-1].input_ids)
    assert whole[0] == whole[1]


async def test_a_selection_says_where_its_copies_part(tiny: Tokenizer):
    model = FakeModel(tiny, next_logprobs=lambda ids: [-1.0] * tiny.vocab_size)
    session = TokenSession(model)
    await session.extend(Text(SHOTS))
    copied = session.copy()
    await copied.extend(Text(" this is"))
    await copied.select(Select("x", (" one", " two"), "token_trie"))
    [before] = model.prompts
    [point] = before.snapshot_at
    assert len(tiny.encode(SHOTS)) - MOST_LOST <= point <= len(tiny.encode(SHOTS))


class TestParts:
    def test_an_empty_text_marks_a_place(self, tiny: Tokenizer):
        ids = tiny.encode("the quick brown fox")
        encoded = encode_parts(tiny, [TextPart("the quick brown"), TextPart(""), TextPart(" fox")])
        assert encoded.input_ids == tuple(ids) and encoded.part_ids == (tuple(ids), (), ())
        [point] = encoded.snapshot_at
        assert tiny.encode("the quick brown dog")[:point] == ids[:point]

    def test_no_tokens_mark_a_place_that_texts_do_not_span(self, tiny: Tokenizer):
        encoded = encode_parts(tiny, [TextPart("the qu"), TokenPart(()), TextPart("ick"), TokenPart((5,))])
        assert encoded.snapshot_at == (len(tiny.encode("the qu")),)

    def test_few_places_count_and_the_last_of_them(self, tiny: Tokenizer):
        parts = [part for i in range(50) for part in (TokenPart((i + 5,)), TokenPart(()), TextPart(""))]
        assert encode_parts(tiny, parts).snapshot_at == (47, 48, 49, 50)
        text = [part for _ in range(50) for part in (TextPart(" word"), TextPart(""))]
        assert len(encode_parts(tiny, text).snapshot_at) == 4

    def test_joined_prompts_have_none(self, tiny: Tokenizer):
        parts = [TextPart("so"), TokenPart(()), JoinedPart(((TextPart("a"), TextPart("")),)), TextPart("b")]
        assert encode_parts(tiny, parts).snapshot_at == ()

    def test_a_place_is_not_behind_what_all_choices_have(self, tiny: Tokenizer):
        parts = [TextPart("it is a gir"), TextPart("")]
        encoded = encode_choices(tiny, parts, ["l", "affe"])
        assert all(point <= len(encoded.prefix_ids) for point in encoded.before.snapshot_at)
