"""Forks, hints and joins of sessions on a model whose tokens jsg knows."""

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from jsg.errors import QueueFullError, RequestError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.tokens.shared_prefix import SharedPrefix
from jsg.lang.words.ir import RoleBegin, RoleEnd, Select, Text
from jsg.processing.parts import JoinedPart, OffsetPart, TextPart, TokenPart
from jsg.processing.tokenizer import Tokenizer
from tests.lang.fake_model import FakeModel, said, turn
from tests.speech.prompts.chat_templates import STYLES

USER, ASSISTANT = "user", "assistant"

_EMPTY_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
)
"""What a model is to begin a reply with is not what stands before a reply that is given."""


class TestFork:
    async def test_f4_a_fork_does_not_wait_for_its_hint(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b"])
        model.hold_gate.clear()
        session = TokenSession(model)
        await session.extend(Text("there was"))
        branches = await session.fork(2)
        for branch, text in zip(branches, ("a", "b"), strict=True):
            await branch.extend(Text(f" {text}"))
        gens = [asyncio.create_task(said(branch)) for branch in branches]
        while not model.holds:
            await asyncio.sleep(0)
        assert not model.prompts, "a branch asks behind the hint"
        model.hold_gate.set()
        assert await asyncio.gather(*gens) == ["a", "b"]
        common = tuple(tiny.encode("there was"))
        assert [p.input_ids for p in model.prompts] == [(*common, *tiny.encode(f" {text}")) for text in ("a", "b")]
        assert len(model.holds) == 1

    async def test_a_prefix_is_held_until_all_branches_are_closed(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a"])
        session = TokenSession(model)
        await session.extend(Text("there was"))
        one, two = await session.fork(2)
        await said(one)
        assert model.num_holds == 1
        (copy,) = await two.fork(1)
        for branch in (one, two, two):
            await branch.close()
            assert model.num_holds == 1, "the copy still needs it"
        await copy.close()
        assert model.num_holds == 0

    async def test_branches_that_are_closed_at_once_hold_nothing(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a"])
        model.hold_gate.clear()
        session = TokenSession(model)
        await session.extend(Text("there was"))
        for branch in await session.fork(2):
            await branch.close()
        assert model.num_holds == 0
        await session.extend(Text("x"))
        await said(session)
        assert tiny.decode(model.prompts[0].input_ids) == "there wasx"

    async def test_a_model_that_cannot_hold_is_asked_without(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b", "c"])
        model.hold_error = QueueFullError("too many holds")
        session = TokenSession(model)
        await session.extend(Text("there was a gi"))
        for branch in await session.fork(2):
            await branch.extend(Text("rl"))
            await said(branch)
            await branch.close()
        cut = (*tiny.encode("there was a gi"), *tiny.encode("rl"))
        assert cut != tuple(tiny.encode("there was a girl"))
        assert [p.input_ids for p in model.prompts] == [cut, cut], "tokens as if it were held"

    async def test_nested_forks_share_what_they_have_in_common(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["x"] * 9)
        root = TokenSession(model)
        await root.extend(Text("one"))
        sessions = [root]
        for _ in range(2):
            sessions = [branch for session in sessions for branch in await session.fork(2)]
            for index, branch in enumerate(sessions):
                await branch.extend(Text(f" {index}"))
        texts = await asyncio.gather(*(said(branch) for branch in sessions))
        assert texts == ["x"] * 4
        ends = sorted(tiny.decode(p.input_ids) for p in model.prompts)
        assert ends == ["one 0 0", "one 0 1", "one 1 2", "one 1 3"]
        assert len(model.holds) == 3
        for branch in sessions:
            await branch.close()
        assert model.num_holds == 1, "the branches of the root are open"
        await root.extend(Text(" end"))
        await said(root)
        assert tiny.decode(model.prompts[-1].input_ids) == "one end"

    async def test_an_empty_prompt_is_not_held(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a"])
        branches = await TokenSession(model).fork(3)
        await branches[2].extend(Text("hi"))
        await said(branches[2])
        assert not model.holds

    async def test_a_fork_in_a_turn_goes_on_in_it(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b"])
        session = TokenSession(model)
        await session.extend(RoleBegin(USER))
        for branch in await session.fork(2):
            await branch.extend(Text("x"))
            await branch.extend(RoleEnd(USER))
            await branch.extend(RoleBegin(ASSISTANT))
            await said(branch)
            decoded = tiny.decode(model.prompts[-1].input_ids, skip_special_tokens=False)
            assert decoded == "<|user|>x<|end|><|assistant|>"

    async def test_f5_offsets_move_the_positions_of_a_branch(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b"])
        session = TokenSession(model)
        await session.extend(Text("one"))
        for offset, branch in zip((0, 7), await session.fork(2, [0, 7]), strict=True):
            await branch.extend(Text(" two"))
            await said(branch)
            jumps = ((len(tiny.encode("one")), offset),) if offset else ()
            assert model.prompts[-1].position_jumps == jumps
        for wrong in ([1], [0, -1]):
            with pytest.raises(RequestError, match="position_ids_offset must have 2 numbers from 0"):
                await session.fork(2, wrong)

    async def test_f5_an_offset_right_before_a_gen_moves_what_the_model_writes(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b"])
        session = TokenSession(model)
        await session.extend(Text("one"))
        _, branch = await session.fork(2, [0, 50])
        for text in ("a", "b"):
            assert await said(branch) == text
            assert model.prompts[-1].position_jumps == ((len(tiny.encode("one")), 50),)
            await branch.extend(Text(" two"))

    async def test_an_offset_alone_is_no_prompt(self, tiny: Tokenizer):
        style = STYLES["headers"]  # which begins with a BOS
        model = FakeModel(tiny, [".", "."], template=style.source)
        (branch,) = await TokenSession(model).fork(1, [7])
        for session in (branch, *await branch.fork(1)):
            text = await turn(session, USER, "Hi")
            assert tiny.bos_token is not None
            assert text.startswith(tiny.bos_token)
            await said(session)
            assert model.prompts[-1].position_jumps == ((0, 7),)
            assert tiny.decode(model.prompts[-1].input_ids, skip_special_tokens=False) == text
        assert not model.holds

    @pytest.mark.parametrize("size", [1, 2])
    async def test_a_long_chain_of_forks_is_resolved(self, tiny: Tokenizer, size: int):
        model = FakeModel(tiny, ["."])
        session = TokenSession(model)
        for _ in range(2000 // size):
            await session.extend(Text("y"))
            (session, *_) = await session.fork(size)
        await said(session)
        assert (
            model.prompts[-1].input_ids
            == (*tiny.encode("y"), *tiny.encode("y", add_special_tokens=False) * 1999)[: 2000 // size]
        )

    async def test_what_a_prompt_began_with_is_dropped_when_it_is_known(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny))
        prefixes: list[weakref.ref[SharedPrefix]] = []
        for _ in range(9):
            await session.extend(Text("y"))
            branches = await session.fork(2)
            assert session._prefix is not None
            prefixes.append(weakref.ref(session._prefix))
            for branch in branches:
                await branch._resolve()
                await branch.close()
            del branch, branches
        gc.collect()
        assert sum(prefix() is not None for prefix in prefixes) == 1, "that of the last fork"
        copy = session
        for _ in range(9):
            (copy,) = await copy.fork(1)
        assert not copy._held, "a copy has nothing to give back"

    async def test_a_hint_that_breaks_is_logged_and_is_none(self, tiny: Tokenizer, caplog: pytest.LogCaptureFixture):
        model = FakeModel(tiny, ["a"])
        model.hold_error = ZeroDivisionError("a bug")
        unheeded: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheeded.append(context))
        session = TokenSession(model)
        await session.extend(Text("there"))
        await session.hint()
        for branch in await session.fork(2):
            await branch.close()
        nobody = await session.fork(2)
        while len(model.holds) < 2:
            await asyncio.sleep(0)
        for _ in range(9):
            await asyncio.sleep(0)
        del branch, nobody, session._prefix
        session._prefix = None
        gc.collect()
        assert not unheeded
        assert "ZeroDivisionError" in caplog.text

    async def test_a_branch_goes_on_without_a_hint_that_broke(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a"])
        model.hold_error = ZeroDivisionError("a bug")
        session = TokenSession(model)
        await session.extend(Text("there"))
        _, branch = await session.fork(2)
        assert await said(branch) == "a"


class TestHint:
    async def test_a_hint_holds_the_prompt_and_changes_nothing(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["x"])
        session = TokenSession(model)
        await session.hint()
        assert not model.holds, "there is nothing yet"
        await session.extend(Text("there was a l"))
        await session.hint()
        assert (model.num_holds, model.num_waited) == (1, 1)
        await session.extend(Text("ittle"))
        await session.hint()
        assert model.num_holds == 1, "in place of the one before"
        await said(session)
        assert model.prompts[0].input_ids == tuple(tiny.encode("there was a little"))
        await session.close()
        await session.close()
        assert model.num_holds == 0

    async def test_a_hint_that_is_refused_is_none(self, tiny: Tokenizer):
        model = FakeModel(tiny)
        model.hold_error = QueueFullError("too many holds")
        session = TokenSession(model)
        await session.extend(Text("there"))
        await session.hint()
        assert model.num_holds == 0
        await session.close()


class TestJoin:
    async def test_branches_stand_side_by_side_as_the_tokens_they_are(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "b", "c"])
        session = TokenSession(model)
        await session.extend(Text("Docs:"))
        branches = await session.fork(2, [0, 5])
        await branches[0].extend(Text(" one"))
        await said(branches[0])
        await branches[1].extend(Text(" two"))
        await session.join(branches)
        for branch in branches:
            await branch.close()
        await session.extend(Text(" So"))
        await said(session)
        common, *own = (tuple(tiny.encode(text)) for text in ("Docs:", " one", "a", " two", " So"))
        assert model.calls[-1].prompt == (
            TokenPart(common),
            TokenPart(()),  # marks where the branches part
            JoinedPart(((TokenPart(own[0] + own[1]),), (OffsetPart(5), TextPart(" two", is_markup=True)))),
            TextPart(" So", is_markup=True),
        )
        first = len(common)
        second = first + len(own[0] + own[1])
        assert model.prompts[-1].joined == (first, second, second + len(own[2]))
        await session.extend(Text("!"))
        model.answers.append("d")
        await said(session)
        assert model.prompts[-1].joined == model.prompts[-2].joined
        assert not any(model.prompts[-1].part_ids[:1]) or model.calls[-1].prompt[-1] == TextPart("!", is_markup=True)
        assert isinstance(model.calls[-1].prompt[1], JoinedPart)
        assert not any(isinstance(p, TextPart) for branch in model.calls[-1].prompt[1].branches for p in branch)

    async def test_a_branch_that_begins_with_a_gen(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["one", "two", "."])
        session = TokenSession(model)
        await session.extend(Text("Docs:"))
        branches = await session.fork(2)
        for branch in branches:
            await said(branch)
            await branch.extend(Text("!"))
        await session.join(branches)
        await session.extend(Text(" So"))
        await said(session)
        common, one, two, end = (len(tiny.encode(text)) for text in ("Docs:", "one", "two", "!"))
        assert model.prompts[-1].joined == (common, common + one + end, common + one + two + 2 * end)

    async def test_one_branch_is_told_from_what_it_shares(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."])
        session = TokenSession(model)
        await session.extend(Text("there was a l"))
        (branch,) = await session.fork(1)
        await branch.extend(Text("ittle"))
        await session.join([branch])
        await session.extend(Text(" girl"))
        await said(session)
        assert not model.holds
        start = len(tiny.encode("there was a l"))
        assert model.prompts[-1].joined == (start, start + len(tiny.encode("ittle")))

    async def test_a_branch_that_was_forked_has_what_it_said_before(self, tiny: Tokenizer):
        prompts = []
        for size in (0, 1, 2):
            model = FakeModel(tiny, [" x", "."])
            session = TokenSession(model)
            await session.extend(Text("common"))
            branches = await session.fork(2)
            for branch in branches:
                await branch.extend(Text(" one"))
                for inner in await branch.fork(size) if size else ():
                    await inner.extend(Text(" aside"))
                    await inner.close()
                await branch.extend(Text(" two"))
            await session.join(branches)
            await session.extend(Text(" all"))
            await said(session)
            prompts.append(tiny.decode(model.prompts[-1].input_ids))
            assert len(model.prompts[-1].joined) == 3
        assert prompts == ["common one two one two all"] * 3

    async def test_only_branches_of_what_it_is_now_are_joined(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny))
        await session.extend(Text("a"))
        branches = await session.fork(2)
        await session.extend(Text("b"))
        for wrong in (branches, await TokenSession(FakeModel(tiny)).fork(2)):
            with pytest.raises(RequestError, match="must join branches that were forked from what the state is now"):
                await session.join(wrong)

    async def test_a_state_joins_once(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny))
        await session.extend(Text("a"))
        for is_first in (True, False):
            branches = await session.fork(2)
            for branch in branches:
                await branch.extend(Text("x"))
            with contextlib.nullcontext() if is_first else pytest.raises(RequestError, match="once at most in a state"):
                await session.join(branches)
            await session.extend(Text("b"))

    @pytest.mark.parametrize(("name", "before"), [("folded", " "), ("headers", "")])
    async def test_an_open_turn_goes_on_behind_the_branches_that_began_it(self, tiny: Tokenizer, name, before):
        model = FakeModel(tiny, ["."], template=STYLES[name].source)
        session = TokenSession(model)
        await turn(session, USER, "Hi")
        await session.extend(RoleBegin(ASSISTANT))
        one, two, empty = branches = await session.fork(3)
        assert await one.extend(Text("one")) == f"{before}one"
        assert await two.extend(Text("two")) == f"{before}two"
        await empty.extend(Text(""))
        await session.join(branches)
        assert await session.extend(Text("  so")) == "  so", "neither an opening nor a front to trim"
        await said(session)
        decoded = tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False)
        assert decoded.endswith(f"{before}one{before}two  so")
        closing = await session.extend(RoleEnd(ASSISTANT))
        assert (await model.turns()).closing((USER, ASSISTANT)) == closing

    async def test_an_open_turn_begins_behind_branches_that_are_empty(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], template=_EMPTY_THOUGHT)
        session = TokenSession(model)
        await turn(session, USER, "Hi")
        await session.extend(RoleBegin(ASSISTANT))
        await session.join(await session.fork(2))
        await said(session)
        assert tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False).endswith("><think></think>")

    async def test_the_model_does_not_begin_a_reply_that_branches_began(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny, ["."], template=_EMPTY_THOUGHT))
        await turn(session, USER, "Hi")
        await session.extend(RoleBegin(ASSISTANT))
        branches = await session.fork(2)
        for branch in branches:
            await branch.extend(Text("doc"))
        await session.join(branches)
        with pytest.raises(RequestError, match="must have a text behind them"):
            await said(session)  # it wrote <think></think> behind the documents

    async def test_turns_of_the_branches_are_followed(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], template=STYLES["words"].source)
        session = TokenSession(model)
        await turn(session, USER, "Hi")
        branches = await session.fork(2)
        text = [await turn(branch, ASSISTANT, answer) for branch, answer in zip(branches, ("Ho", "Ha"), strict=True)]
        await session.join(branches)
        text.append(await turn(session, USER, "So?"))
        await said(session)
        plain = TokenSession(FakeModel(tiny, template=STYLES["words"].source))
        asked = [await turn(plain, USER, "Hi"), await turn(plain, ASSISTANT, "Ho"), await turn(plain, USER, "So?")]
        assert text[::2] == asked[1:]
        decoded = tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False)
        assert decoded.startswith(asked[0] + "".join(text))

    async def test_a_branch_ends_in_the_turn_in_which_it_began(self, tiny: Tokenizer):
        for is_open in (False, True):
            session = TokenSession(FakeModel(tiny))
            await session.extend(RoleBegin(USER))
            await session.extend(Text("Hi"))
            if not is_open:
                await session.extend(RoleEnd(USER))
            branches = await session.fork(2)
            await branches[0].extend(RoleEnd(USER) if is_open else RoleBegin(ASSISTANT))
            with pytest.raises(RequestError, match="must join branches that end in the turn in which they began"):
                await session.join(branches)

    async def test_a_model_call_right_behind_the_branches_is_refused_in_words_of_the_program(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], next_logprobs=lambda _: [-8.0] * tiny.vocab_size)
        session = TokenSession(model)
        await session.extend(Text("Docs:"))
        branches = await session.fork(2)
        await branches[0].extend(Text(" one"))
        await session.join(branches)
        with pytest.raises(RequestError, match="must have a text behind them before the model goes on"):
            await said(session)
        with pytest.raises(RequestError, match="must have a text behind them before the model goes on"):
            await session.select(Select("c", ("a", "b"), "token_trie"))
        await session.extend(Text(" So"))
        assert await said(session) == "."
