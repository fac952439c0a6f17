from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from jsg.errors import ContextLengthError, RequestError
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.answers.answer import Answer
from jsg.speech.prompts.encode_parts import encode_choices, encode_parts, split_answer, split_kept
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams
from tests.processing.conftest import KINDS

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
TEXTS = st.text(alphabet=st.sampled_from("ab é中😀 \n.<|s>"), max_size=12)


def _markup(text: str) -> TextPart:
    return TextPart(text, is_markup=True)


def _template(text: str) -> TextPart:
    return TextPart(text, is_markup=True, is_template=True)


def _special(tokenizer: Tokenizer) -> str:
    return "[INST]" if tokenizer.token_id("[INST]") is not None else "<|im_start|>"


class TestTexts:
    def test_texts_one_behind_another_are_one_text(self, tokenizer: Tokenizer):
        encoded = encode_parts(tokenizer, [_markup("the qu"), TextPart("ick brown"), _markup(" fox")])
        whole = tuple(tokenizer.encode("the quick brown fox"))
        assert encoded.input_ids == whole and encoded.part_ids == (whole, (), ())
        assert encoded.joined == encoded.position_jumps == ()

    def test_a_raw_prompt_begins_as_the_checkpoint_says_and_a_template_as_it_wrote_itself(self, tokenizer: Tokenizer):
        assert encode_parts(tokenizer, [_markup("hi")]).input_ids == tuple(tokenizer.encode("hi"))
        assert encode_parts(tokenizer, [TextPart("hi")]).input_ids == tuple(tokenizer.encode("hi"))
        bare = tuple(tokenizer.encode("hi", add_special_tokens=False))
        assert encode_parts(tokenizer, [_template("hi")]).input_ids == bare
        assert tokenizer.bos_token_id is not None
        begun = encode_parts(tokenizer, [_markup(f"{tokenizer.bos_token}hi")]).input_ids
        assert begun.count(tokenizer.bos_token_id) == 1, "never two"
        behind = encode_parts(tokenizer, [TokenPart((5,)), _markup("hi")]).input_ids
        assert tokenizer.bos_token_id not in behind

    def test_only_markup_has_special_tokens(self, tokenizer: Tokenizer):
        special = _special(tokenizer)
        mark = tokenizer.token_id(special)
        parts = [_template(special), TextPart(f"x{special}y"), _template(special), TextPart("z")]
        ids = encode_parts(tokenizer, parts).input_ids
        assert ids.count(mark) == 2
        assert tokenizer.decode(ids, skip_special_tokens=False).count(special) == 3
        # Neither when it is put together from pieces, of which one is the template's.
        half = len(special) // 2
        for pair in ((TextPart, TextPart), (_template, TextPart), (TextPart, _template)):
            parts = [_template("a"), pair[0](special[:half]), pair[1](special[half:]), _template("b")]
            assert mark not in encode_parts(tokenizer, parts).input_ids, pair

    def test_a_text_behind_tokens_goes_on_where_they_end(self, tokenizer: Tokenizer):
        first = tokenizer.encode("the quick")
        ids = encode_parts(tokenizer, [TokenPart(tuple(first)), TextPart("ly fox")]).input_ids
        assert ids[: len(first)] == tuple(first)
        assert tokenizer.decode(ids) == "the quickly fox"

    def test_no_parts_are_no_tokens(self, tokenizer: Tokenizer):
        assert encode_parts(tokenizer, []).input_ids == ()
        assert encode_parts(tokenizer, [TokenPart(()), TokenPart(())]).input_ids == ()

    @PROPERTY
    @given(texts=st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=5))
    @pytest.mark.parametrize("kind", KINDS)
    def test_whatever_the_cuts_the_text_comes_back(self, all_tokenizers, kind, texts):
        tokenizer = all_tokenizers[kind]
        parts: list[Part] = []
        for text, is_cut in texts:
            parts.append(TextPart(text))
            if is_cut:
                parts.append(TokenPart(()))
        ids = encode_parts(tokenizer, parts).input_ids
        text = "".join(text for text, _ in texts)
        assume("▁" not in text)
        assert tokenizer.decode(ids) == text
        without_cuts = encode_parts(tokenizer, [part for part in parts if isinstance(part, TextPart)])
        assert sum(map(len, without_cuts.part_ids)) == len(without_cuts.input_ids)
        special = tokenizer.special_ids - set(tokenizer.bos_ids)
        assert not special & set(ids)

    def test_behind_a_special_token_the_tokenizers_own_space_comes_as_in_a_whole_text(self, tokenizer: Tokenizer):
        special = _special(tokenizer)
        mark = tokenizer.token_id(special)
        assert mark is not None
        whole = tokenizer.encode(f"{special}Hi there", add_special_tokens=False)
        assert encode_parts(tokenizer, [TokenPart((mark,)), TextPart("Hi there")]).input_ids == tuple(whole)
        behind = tokenizer.encode(f" so{special}Hi", add_special_tokens=False, continues=True)
        assert behind[-len(tokenizer.encode(f"{special}Hi", add_special_tokens=False)) :] == tokenizer.encode(
            f"{special}Hi", add_special_tokens=False
        )

    def test_a_long_prompt_is_refused_early(self, tokenizer: Tokenizer):
        for parts in ([TextPart("a b " * 1000)], [TokenPart(tuple(range(30)))], [TextPart("a"), TokenPart((1,))] * 30):
            with pytest.raises(ContextLengthError, match="at most 10"):
                encode_parts(tokenizer, parts, max_tokens=10)

    def test_media_needs_a_model_that_sees(self, tokenizer: Tokenizer):
        with pytest.raises(RequestError, match="kind image, which the model that is served here cannot see"):
            encode_parts(tokenizer, [TextPart("a"), MediaPart("image", b"x", "image/png")])


