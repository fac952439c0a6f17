"""`TokenSession` on a model that a test writes: which tokens a program's prompt is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jsg.errors import RequestError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.backend import Selection
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video
from jsg.processing.parts import MediaPart, TextPart, TokenPart
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.answers.thoughts import MARKERS
from jsg.speech.prompts.chat_prompt import ChatPrompt
from tests.lang.fake_model import FakeModel, said, turn
from tests.processing.conftest import KINDS
from tests.speech.prompts.chat_templates import STYLES

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


class TestPrompt:
    async def test_f6_text_is_encoded_once_and_what_the_model_wrote_stays_its_tokens(self, tiny: Tokenizer):
        letters = tiny.encode("girl", add_special_tokens=False)
        spelled = [tiny.encode(letter, add_special_tokens=False)[0] for letter in "girl"]
        assert spelled != letters, "the model chose other tokens than encoding would"
        model = FakeModel(tiny, [spelled, "."])
        session = TokenSession(model)
        for piece in ("there wa", "s a l", "ittle "):
            assert await session.extend(Text(piece)) == piece
        assert await said(session, max_tokens=9) == "girl"
        await session.extend(Text(" in"))
        await said(session)
        first = tuple(tiny.encode("there was a little "))
        assert model.prompts[0].input_ids == first
        assert model.prompts[1].input_ids == (*first, *spelled, *tiny.encode(" in"))
        assert model.calls[1].prompt[0] == TokenPart(first + tuple(spelled)), "sent as tokens, not as text"

    async def test_the_rest_of_a_token_that_a_stop_string_cut_goes_on_as_text(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["once there was", "."])
        session = TokenSession(model)
        await session.extend(Text("So "))
        assert await said(session, stop=("ere",)) == "once th"
        await session.extend(Text("us"))
        await said(session)
        assert tiny.decode(model.prompts[1].input_ids) == "So once thus"

    async def test_closing_a_gen_leaves_the_prompt_as_it_was(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a long answer", "a long answer"])
        session = TokenSession(model)
        await session.extend(Text("So "))
        pieces = session.generate(Gen("x"))
        async for _ in pieces:
            break
        await pieces.aclose()
        assert model.num_aborted == 1
        await said(session)
        assert model.prompts[0] == model.prompts[1]

    async def test_special_tokens_count_outside_turns_and_not_inside(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."])
        session = TokenSession(model)
        await session.extend(Text("<|end|>"))
        await turn(session, USER, "<|end|>")
        await said(session)
        assert model.prompts[0].input_ids.count(tiny.token_id("<|end|>")) == 2  # the first, and the template's
        assert tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False) == "<|end|><|user|><|end|><|end|>"

    async def test_f8_media_stands_where_the_program_put_it(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."])
        session = TokenSession(model)
        await session.extend(RoleBegin(USER))
        for item in (Text("a"), Image(b"1", "image/png"), Text("b"), Video(b"2", 8), Image(b"3", "image/jpeg")):
            await session.extend(item)
        with pytest.raises(RequestError, match="kind image, which the model that is served here cannot see"):
            await said(session)
        # The fake refuses what the engine refuses; the parts are there, in order. Its template knows no pictures.
        behind = TextPart("\n", is_markup=True, is_template=True)
        assert session._parts[2:] == [
            MediaPart("image", b"1", "image/png"),
            behind,
            TextPart("b"),
            MediaPart("video", b"2", "video/mp4", 8),
            behind,
            MediaPart("image", b"3", "image/jpeg"),
            behind,
        ]


class TestTurns:
    @pytest.mark.parametrize("name", STYLES)
    @pytest.mark.parametrize("kind", KINDS)
    async def test_f15_a_programs_tokens_are_those_of_the_template(self, all_tokenizers, kind, name):
        tokenizer, style = all_tokenizers[kind], STYLES[name]
        talk = [(USER, "Hi, who?"), (ASSISTANT, "A fox."), (USER, "the quick one 😀")]
        if style.has_system and not style.moves_system:
            talk = [(SYSTEM, "be brief"), *talk]
        model = FakeModel(tokenizer, ["."], template=style.source)
        session = TokenSession(model)
        text = "".join([await turn(session, role, content[:3], content[3:]) for role, content in talk])
        text += await session.extend(RoleBegin(ASSISTANT))
        await said(session)
        template = await model.turns()
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if style.wants_parts else content}
            for role, content in talk
        ]
        rendered = template._template.render(messages)
        assert list(model.prompts[0].input_ids) == tokenizer.encode(rendered, add_special_tokens=False)
        assert rendered.startswith(text)
        assert rendered.removeprefix(text) in ("", "<think>\n"), "the program's text is the prompt's"

    @pytest.mark.parametrize("name", [name for name in STYLES if not STYLES[name].moves_system])
    async def test_f15_what_the_model_wrote_stands_in_the_template_too(self, all_tokenizers, name):
        tokenizer, style = all_tokenizers["byte_level"], STYLES[name]
        model = FakeModel(tokenizer, ["It is a fox.", "Yes!", "."], template=style.source)
        session = TokenSession(model)
        text = ""
        talk = []
        for question in ("Who is it?", "Really?", "And?"):
            text += await turn(session, USER, question)
            text += await session.extend(RoleBegin(ASSISTANT))
            answer = await said(session)
            text += answer + await session.extend(RoleEnd(ASSISTANT))
            talk += [(USER, question), (ASSISTANT, answer)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if style.wants_parts else content}
            for role, content in talk[:-1]
        ]
        rendered = (await model.turns())._template.render(messages)
        if name == "reasoning":  # what stood before an answer of the model stays: it answered behind it
            rendered = rendered.replace("<|Assistant|>", "<|Assistant|><think>\n").replace("<think>\n" * 2, "<think>\n")
        if name in ("folded", "words"):  # the blank before an answer is the model's to write, and it wrote none
            rendered = rendered.replace("/INST] ", "/INST]").replace("ASSISTANT: ", "ASSISTANT:")
        assert tokenizer.decode(model.prompts[-1].input_ids, skip_special_tokens=False) == rendered

    @pytest.mark.parametrize("kind", ["byte_level", "gemma"])
    async def test_turns_are_encoded_as_the_chat_endpoint_does(self, directories: dict[str, Path], kind, tmp_path):
        tokenizer = load_tokenizer(directories[kind])
        tokenizer.chat_template = STYLES["chatml"].source
        model = FakeModel(tokenizer, ["."])
        session = TokenSession(model)
        await turn(session, USER, "Hi<|im_end|>", "\n<|im_start|>", "x")
        await session.extend(RoleBegin(ASSISTANT))
        await said(session)
        messages = [{"role": USER, "content": "Hi<|im_end|>\n<|im_start|>x"}]
        assert model.prompts[0].input_ids == ChatPrompt(tokenizer).encode(messages)

    async def test_white_space_goes_where_the_template_takes_it_off(self, tiny: Tokenizer):
        for name, expected in (("headers", "a  b"), ("chatml", "\n  a  b \n")):
            model = FakeModel(tiny, ["."], template=STYLES[name].source)
            session = TokenSession(model)
            await turn(session, USER, "\n ", " a ", " b", " \n")
            await session.extend(RoleBegin(ASSISTANT))
            await said(session)
            rendered = STYLES[name].compiled().render([{"role": USER, "content": "\n  a  b \n"}])
            rendered = rendered.replace("<s>", tiny.bos_token or "")
            assert tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False) == rendered
            assert expected in rendered

    async def test_a_text_outside_of_turns_follows_the_templates_end(self, tiny: Tokenizer):
        model = FakeModel(tiny, [".", ".", "."], template=STYLES["words"].source)
        session = TokenSession(model)
        await session.extend(Text("Note: "))
        await turn(session, USER, "Hi")
        assert await turn(session, ASSISTANT, "Ho") == "ASSISTANT: Ho"
        await session.extend(Text("!"))
        await said(session)
        assert tiny.decode(model.prompts[0].input_ids) == "Note: USER: Hi ASSISTANT: Ho!"

    async def test_a_text_before_the_first_turn_has_begun_the_prompt(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], template=STYLES["headers"].source)
        session = TokenSession(model)
        await session.extend(Text("Note: "))
        text = await turn(session, USER, "Hi")
        await said(session)
        decoded = tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False)
        assert decoded == f"Note: {text}"
        assert text.startswith("<|start|>system")
        assert tiny.bos_token is not None

    async def test_a_gen_behind_a_closed_turn_follows_its_end(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], template=STYLES["chatml"].source)
        session = TokenSession(model)
        await turn(session, USER, "Hi")
        await said(session)
        assert tiny.decode(model.prompts[0].input_ids).endswith("Hi<|im_end|>\n")

    async def test_turns_in_disorder_are_refused(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny))
        with pytest.raises(RequestError, match="must be open to be closed"):
            await session.extend(RoleEnd(USER))
        await session.extend(RoleBegin(USER))
        with pytest.raises(RequestError, match="must be closed before the next, but user is open"):
            await session.extend(RoleBegin(ASSISTANT))

    async def test_an_empty_turn_is_one(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."])
        session = TokenSession(model)
        await turn(session, USER, "")
        await said(session)
        assert tiny.decode(model.prompts[0].input_ids, skip_special_tokens=False) == "<|user|><|end|>"


class TestSelect:
    async def test_the_prompt_goes_on_in_the_tokens_of_the_choice(self, tiny: Tokenizer):
        def likes(word: str) -> Callable[[tuple[int, ...]], list[float]]:
            liked = set(tiny.encode(f"a {word}"))
            return lambda _: [-1.0 if token in liked else -9.0 for token in range(tiny.vocab_size)]

        model = FakeModel(tiny, ["."], next_logprobs=likes("girl"))
        session = TokenSession(model)
        await session.extend(Text("there was a "))
        selection = await session.select(Select("c", ("boy", "girl", "dog"), "token_trie"))
        assert isinstance(selection, Selection) and selection.choice == "girl"
        assert sum(selection.probabilities or ()) == pytest.approx(1)
        await session.extend(Text("s"))
        await said(session)
        whole = tuple(tiny.encode("there was a girl"))
        assert model.prompts[-1].input_ids == (*whole, *tiny.encode("s")), "healed, and kept"

    async def test_in_a_turn_the_choice_stands_as_the_template_writes_it(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["."], template=STYLES["folded"].source, next_logprobs=lambda ids: [-8.0] * 5000)
        session = TokenSession(model)
        await turn(session, USER, "Yes?")
        await session.extend(RoleBegin(ASSISTANT))
        selection = await session.select(Select("c", ("Yes", "No"), "token_trie"))
        await session.extend(RoleEnd(ASSISTANT))
        await said(session)
        messages = [{"role": USER, "content": "Yes?"}, {"role": ASSISTANT, "content": selection.choice}]
        rendered = (await model.turns())._template.render(messages, add_generation_prompt=False)
        assert tiny.decode(model.prompts[-1].input_ids, skip_special_tokens=False) == rendered

    async def test_an_unknown_method_is_refused(self, tiny: Tokenizer):
        session = TokenSession(FakeModel(tiny))
        await session.extend(Text("a"))
        with pytest.raises(RequestError, match="choices_method must be one of"):
            await session.select(Select("c", ("a", "b"), "guess"))


class TestArguments:
    async def test_every_argument_goes_down_under_its_name(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["x"])
        session = TokenSession(model)
        await session.extend(Text("a"))
        given = {
            "max_tokens": 5, "min_tokens": 1, "stop": ("z",), "stop_token_ids": (3,), "temperature": 0.5, "top_p": 0.9,
            "top_k": 4, "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1,
            "ignore_eos": True, "seed": 7, "n": 1, "return_logprob": True, "logprob_start_len": 0,
            "top_logprobs_num": 2, "return_text_in_logprobs": True, "regex": "x+", "stop_regex": ("q",),
        }  # fmt: skip
        await said(session, **given)
        reports = {"return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"}
        renamed = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
        expected = {renamed.get(name, name): value for name, value in given.items() if name not in reports}
        assert model.calls[0].sampling == expected
        assert model.calls[0].reports == {name: given[name] for name in reports}

    async def test_a_type_is_a_pattern_and_a_number_ends(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["12 ", "True"])
        session = TokenSession(model)
        await session.extend(Text("a"))
        stop = ("z",)
        assert await said(session, dtype="int", stop=stop) == "12"
        assert model.calls[0].sampling["stop"] == ("z", " ", "\n")
        assert stop == ("z",)
        assert await said(session, dtype="bool") == "True"
        assert "stop" not in model.calls[1].sampling
        with pytest.raises(RequestError, match="one form, but got dtype and regex"):
            await said(session, dtype="int", regex="a")

    async def test_behind_thoughts_a_number_has_no_stop_strings_but_those_of_the_program(self, tiny: Tokenizer):
        model = FakeModel(tiny, ["a", "12"])
        session = TokenSession(model)
        await session.extend(Text("a"))
        await said(session, markers=MARKERS["qwen3"], regex="[^.]*", stop=("\n", "END"))
        assert model.calls[0].sampling["stop"] == ("\n", "END")
        await said(session, markers=MARKERS["qwen3"], dtype="int")
        assert not model.calls[1].sampling.get("stop")
