"""Thoughts are split the same way whatever pieces an answer comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.errors import RequestError
from jsg.processing.thoughts import MARKERS, Thoughts, ThoughtSplitter, markers_of


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
