"""Thoughts are split the same way whatever pieces an answer comes in."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.config import REASONING_PARSERS
from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.answers.thoughts import (
    MARKERS,
    Phase,
    Thoughts,
    ThoughtSplitter,
    detect_markers,
    find_markers,
    markers_of,
)
from jsg.types import FinishReason, FinishType, RequestOutput, SamplingParams, TokenLogprob
from tests.server.byte_tokenizer import SPECIAL_TOKENS, write_byte_tokenizer

BEGIN, END = "<think>", "</think>"


def split(model_type: str, pieces: list[str]) -> tuple[str, str]:
    splitter = ThoughtSplitter(Thoughts.of(markers_of(model_type)))
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("model_type", "text", "expected"),
    [
        ("qwen3", "<think>\nwhy\n</think>\n\nso", ("why", "so")),
        ("qwen3", "\n<think>\n\n</think>\n\nso ", ("", "so ")),
        ("qwen3", "no marks at all ", ("", "no marks at all ")),
        ("qwen3", "  <thin", ("", "  <thin")),
        ("qwen3", "a <think>b</think>", ("", "a <think>b</think>")),  # reasoning comes first or not at all
        ("qwen3", "<think>cut short ", ("cut short", "")),
        ("qwen3-thinking", "why\n</think>\nso", ("why", "so")),
        ("deepseek-r1", "<think>\nwhy</think>so", ("why", "so")),
        ("deepseek-r1", "why </th", ("why </th", "")),
        ("deepseek-r1", " a\n\nb \n</think> c</think>", ("a\n\nb", "c</think>")),
        ("step3", "", ("", "")),
        ("kimi", "◁think▷hm◁/think▷ok", ("hm", "ok")),
    ],
)
def test_what_belongs_where(model_type, text, expected):
    assert split(model_type, [text]) == expected
    assert split(model_type, list(text)) == expected


@given(
    st.sampled_from(sorted(MARKERS)),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a", "◁think▷"])),
)
def test_pieces_do_not_matter(model_type, tokens):
    text = "".join(tokens)
    assert split(model_type, tokens) == split(model_type, [text]) == split(model_type, list(text))


def test_other_models_are_refused():
    with pytest.raises(RequestError, match="qwen3"):
        markers_of("nobody")


def test_what_stands_between_thoughts_and_an_answer_of_a_grammar_is_exact():
    thoughts = dataclasses.replace(Thoughts.of(MARKERS["qwen3"]), has_gap=True)
    for pieces in (["<think>a</think>\n\n\n 1"], list("<think>a</think>\n\n\n 1")):
        splitter = ThoughtSplitter(thoughts)
        parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
        assert ["".join(each) for each in zip(*parts, strict=True)] == ["a", "\n 1"]


def test_names_of_other_servers_and_of_the_option():
    assert find_markers("deepseek_r1") is MARKERS["deepseek-r1"]
    assert find_markers("openai_gptoss") is MARKERS["gpt-oss"]
    assert find_markers("auto") is find_markers("none") is None
    named = {name: find_markers(name) for name in REASONING_PARSERS if name not in ("auto", "none")}
    assert None not in named.values()
    assert named.keys() >= MARKERS.keys()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking %}<think>\n{% endif %}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("[THINK]{{ thoughts }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>", "gpt-oss"),
        ("<seed:think>{{ m.reasoning_content }}</seed:think>", "seed-oss"),
        ("◁think▷", "kimi"),
        ("<|START_THINKING|><|END_THINKING|>", "cohere-command-a"),
        ("<|channel>thought\n{{ t }}<channel|>", "gemma4"),
    ],
)
def test_a_template_shows_its_markers(template, name):
    assert detect_markers(template) == MARKERS[name]
    assert detect_markers("{{ messages[0].content }}") is detect_markers(None) is None


CUT = FinishReason(FinishType.LENGTH)
STOP = 257  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """With the markers as special tokens."""
    directory = tmp_path_factory.mktemp("thinking")
    write_byte_tokenizer(directory, None, [*SPECIAL_TOKENS, BEGIN, END])
    return load_tokenizer(directory)


class TestTokens:
    """Token by token, as answers come: `AnswerStream` with a tokenizer that has the markers as special tokens."""

    @staticmethod
    def read(
        tokenizer: Tokenizer,
        thoughts: Thoughts,
        ids: Sequence[int],
        size: int,
        finish: FinishReason = CUT,
        **sampling,
    ) -> Answer:
        params = SamplingParams(max_new_tokens=len(ids) + 1, **sampling)
        (answer,) = Prompt(
            rid="r", input_ids=(1,), sampling=params, thoughts=thoughts, is_continued=False, return_logprob=True
        ).answers(tokenizer, 0, 512, None)
        for start in range(0, len(ids), size):
            step = tuple(ids[start : start + size])
            is_last = start + size >= len(ids)
            scores = tuple(TokenLogprob(token, -0.5) for token in step)
            answer.push(RequestOutput(rid="r", token_ids=step, finish=finish if is_last else None, logprobs=scores))
        return answer

    @staticmethod
    def special(tokenizer: Tokenizer, phase: Phase) -> Thoughts:
        begin, end = (tokenizer.token_id(text) for text in ("<think>", "</think>"))
        return Thoughts(MARKERS["qwen3"], begin, end, phase)

    def test_a_marker_that_somebody_typed_is_text(self, tokenizer):
        """The model quotes the words of a user, which are no special tokens."""
        ids = tokenizer.encode("he wrote </think> there</think>\n\nso <think> it is", parse_special=False)
        end = tokenizer.token_id("</think>")
        at = len("he wrote </think> there")
        ids[at : at + len("</think>")] = [end]
        answer = self.read(tokenizer, self.special(tokenizer, Phase.INSIDE), ids, 3)
        assert (answer.thoughts, answer.text) == ("he wrote </think> there", "so <think> it is")
        assert answer.num_thought_tokens == at
        assert [score.token_id for score in answer.scores] == ids[at + 3 :]

    @given(
        st.sampled_from([Phase.BEFORE, Phase.INSIDE]),
        st.booleans(),
        st.lists(st.sampled_from(["<think>", "</think>", "</thi", "é", "€", " ", "\n", "ab", "stop"]), max_size=12),
    )
    def test_steps_do_not_matter(self, tokenizer, phase, is_special, words):
        thoughts = self.special(tokenizer, phase) if is_special else Thoughts(MARKERS["qwen3"], phase=phase)
        ids = [
            token
            for word in words
            for token in tokenizer.encode(word, add_special_tokens=False, parse_special=is_special)
        ]
        for stop in ((), ("stop",)):
            found = [self.read(tokenizer, thoughts, ids, size, stop=stop) for size in (1, 2, 5, 100)]
            shown = {(each.thoughts, each.text, each.num_thought_tokens, tuple(each.scores)) for each in found}
            assert len(shown) == 1
            [(told, text, num_tokens, scores)] = shown
            if not is_special:
                assert (told, text) == split_as(phase, tokenizer.decode(ids), stop)
            assert num_tokens <= len(ids) - len(scores)

    @pytest.mark.parametrize("is_special", [True, False])
    def test_every_single_cut_gives_the_same(self, tokenizer, is_special):
        """At each token, so at every boundary of a marker and inside of it too."""
        text = "\n<think>\n é <thi </thin\n</think>\n\n</think> é"
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=is_special)
        thoughts = self.special(tokenizer, Phase.BEFORE) if is_special else Thoughts(MARKERS["qwen3"])
        found = set()
        for cut in range(1, len(ids) + 1):
            (answer,) = Prompt(
                rid="r", input_ids=(1,), sampling=SamplingParams(), thoughts=thoughts, is_continued=False
            ).answers(tokenizer, 0, 512, None)
            answer.push(RequestOutput(rid="r", token_ids=tuple(ids[:cut])))
            shown = (answer.thoughts, answer.text)
            answer.push(RequestOutput(rid="r", token_ids=tuple(ids[cut:]), finish=FinishReason(FinishType.LENGTH)))
            assert answer.thoughts.startswith(shown[0]) and answer.text.startswith(shown[1])
            found.add((answer.thoughts, answer.text, answer.num_thought_tokens))
        [(told, said, num_tokens)] = found
        assert (told, said) == ("é <thi </thin", "é" if is_special else "</think> é")
        assert num_tokens == len("\n é <thi </thin\n".encode())

    def test_stop_strings_end_answers_and_no_thoughts(self, tokenizer):
        ids = tokenizer.encode("no stop yet</think>but stop here", add_special_tokens=False)
        answer = self.read(tokenizer, self.special(tokenizer, Phase.INSIDE), ids, 4, stop=("stop",))
        assert (answer.thoughts, answer.text) == ("no stop yet", "but ")
        assert answer.finish == FinishReason(FinishType.STOP, matched="stop")

    @pytest.mark.parametrize(
        "text", ["why", "why</think>", "why</think>\n", "why</think>\nso", "<think>why</think> é", ""]
    )
    @pytest.mark.parametrize("keeps_special", [True, False])
    def test_a_stop_token_that_is_kept_is_no_thought(self, tokenizer, text, keeps_special):
        """Whether its text is kept changes the text, and neither a count nor a score."""
        ids = [*tokenizer.encode(text, add_special_tokens=False), STOP]
        end = tokenizer.decode([STOP], skip_special_tokens=False) if keeps_special else ""
        for phase in (Phase.BEFORE, Phase.INSIDE):
            for thoughts in (self.special(tokenizer, phase), Thoughts(MARKERS["qwen3"], phase=phase)):
                for size in (1, 2, 100):
                    cut, kept = (
                        self.read(
                            *(tokenizer, thoughts, ids, size),
                            finish=FinishReason(FinishType.STOP, matched=STOP),
                            skip_special_tokens=not keeps_special,
                            no_stop_trim=keeps,
                        )
                        for keeps in (False, True)
                    )
                    assert (kept.thoughts, kept.text) == (cut.thoughts, cut.text + end)
                    assert kept.num_thought_tokens == cut.num_thought_tokens
                    assert kept.scores == cut.scores and kept.scores[-1].token_id == STOP

    def test_a_character_of_several_tokens_at_the_border_keeps_its_scores(self, tokenizer):
        ids = tokenizer.encode("né</think>\n€ so", add_special_tokens=False)
        for size in (1, 2, 100):
            answer = self.read(tokenizer, self.special(tokenizer, Phase.INSIDE), ids, size)
            assert answer.text == "€ so"
            assert [score.token_id for score in answer.scores] == tokenizer.encode("€ so", add_special_tokens=False)

    @pytest.mark.parametrize("said", ["<", "<thin", " ", "é"])
    def test_text_that_was_held_keeps_its_scores(self, tokenizer, said):
        ids = tokenizer.encode(said, add_special_tokens=False)
        answer = self.read(tokenizer, Thoughts(MARKERS["qwen3"]), ids, 1)
        assert (answer.text, [score.token_id for score in answer.scores]) == (said, ids)

    @pytest.mark.parametrize("phase", [Phase.BEFORE, Phase.INSIDE])
    def test_stop_strings_end_no_thoughts_that_are_not_split(self, tokenizer, phase):
        begin = "" if phase is Phase.INSIDE else BEGIN
        ids = tokenizer.encode(f"{begin}no stop yet{END}but stop here", add_special_tokens=False)
        thoughts = dataclasses.replace(self.special(tokenizer, phase), is_split=False)
        answer = self.read(tokenizer, thoughts, ids, 4, stop=("stop",), skip_special_tokens=False)
        assert answer.text == f"{begin}no stop yet{END}but "
        alone = tokenizer.encode(" stop", add_special_tokens=False)
        assert self.read(tokenizer, thoughts, alone, 1, stop=(" stop",)).text == (" stop" if begin == "" else "")

    def test_thoughts_that_are_cut_short(self, tokenizer):
        ids = tokenizer.encode("half a ", add_special_tokens=False)
        answer = self.read(tokenizer, self.special(tokenizer, Phase.INSIDE), ids, 2)
        assert (answer.thoughts, answer.text, answer.num_thought_tokens) == ("half a", "", len(ids))


def split_as(phase: Phase, text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    splitter = ThoughtSplitter(Thoughts(MARKERS["qwen3"], phase=phase))
    parts = [splitter.feed(text), splitter.finish()]
    thoughts, answer = ("".join(each) for each in zip(*parts, strict=True))
    return thoughts, answer.split(stop[0])[0] if stop else answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so", ("why", "so")),
        ("<|channel|>final<|message|>so", ("", "so")),
        ("<|channel|>analysis<|message|>why<|end|>so", ("why", "so")),
        ("<|channel|>fin", ("", "<|channel|>fin")),
        ("<|channel|>analysis<|message|>why<|end|><|start|>assist", ("why", "")),
    ],
)
def test_headers_of_an_answer_are_never_text(text, expected):
    assert split("gpt-oss", [text]) == split("gpt-oss", list(text)) == expected


def test_what_templates_write_behind_thoughts():
    gaps = {
        "{{ '<think>\\n' + r + '\\n</think>\\n\\n' + c }}": "\n\n",
        "{% if '</think>' in c %}{{ c.split('</think>')[-1] }}{% endif %}": "\n\n",
        "{{ '<think>' + r + '</think>' + c }}": "",
        "<think>\n\n</think>\n{{ c }}": "\n",
    }
    found = {template: detect_markers(template) for template in gaps}
    assert {template: markers.gap for template, markers in found.items() if markers is not None} == gaps
    assert detect_markers("<|user|>\n{{ m.content }}<|end|>\n") is None, "Phi's turns end so"


@pytest.mark.parametrize("before", ["", "<think>a"])
def test_runs_of_white_space_are_not_read_again(before):
    splitter = ThoughtSplitter(Thoughts.of(MARKERS["qwen3"]))
    splitter.feed(before)
    for _ in range(1000):
        splitter.feed(" \n" * 8)
        assert len(splitter._held) <= len(END)
    assert splitter.feed("</think>b" if before else "b")[1].strip() == "b"
