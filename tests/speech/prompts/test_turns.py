import functools
import itertools

import pytest

from jsg.errors import ModelError, RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.prompts.turns import MAX_TURNS, ChatTurns
from tests.speech.prompts.chat_templates import STYLES, Style

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
CONTENTS = {SYSTEM: "Be brief.", USER: "What is 1+1?", ASSISTANT: "It is 2."}
TALKS = [
    (USER,),
    (USER, ASSISTANT),
    (USER, ASSISTANT, USER),
    (USER, ASSISTANT, USER, ASSISTANT, USER),
    (SYSTEM, USER),
    (SYSTEM, USER, ASSISTANT),
    (SYSTEM, USER, ASSISTANT, USER, ASSISTANT),
]


@functools.cache
def _turns(style: Style) -> ChatTurns:
    return ChatTurns(style.source, bos_token="<s>", eos_token="</s>")


def _written(turns: ChatTurns, roles: tuple[str, ...], *, replies: bool = False) -> str:
    """The prompt of a program with these turns, as a session writes it; with the generation prompt at its end."""
    text = done = ""
    for count, role in enumerate(roles, start=1):
        opening = turns.opening(roles[:count])
        assert opening.text.startswith(done), "what is written stays"
        done = turns.closing(roles[:count])
        text += opening.text + CONTENTS[role]
    if not replies:
        return text + turns.ending(roles)
    reply = turns.opening((*roles, ASSISTANT)).reply
    assert reply.startswith(done)
    return text + reply


def _rendered(style: Style, roles: tuple[str, ...], *, replies: bool = False) -> str:
    def content(role: str) -> object:
        return [{"type": "text", "text": CONTENTS[role]}] if style.wants_parts else CONTENTS[role]

    messages = [{"role": role, "content": content(role)} for role in roles]
    return style.compiled().render(messages, add_generation_prompt=replies)


def _takes(style: Style, roles: tuple[str, ...]) -> bool:
    return style.has_system or SYSTEM not in roles


@pytest.mark.parametrize("roles", TALKS, ids="-".join)
@pytest.mark.parametrize("name", STYLES)
def test_f15_turns_are_those_of_the_models_own_template(name: str, roles: tuple[str, ...]) -> None:
    style, turns = STYLES[name], _turns(STYLES[name])
    if not _takes(style, roles):
        with pytest.raises(RequestError, match="System role not supported"):
            turns.opening(roles[:1])
        return
    if style.moves_system and roles.count(USER) > 1 and SYSTEM in roles:
        assert _rendered(style, roles).rindex(CONTENTS[SYSTEM]) > _rendered(style, roles).index(CONTENTS[ASSISTANT])
        expected = _rendered(style, roles[:3]) + _rendered(style, roles[3:]).removeprefix("<s>")
        assert _written(turns, roles) == expected, "it stays before the first question, as it was sent"
        return
    if roles[-1] == ASSISTANT and style.has_thoughts:
        roles = (*roles, USER)
    assert _written(turns, roles) == _rendered(style, roles)
    if roles[-1] == USER:
        assert _written(turns, roles, replies=True) == _rendered(style, roles, replies=True)


@pytest.mark.parametrize("name", STYLES)
def test_what_closes_a_turn_begins_whatever_comes_next(name: str) -> None:
    turns = _turns(STYLES[name])
    closed = 0
    for roles in itertools.chain.from_iterable(itertools.product((SYSTEM, USER, ASSISTANT), repeat=n) for n in (1, 2)):
        try:
            closing = turns.closing(roles)
        except RequestError:
            continue
        for role in (SYSTEM, USER, ASSISTANT):
            try:
                opening = turns.opening((*roles, role))
            except RequestError:
                continue
            closed += 1
            assert opening.text.startswith(closing) and opening.reply.startswith(closing)
    assert closed >= 4


def test_a_turn_closes_at_once_as_far_as_that_is_certain() -> None:
    assert _turns(STYLES["chatml"]).closing((USER,)) == "<|im_end|>\n"
    assert _turns(STYLES["folded"]).closing((USER,)) == " [/INST]"
    # An answer at the end has no </s>, one that something follows has.
    words = _turns(STYLES["words"])
    assert words.closing((USER, ASSISTANT)) == ""
    assert words.opening((USER, ASSISTANT, USER)).text == "</s>USER: "


def test_where_a_template_cannot_end_only_what_is_certain_is_written() -> None:
    folded = _turns(STYLES["folded"])
    assert folded.ending((SYSTEM,)) == folded.closing((SYSTEM,)) == "\n<</SYS>>\n\n"
    moving = _turns(STYLES["moving"])
    assert moving.ending((SYSTEM,)) == "\n\n" and moving.opening((SYSTEM, USER)).text == "\n\n"


def test_an_answer_of_the_model_begins_behind_the_generation_prompt() -> None:
    replies = {name: _turns(style).opening((USER, ASSISTANT)).reply for name, style in STYLES.items()}
    assert replies["folded"] == " [/INST]", "the blank is the beginning of the model's first word"
    assert replies["words"] == " ASSISTANT:" and replies["reasoning"] == "<|Assistant|><think>\n"
    assert _turns(STYLES["reasoning"]).opening((USER, ASSISTANT)).text == "<|Assistant|>"
    assert _turns(STYLES["reasoning"]).opening((USER, ASSISTANT)).certain == "<|Assistant|>"


def test_a_template_without_generation_prompt_still_writes_its_header() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '</>' }}{% endfor %}"
    assert ChatTurns(source, bos_token=None, eos_token=None).opening((USER, ASSISTANT)).reply == "</><assistant>\n"


@pytest.mark.parametrize(
    ("name", "trims"), [("chatml", False), ("words", False), ("headers", True), ("renamed", True), ("folded", True)]
)
def test_says_what_the_template_trims(name: str, trims: bool) -> None:
    opening = _turns(STYLES[name]).opening((USER, ASSISTANT))
    assert (opening.trims_start, opening.trims_end) == (trims, trims)


def test_the_embedded_model_has_turns() -> None:
    turns = ChatTurns.of_tokenizer(load_tokenizer(resolve_model("tiny")))
    assert turns.opening((USER,)).text == "<|user|>"
    assert turns.opening((USER, ASSISTANT)).reply == "<|end|><|assistant|>"


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        _turns(STYLES["folded"]).opening((USER, USER))
    silent = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="must write the turns of a program one after another"):
        ChatTurns(silent, bos_token=None, eos_token=None).opening((SYSTEM,))
    doubled = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="one after another"):
        ChatTurns(doubled, bos_token=None, eos_token=None).opening((USER,))
    chatml = _turns(STYLES["chatml"])
    with pytest.raises(RequestError, match="of system, user, assistant, but got 'tool'"):
        chatml.opening(("tool",))
    with pytest.raises(RequestError, match=f"at most {MAX_TURNS} turns"):
        chatml.opening((USER, ASSISTANT) * MAX_TURNS)
    with pytest.raises(RequestError, match="has none"):
        ChatTurns(None, bos_token=None, eos_token=None)
    with pytest.raises(ModelError, match="Jinja"):
        ChatTurns("{% if %}", bos_token=None, eos_token=None)


def test_a_shape_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = _turns(STYLES["chatml"])
    roles = (USER, ASSISTANT) * 20 + (USER,)
    first = functools.reduce(lambda _, n: turns.opening(roles[:n]), range(1, len(roles) + 1), None)
    monkeypatch.setattr(turns, "_template", None)
    assert turns.opening(roles) == first