class TestTokenizersThatPutASpace:
    @pytest.fixture(params=["first", "always", "byte_level"])
    def tokenizer(self, request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
        """Trained here, with a space before a text; "first" puts none behind an added token."""
        library = tokenizers.Tokenizer(models.BPE())
        if request.param == "byte_level":
            library.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
            )
            library.decoder = decoders.ByteLevel()
        else:
            library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=request.param)
            library.decoder = decoders.Metaspace(prepend_scheme=request.param)
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
        library.train_from_iterator(["the quick brown fox is quickly there", "<s> a b c"], trainer)
        library.add_special_tokens([AddedToken("<s>", special=True)])
        library.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path)

    def test_a_continuation_gets_none(self, tokenizer: Tokenizer):
        first = tokenizer.encode("the quick")
        for text in ("ly there", " brown fox", "e", ""):
            ids = tokenizer.encode(text, continues=True, add_special_tokens=False)
            assert tokenizer.decode([*first, *ids]).strip() == f"the quick{text}".strip()
            assert encode_parts(tokenizer, [TokenPart(tuple(first)), TextPart(text)]).input_ids == (*first, *ids)

    def test_behind_an_added_token_it_is_as_in_a_whole_text(self, tokenizer: Tokenizer):
        mark = tokenizer.token_id("<s>")
        for behind in ("brown", " fox<s>quick"):
            whole = tokenizer.encode(f"the<s>{behind}", add_special_tokens=False)
            tail = whole[whole.index(mark) :]  # type: ignore[arg-type]
            got = tokenizer.encode(f"ly<s>{behind}", continues=True, add_special_tokens=False)
            assert got[got.index(mark) :] == tail  # type: ignore[arg-type]
            plain = tokenizer.encode(f"ly<s>{behind}", continues=True, add_special_tokens=False, parse_special=False)
            assert mark not in plain


