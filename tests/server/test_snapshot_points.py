"""Where a chat's prompt says that a snapshot is worth keeping: where the prompt of the next turn parts from it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

import jsg
from jsg.processing.snapshot_points import PlacedText, point_before
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.http.field_rules import FieldRules
from jsg.server.openai.response_store import Picture, Turn
from jsg.server.openai.turns import messages_of
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.chat_template import ChatTemplate
from tests.server.byte_tokenizer import SPECIAL_TOKENS, write_byte_tokenizer
from tests.server.posted_programs import graph_of
from tests.server.scripted import INFO, ScriptedServer
from tests.speech.prompts.chat_templates import STYLES

MOST_LOST = len("assistant\n<think>\n")  # tokens, which are bytes here, from the point to where the prompts part
# Thoughts of answers behind the last question stay; before it they are dropped. The generation prompt opens a thought.
DROPPING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if no_thoughts %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}
"""
CALLING = "{% set role = 'tool' %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + DROPPING
CACHE = {"type": "ephemeral"}
REFUSING = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}<|im_end|>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def chat_of(directory: Path, template: str, special_tokens: list[str] = SPECIAL_TOKENS) -> ChatPrompt:
    write_byte_tokenizer(directory, template, special_tokens)
    return ChatPrompt(load_tokenizer(directory), caches_states=True)


def num_common(left: Any, right: Any) -> int:
    return next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(left))