class TestPositionsAndBranches:
    @pytest.fixture
    def tokenizer(self, all_tokenizers) -> Tokenizer:
        return all_tokenizers["llama"]

    def test_an_offset_counts_from_the_next_token(self, tokenizer: Tokenizer):
        parts = [TokenPart((5, 6)), OffsetPart(3), OffsetPart(4), TokenPart(()), TokenPart((7,)), OffsetPart(0)]
        assert encode_parts(tokenizer, parts).position_jumps == ((2, 7),)
        assert encode_parts(tokenizer, [OffsetPart(2), TextPart("hi")]).position_jumps == ((0, 2),)
        at_the_end = [TokenPart((5,)), OffsetPart(3)]
        assert encode_parts(tokenizer, at_the_end).position_jumps == ((1, 3),), "of what the model writes"
        assert encode_choices(tokenizer, at_the_end, ["a", "b"]).before.position_jumps == ((1, 3),)
        joined = [JoinedPart(((TokenPart((5,)),),)), TokenPart((6,)), OffsetPart(3)]
        assert encode_choices(tokenizer, joined, ["a", "b"]).before.position_jumps == ((2, 3),)
        assert encode_choices(tokenizer, [*joined, TextPart(" s")], [" a", " b"]).common_ids
        with pytest.raises(RequestError, match="at least 0, but got -1"):
            encode_parts(tokenizer, [TokenPart((5,)), OffsetPart(-1), TokenPart((5,))])

    def test_branches_stand_one_behind_another(self, tokenizer: Tokenizer):
        branches = JoinedPart(((TokenPart((7, 8)), OffsetPart(9)), (), (OffsetPart(5), TokenPart((9,)))))
        encoded = encode_parts(tokenizer, [TokenPart((5, 6)), branches, TokenPart((4,))])
        assert encoded.input_ids == (5, 6, 7, 8, 9, 4) and encoded.joined == (2, 4, 4, 5)
        assert encoded.position_jumps == ((4, 5),)

    def test_a_branch_begins_behind_what_is_common_and_not_behind_another_branch(self, tokenizer: Tokenizer):
        common = tuple(tokenizer.encode("the"))
        branch = JoinedPart(((TextPart("<|im_start|>"),), (TextPart("re"), TextPart("e")), (TextPart("re"),)))
        encoded = encode_parts(tokenizer, [TokenPart(common), branch, TextPart("s")])
        assert len(encoded.part_ids) == 5 and encoded.part_ids[2] == ()
        for ids, text in ((encoded.part_ids[1], "ree"), (encoded.part_ids[3], "re"), (encoded.part_ids[4], "s")):
            assert list(ids) == tokenizer.encode(text, add_special_tokens=False, continues=True)
        alone = encode_parts(tokenizer, [JoinedPart(((TextPart("a"),), (TextPart("a"),))), TextPart("b")])
        assert alone.input_ids.count(tokenizer.bos_token_id) == 2, "each is the beginning of a text"

    def test_something_must_stand_behind_branches(self, tokenizer: Tokenizer):
        branches = JoinedPart(((TextPart("re"),), (TokenPart((8,)),)))
        for parts in ([branches], [TextPart("the"), branches], [branches, OffsetPart(1), TextPart("")]):
            with pytest.raises(RequestError, match="must have a text behind them before the model goes on"):
                encode_parts(tokenizer, parts)
            with pytest.raises(RequestError, match="must have a text behind them before the model goes on"):
                encode_choices(tokenizer, parts, ["a", "b"])
        assert encode_choices(tokenizer, [branches, TextPart("s")], ["a", "b"]).common_ids

    def test_an_offset_before_the_branches_is_in_each(self, tokenizer: Tokenizer):
        branches = JoinedPart(((TokenPart((7,)),), (TokenPart((8,)),)))
        encoded = encode_parts(tokenizer, [TokenPart((5,)), OffsetPart(2), branches, TokenPart((9,))])
        assert encoded.position_jumps == ((1, 2), (2, 2))

    def test_branches_come_once(self, tokenizer: Tokenizer):
        joined = JoinedPart(((TokenPart((7,)),),))
        for parts in ([joined, joined], [JoinedPart(((joined,),))]):
            with pytest.raises(RequestError, match="once at most"):
                encode_parts(tokenizer, parts)
        with pytest.raises(RequestError, match="at least one branch"):
            encode_parts(tokenizer, [JoinedPart(())])


def _shown(tokenizer: Tokenizer, ids: Sequence[int], stop: tuple[str, ...], tail: Sequence[int]) -> Answer:
    """An answer of these tokens, as its client sees it."""
    request = Request(rid="a", input_ids=tuple(tail), sampling=SamplingParams(max_new_tokens=99, stop=stop))
    answer = Answer(request, tokenizer)
    for index, token in enumerate(ids):
        is_last = index == len(ids) - 1
        answer.push(
            RequestOutput(rid="a", token_ids=(token,), finish=FinishReason(FinishType.LENGTH) if is_last else None)
        )
    return answer