def count_renders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item each time that a template is rendered from now on."""
    rendered, render = list[int](), ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **given: rendered.append(1) or render(*args, **given))
    return rendered


CALLED = assistant("", reasoning_content="mull", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": {}}}])
SAID = {"role": "tool", "tool_call_id": "a", "content": "rain"}
TALK = [user("Why is it so?"), assistant("Because!"), user("Go on <|im_end|> é"), assistant("On"), user("Really?")]


@pytest.mark.parametrize("has_system", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_prompt_of_the_next_turn_agrees_up_to_the_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str, has_system: bool
):
    """And parts soon behind it. The first prompt finds out how prompts end, and then none is rendered twice."""
    if has_system and not STYLES[style].has_system:
        pytest.skip("the template takes no system's turn")
    chat = chat_of(tmp_path, STYLES[style].source)
    begin = [{"role": "system", "content": "Be short."}] if has_system else []
    chat.prompt([*begin, *TALK[:3]])
    rendered = count_renders(monkeypatch)
    prompts = [chat.prompt([*begin, *TALK[:length]]) for length in (1, 3, 5)]
    assert len(rendered) == 3
    for prompt, following in itertools.pairwise(prompts):
        assert prompt.snapshot_at == ()
        agree = num_common(prompt.input_ids, following.input_ids)
        assert agree - MOST_LOST <= prompt.turn_end <= agree
        assert (prompt.turn_end == len(prompt.input_ids)) == (agree == len(prompt.input_ids)), "the answer may follow"


@pytest.mark.parametrize("kwargs", [{}, {"no_thoughts": True}])
def test_where_thoughts_are_dropped_it_is_in_front_of_them(tmp_path: Path, kwargs: dict):
    chat = chat_of(tmp_path, DROPPING)
    prompt = chat.prompt(TALK[:3], template_kwargs=kwargs)
    text = chat._tokenizer.decode(prompt.input_ids[prompt.turn_end :], skip_special_tokens=False)
    assert text.startswith("assistant\n<think>")
    assert prompt.input_ids[prompt.turn_end - 1] == 256


@pytest.mark.parametrize("question", ["Weather?", "old", " Weather?\n", "a <|im_end|> b", "rain", ""])
def test_in_a_loop_of_calls_it_is_at_the_last_result_and_behind_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
):
    """The question is found in the rendered text where the template writes it as it is, nothing is rendered twice."""
    chat = chat_of(tmp_path, DROPPING)
    asked = [user("old"), assistant("older"), user(question)]
    chat.prompt([*asked, CALLED, SAID])
    rendered = count_renders(monkeypatch)
    looped = chat.prompt([*asked, CALLED, SAID, CALLED, SAID])
    assert len(rendered) == 1 + (question not in ("Weather?", "old", "a <|im_end|> b"))
    [point], result = looped.snapshot_at, looped.turn_end
    on = chat.prompt([*asked, CALLED, SAID, CALLED, SAID, CALLED, SAID]).input_ids
    agree = num_common(looped.input_ids, on)
    assert agree - MOST_LOST <= result <= agree
    turn = chat.prompt([*asked, CALLED, SAID, CALLED, SAID, assistant("Rain."), user("Thanks")]).input_ids
    agree = num_common(looped.input_ids, turn)
    assert agree - MOST_LOST <= point <= agree < result
    assert point == chat.prompt(asked).turn_end, "its own first request has kept it already"


@pytest.mark.parametrize("style", STYLES)
def test_a_place_in_a_content_is_a_point(tmp_path: Path, style: str):
    """At the end of a text, in it and in front of it, whatever white space is there, and among special tokens."""
    chat = chat_of(tmp_path, STYLES[style].source)
    text = "  Remember <|im_end|> this and that, for it is what all of us have to know of it. Who are you? \n"
    begin = [user("x" * 40), assistant("Yes.")]
    for place, least in ((text.index(" Who"), text.index("it. ")), (0, 0), (len(text), text.index("you"))):
        asked = [*begin, user(PlacedText(text, (place,))), assistant("No. " * 20), user("Really? " * 20)]
        plain = [*begin, user(text), *asked[3:]]
        prompt, unmarked = chat.prompt(asked), chat.prompt(plain)
        assert dataclasses.replace(prompt, snapshot_at=()) == unmarked, "nothing else changes"
        [point] = prompt.snapshot_at
        shown = chat._tokenizer.decode(prompt.input_ids[:point], skip_special_tokens=False)
        start = shown.rfind("Yes.") if not place else shown.rfind("Remember") - 2
        assert start >= 0 and least - MOST_LOST <= len(shown) - start <= len(text) + MOST_LOST, shown


def test_few_places_count_and_none_near_the_end_of_the_turn_or_in_an_empty_content(tmp_path: Path):
    chat = chat_of(tmp_path, DROPPING)
    many = user(PlacedText("x" * 400, (50, 100, 150, 200, 250, 300)))
    asked = [user(PlacedText("", (0,) * 100)), assistant("On"), many, assistant("On"), user("Why?")]
    prompt = chat.prompt(asked)
    assert len(prompt.snapshot_at) == 4 and prompt.turn_end - prompt.snapshot_at[-1] > 100
    assert [b - a for a, b in itertools.pairwise(prompt.snapshot_at)] == [50] * 3
    assert chat.prompt([*asked[:-1], user(PlacedText("Why?"))]).snapshot_at == prompt.snapshot_at[1:]
    assert chat.prompt(asked[:1]).snapshot_at == ()
    no_states = ChatPrompt(chat._tokenizer)
    assert no_states.prompt([many]).snapshot_at == ()


def test_places_around_pictures_are_those_of_the_texts_before_them():
    picture = Picture(place=2, url="a")
    turn = Turn("", "user", "abcde", pictures=(picture, picture), places=(0, 2, 4))
    [message], _ = messages_of([turn], ChatTemplate("user", bos_token=None, eos_token=None), FieldRules())
    first, *_, last = message["content"]
    assert len(message["content"]) == 4 and (first["text"], last["text"]) == ("ab", "cde")
    assert (first["text"].places, last["text"].places) == ((2,), (2,))


@pytest.mark.parametrize("template", [STYLES["chatml"].source, DROPPING])
def test_a_continued_answer_is_repeated_as_far_as_the_template_repeats_it(tmp_path: Path, template: str):
    chat = chat_of(tmp_path, template)
    begun = chat.prompt([*TALK[:1], assistant("Bec")], continue_final_message=True)
    agree = num_common(begun.input_ids, chat.prompt(TALK[:3]).input_ids)
    assert agree - MOST_LOST <= begun.turn_end <= agree
    assert (begun.turn_end == len(begun.input_ids)) == (template != DROPPING)


def test_a_template_that_takes_no_next_turn_gives_no_point(tmp_path: Path):
    assert chat_of(tmp_path, REFUSING).prompt([user("a")]).turn_end == 0


def test_what_one_client_writes_does_not_move_the_points_of_others(tmp_path: Path):
    """Ends of prompts are remembered. A content that looks like one changes nothing, and neither do many variables."""
    chat = chat_of(tmp_path, DROPPING.replace("no_thoughts", "no_thoughts == true"))
    point = chat.prompt(TALK[:3]).turn_end
    for index in range(70):
        chat.prompt([user("<|im_end|>\n<|im_start|>assistant\n<think>\n")], template_kwargs={"no_thoughts": index})
    assert chat.prompt(TALK[:3]).turn_end == point
    odd = chat.prompt([user("x<|im_end|>\n<|im_start|>assistant\n<think>\n")])
    assert len(odd.input_ids) - odd.turn_end == len("assistant\n<think>\n")


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """`ab` is a token, and `<s>` is special."""
    import tokenizers

    directory = tmp_path_factory.mktemp("merging")
    write_byte_tokenizer(directory, None)
    made = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    alphabet = {char: made.token_to_id(char) for char in tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    merged = tokenizers.Tokenizer(tokenizers.models.BPE({**alphabet, "ab": 256}, [("a", "b")]))
    merged.pre_tokenizer = made.pre_tokenizer
    merged.decoder = made.decoder
    merged.add_special_tokens(["<s>"])
    merged.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("text", "behind", "point"),
    [
        ("cdefghijklab", "b", 9),  # the token `ab` spans the place, and one more may
        ("cdefghijklab", "ab", 9),
        ("cdefghijklab", "", 10),
        ("cdefg<s>hijkl", "kl", 6),
        ("cdefg<s>hijkl", "hijkl", 6),
        ("cd<s>efghijklmnopqrstuvwxyz", "z", 23),
        ("abc def ghi", "hi", 6),
        ("abc def ghi", " ghi", 2),
        ("é", "é", 0),
        ("é" * 300, "é" * 299, 1),
    ],
)
def test_a_point_is_where_no_token_spans_the_place(merging: Tokenizer, text: str, behind: str, point: int):
    ids = merging.encode(text, add_special_tokens=False)
    assert point_before(merging, ids, behind) == point


class TestEndpoints:
    """Every chat endpoint sends the point, to an engine that keeps states and to no other."""

    MESSAGES = TALK[:3]

    def served(self, tokenizer_dir: Path, caches_states: bool = True) -> ScriptedServer:
        return ScriptedServer(tokenizer_dir, info=dataclasses.replace(INFO, caches_states=caches_states))

    @pytest.mark.parametrize("caches_states", [True, False])
    def test_chats(self, tokenizer_dir: Path, caches_states: bool):
        server = self.served(tokenizer_dir, caches_states)
        common = {"model": "fake", "max_tokens": 4}
        for path, body in (
            ("/v1/chat/completions", {**common, "messages": self.MESSAGES}),
            ("/v1/messages", {**common, "messages": self.MESSAGES}),
            ("/v1/responses", {"model": "fake", "input": self.MESSAGES}),
        ):
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert server.request.turn_end == (len(server.request.input_ids) if caches_states else 0), path

    def test_who_only_counts_looks_for_no_point(self, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
        server = self.served(tokenizer_dir)
        monkeypatch.delattr(ChatPrompt, "_next_turn_places")
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            answer = server.http.post(path, json={"model": "fake", "messages": self.MESSAGES})
            assert answer.status_code == 200, answer.text

    @pytest.mark.parametrize("caches_states", [True, False])
    def test_prompts_of_one_post(self, tokenizer_dir: Path, caches_states: bool):
        shared, few = "x" * 40, {"max_tokens": 2}
        server = self.served(tokenizer_dir, caches_states)
        for path, body in (
            ("/v1/score", {"query": shared, "items": ["a", "b", "cc"], "label_token_ids": [5]}),
            ("/v1/completions", {"model": "fake", "prompt": [shared + "a", shared + "bb", shared], **few}),
            ("/generate", {"text": [shared + "a", shared + "bb"]}),
        ):
            server.reset()
            server.engine.info = dataclasses.replace(INFO, caches_states=caches_states)
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = {request.snapshot_at for request in server.engine.requests}
            assert found == {(40,) if caches_states else ()}, path

    def test_answers_choices_and_parts(self, tokenizer_dir: Path):
        server = self.served(tokenizer_dir)
        parts = ["say it", "", " at once"]
        for path, body, points in (
            ("/generate", {"text": "say", "sampling_params": {"n": 2}}, {(3,)}),
            ("/generate", {"prompt": parts}, {(3,)}),
            ("/generate", {"prompt": ["say it", [], " at once"]}, {(6,)}),
            ("/select", {"prompt": parts, "choices": [" or so", " or never"]}, {(3, 13), (3, 18)}),
        ):
            server.engine.requests.clear()
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert {request.snapshot_at for request in server.engine.requests} == points, path

    @pytest.mark.parametrize("caches_states", [True, False])
    def test_marks_of_clients(self, tmp_path: Path, caches_states: bool):
        """Anthropic's `cache_control`, and what OpenAI's clients send in its place."""
        write_byte_tokenizer(tmp_path, CALLING)
        info = dataclasses.replace(INFO, caches_states=caches_states)
        server, end = ScriptedServer(tmp_path, info=info, tool_call_parser="hermes"), {"cache_control": CACHE}
        system, more = {"type": "text", "text": "Be brief. " * 5 + "So!"}, {"type": "text", "text": "And how? " * 8}
        tools = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in "fg"]
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "It is this. " * 5 + "Yes!"}
        chat = [user("What is it? " * 5), assistant("On"), user("It is this. " * 5)]
        looped = [chat[0], called, {"role": "user", "content": [result | end, more]}]
        tooled = {"system": [system], "messages": chat, "tools": [tools[0], tools[1] | end]}
        other = {"prompt_cache_breakpoint": {"mode": "explicit"}}
        parts = [{"type": "input_text", "text": system["text"]} | other, {"type": "input_text", "text": more["text"]}]
        asks = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
        said = {"type": "function_call_output", "call_id": "a", "output": "It is this."}
        ran = [chat[0], asks, {**said, "output": parts}, asks, said]
        for path, body, before in (
            ("/v1/messages", {"system": [system | end, more], "messages": chat}, "So!"),
            ("/v1/messages", tooled, "user\n"),
            ("/v1/messages", {"messages": looped, "tools": tools}, "Yes!"),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": [system | end, more]}, *chat]}, "So!"),
            ("/v1/chat/completions", {"messages": [user(""), {**chat[0], "content": [system | other, more]}]}, "So!"),
            ("/v1/responses", {"input": [user(""), {**chat[0], "content": parts}]}, "So!"),
            ("/v1/responses", {"input": [user("Be"), {**chat[0], "role": "system", "content": parts}, *chat]}, "So!"),
            ("/v1/responses", {"instructions": "Be", "input": [{"role": "system", "content": parts}, *chat]}, "So!"),
            ("/v1/responses", {"input": ran}, "So!"),
        ):
            most = {} if path == "/v1/responses" else {"max_tokens": 4}
            answer = server.http.post(path, json={"model": "fake", **most, **body})
            assert answer.status_code == 200 and "x-jsg-warnings" not in answer.headers, answer.text
            points, place = server.request.snapshot_at, server.prompt.index(before) + len(before)
            to_place = len(server.tokenizer.encode(server.prompt[:place]))
            assert any(to_place - 16 <= point <= to_place for point in points) == caches_states, (path, points)
            assert len(points) <= caches_states * (2 if body.get("messages", body.get("input")) in (looped, ran) else 1)
        body = {"model": "fake", "max_tokens": 4, "messages": chat, "cache_control": CACHE}
        server.http.post("/v1/messages", json=body)
        assert server.request.snapshot_at == () and bool(server.request.turn_end) == caches_states

    def test_marks_of_responses_that_go_on(self, tokenizer_dir: Path):
        """They stay with what is stored, may come with a message that is sent again, and thoughts have none."""
        server, mark = self.served(tokenizer_dir), {"prompt_cache_breakpoint": {"mode": "explicit"}}
        part = {"type": "input_text", "text": "What is it? " * 5}
        first = [{"role": "user", "content": [part | mark, {"type": "input_text", "text": "x" * 40}]}]

        def points(given: Any, **fields: Any) -> tuple[int, ...]:
            answer = server.http.post("/v1/responses", json={"model": "fake", "input": given, **fields})
            assert answer.status_code == 200, answer.text
            self.made = answer.json()
            return server.request.snapshot_at

        assert (found := points(first)) != ()
        before, on = self.made["id"], [user("And how? " * 5)]
        assert points(on, previous_response_id=before) == found
        items = server.http.get(f"/v1/responses/{before}/input_items", params={"order": "asc"}).json()["data"]
        assert points([*items, *self.made["output"], *on]) == ()
        assert points([{**items[0], "content": first[0]["content"]}, *self.made["output"], *on]) == found
        thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm", **mark}]}
        refused = server.http.post("/v1/responses", json={"model": "fake", "input": [*first, thoughts]})
        assert refused.status_code == 400 and "must not have prompt_cache_breakpoint" in refused.text

    def test_the_runs_of_a_posted_program(self, tokenizer_dir: Path):
        server = self.served(tokenizer_dir)
        body = {"graph": graph_of(_asked), "batch": [{"question": text} for text in ("Who is it?", "Why?")]}
        answer = server.http.post("/v1/programs", json=body)
        assert answer.status_code == 200, answer.text
        assert [request.snapshot_at for request in server.engine.requests] == [(len("Be"),)] * 2


@jsg.function
def _asked(s: Any, question: str) -> None:
    s += "Be brief."
    s += question
    s += jsg.gen("answer", max_tokens=1)