class TestKept:
    @PROPERTY
    @given(data=st.data())
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_kept_and_the_rest_are_the_answer(self, all_tokenizers, kind, data):
        tokenizer = all_tokenizers[kind]
        text = data.draw(st.text(alphabet=st.sampled_from("abc é中😀\n "), min_size=1, max_size=14))
        ids = tokenizer.encode(text, add_special_tokens=False, continues=True)
        if data.draw(st.booleans()):
            ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=8))
        ids = ids[: data.draw(st.integers(1, len(ids)))]  # may end inside a character
        start = data.draw(st.integers(0, len(text) - 1))
        stop = data.draw(st.sampled_from([(), (text[start : start + 2],)]))
        tail = tokenizer.encode("x") if data.draw(st.booleans()) else [tokenizer.eos_token_id or 0]
        answer = _shown(tokenizer, ids, stop, tail)
        kept, rest = split_answer(tokenizer, answer)
        assert list(kept) == ids[: len(kept)]
        again = _shown(tokenizer, kept, (), tail).text if kept else ""
        assert again + rest == answer.text
        if len(kept) < len(answer.token_ids):  # one more would say something else
            more = _shown(tokenizer, ids[: len(kept) + 1], (), tail).text
            assert not answer.text.startswith(more)
        if answer.finish is not None and answer.finish.type is FinishType.LENGTH:
            assert (list(kept), rest) == (ids, ""), "every token is kept of an answer that nothing cut"

    @pytest.mark.parametrize("raw", [b"\xed", b"\xed\xa0", b"a\xed\xa0", b"\xed\xa0\xa0", b"\xf0\x9f\x98"])
    def test_bytes_that_begin_no_character_or_half_of_one_are_kept(self, all_tokenizers, raw: bytes):
        tokenizer = all_tokenizers["llama"]
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in raw]
        answer = _shown(tokenizer, ids, (), [tokenizer.eos_token_id])
        assert split_answer(tokenizer, answer) == (tuple(ids), "")

    def test_a_token_that_a_stop_string_cuts_becomes_text(self, all_tokenizers):
        tokenizer = load_tokenizer(resolve_model("tiny"))
        ids = tokenizer.encode("once there was a little girl", add_special_tokens=False)
        for end in range(1, 20):
            stop = "once there was a little girl"[end : end + 2]
            answer = _shown(tokenizer, ids, (stop,), (5,))
            kept, rest = split_answer(tokenizer, answer)
            assert tokenizer.decode(kept) + rest == answer.text == "once there was a little girl".split(stop)[0]

    def test_a_token_that_stops_is_not_kept(self, tokenizer: Tokenizer):
        eos = tokenizer.eos_token_id
        assert eos is not None
        word = tokenizer.encode("hi", add_special_tokens=False)
        request = Request(rid="a", input_ids=(5,), sampling=SamplingParams(ignore_eos=True))
        for ids, finish, expected in (
            ((*word, eos), FinishReason(FinishType.STOP, matched=eos), tuple(word)),
            ((*word, eos), FinishReason(FinishType.LENGTH), (*word, eos)),
            ((eos, *word), FinishReason(FinishType.LENGTH), (eos, *word)),
        ):
            answer = Answer(request, tokenizer)
            answer.push(RequestOutput(rid="a", token_ids=ids, finish=finish))
            assert split_answer(tokenizer, answer) == (expected, "")

    def test_an_answer_that_completes_the_prompts_character(self, all_tokenizers):
        tokenizer = all_tokenizers["llama"]
        whole = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
        assert split_kept(tokenizer, whole[2:], "😀", prompt_tail_ids=whole[:2]) == (tuple(whole[2:]), "")
        assert split_kept(tokenizer, whole[:3], "\ufffd") == (tuple(whole[:3]), "")


class TestChoices:
    def test_choices_are_encoded_together_with_the_text_before_them(self):
        tokenizer = load_tokenizer(resolve_model("tiny"))
        encoded = encode_choices(tokenizer, [TextPart("there was a ", is_markup=True)], ["girl", "boy", "the"])
        for choice, ids in zip(["girl", "boy", "the"], encoded.choice_ids, strict=True):
            whole = tokenizer.encode(f"there was a {choice}")
            assert list(encoded.prefix_ids + ids) == whole, "as if the program had written it"
        alone = tokenizer.encode("there was a ")
        assert list(encoded.common_ids) == alone[: len(encoded.common_ids)]
        assert len(encoded.common_ids) < len(alone), "the boundary is healed"
        assert encoded.before.part_ids == ()

    def test_behind_tokens_a_choice_goes_on_where_they_end(self, tokenizer: Tokenizer):
        first = tuple(tokenizer.encode("the quick"))
        encoded = encode_choices(tokenizer, [TextPart("the"), TokenPart(first)], ["ly", " fox"])
        assert len(encoded.before.part_ids) == 1 and encoded.common_ids == ()
        assert [tokenizer.decode([*first, *ids]) for ids in encoded.choice_ids] == ["the quickly", "the quick fox"]

    def test_special_tokens_in_a_choice_are_plain(self, tokenizer: Tokenizer):
        special = _special(tokenizer)
        encoded = encode_choices(tokenizer, [TextPart("a", is_markup=True)], [special, "b"])
        assert tokenizer.token_id(special) not in encoded.choice_ids[0]

    def test_an_empty_choice_is_the_prompt_alone(self, tokenizer: Tokenizer):
        encoded = encode_choices(tokenizer, [TextPart("the quick ")], ["", "brown"])
        assert encoded.prefix_ids + encoded.choice_ids[0] == tuple(tokenizer.encode("the quick "))

    def test_something_must_stand_before_them(self, all_tokenizers):
        assert encode_choices(all_tokenizers["llama"], [], ["a", "b"]).common_ids == (
            all_tokenizers["llama"].bos_token_id,
        )
        with pytest.raises(RequestError, match=r"the prompt is empty, .*append text before them"):
            encode_choices(all_tokenizers["byte_level"], [], ["a", "b"])
        with pytest.raises(RequestError, match="at least one text"):
            encode_choices(all_tokenizers["llama"], [TextPart("a")], [])
