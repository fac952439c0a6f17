"""Chat templates of the forms that LLaVA models are published with: prompts are those that Hugging Face writes.

The templates are written for these tests; what they do is what the published ones do: contents are lists of parts,
pictures and videos stand before the text of their turn, what the assistant said is inside of a `generation` tag, and
the file is `chat_template.json`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jsg.engine.media_reader import ModelMediaReader
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import Gen, Image, RoleBegin, RoleEnd, SamplingArgs, Text
from jsg.processing.parts import MediaPart
from jsg.processing.tokenizer import load_tokenizer
from jsg.speech.prompts.chat_prompt import ChatPrompt
from jsg.speech.prompts.turns import ChatTurns
from tests.lang.fake_model import FakeModel
from tests.server.byte_tokenizer import CHAT_TEMPLATE
from tests.server.films import write_film
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import data_url, png, write_vision_model

VICUNA = """\
{%- for turn in messages -%}
    {%- if turn['role'] != 'system' -%}{{- turn['role'].upper() + ': ' -}}{%- endif -%}
    {%- for part in turn['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' -}}{%- endfor -%}
    {%- if turn['role'] != 'assistant' -%}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'text') -%}
            {{- part['text'] + ' ' -}}
        {%- endfor -%}
    {%- else -%}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'text') -%}
            {%- generation -%}{{- part['text'] + ' ' -}}{%- endgeneration -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
_LOOP = "{%- for part in turn['content'] | selectattr('type', 'equalto', 'image') -%}"
_PICTURES = _LOOP + "{{- '<image>\\n' -}}{%- endfor -%}"
VIDEO = VICUNA.replace(_PICTURES, _PICTURES.replace("image", "video") + _PICTURES)
MISTRAL = """\
{%- for turn in messages -%}
    {%- if turn['role'] == 'system' -%}{{- '<<SYS>>\\n' + turn['content'][0]['text'] + '\\n<</SYS>>\\n\\n' -}}
    {%- elif turn['role'] == 'user' -%}
        {{- '[INST] ' -}}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' -}}{%- endfor -%}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'text') -%}{{- part['text'] -}}{%- endfor -%}
        {{- ' [/INST]' -}}
    {%- elif turn['role'] == 'assistant' -%}{{- ' ' + turn['content'][0]['text'] + '</s> ' -}}
    {%- else -%}{{- raise_exception('there is no such role') -}}
    {%- endif -%}
{%- endfor -%}
"""
YI = """\
{%- for turn in messages -%}
    {{- '<|im_start|>' + turn['role'] + '\\n' -}}
    {%- for part in turn['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' -}}{%- endfor -%}
    {%- if turn['role'] != 'assistant' -%}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'text') -%}{{- part['text'] -}}{%- endfor -%}
    {%- else -%}
        {%- for part in turn['content'] | selectattr('type', 'equalto', 'text') -%}
            {%- generation -%}{{- part['text'] -}}{%- endgeneration -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
FORMS = {  # the variant that has it, and how the conversation below is written
    "vicuna": (
        *(VICUNA, "llava"),
        "Be brief. USER: <image>\nWhat is it? ASSISTANT: A cat. USER: Where? ASSISTANT:",
    ),
    "video": (
        *(VIDEO, "llava_next_video"),
        "Be brief. USER: <image>\nWhat is it? ASSISTANT: A cat. USER: Where? ASSISTANT:",
    ),
    "mistral": (
        *(MISTRAL, "llava_next"),
        "<<SYS>>\nBe brief.\n<</SYS>>\n\n[INST] <image>\nWhat is it? [/INST] A cat.</s> [INST] Where? [/INST]",
    ),
    "yi": (
        *(YI, "llava_next"),
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\n<image>\nWhat is it?<|im_end|>"
        "<|im_start|>assistant\nA cat.<|im_end|><|im_start|>user\nWhere?<|im_end|><|im_start|>assistant\n",
    ),
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": data_url(png())}},
        ],
    },
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Where?"},
]


def make_model(directory: Path, form: str) -> Path:
    """A model with the template in a file of its own; the one in the tokenizer's config is for texts only."""
    template, variant, _ = FORMS[form]
    write_vision_model(directory, variant, chat_template=CHAT_TEMPLATE)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return directory


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as Hugging Face's processors take them."""
    shown = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown.append({**message, "content": [{"type": "image"} if "image_url" in part else part for part in parts]})
    return shown


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_is_written_as_hugging_face_writes_it(form, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    template, _, expected = FORMS[form]
    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (theirs,), _ = render_jinja_template([in_parts(TALK)], chat_template=template, **options)
    assert theirs == expected
    server = ScriptedServer(make_model(tmp_path, form), model_dir=tmp_path)
    response = server.http.post("/v1/chat/completions", json={"messages": TALK})
    assert response.status_code == 200, response.text
    (item,) = server.request.media
    assert server.prompt == expected.replace("<image>", "<image>" * len(item.rows))
    assert server.request.input_ids.index(server.tokenizer.token_id("<image>")) == item.start


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("adds_bos", [False, True], ids=["", "bos"])
async def test_a_program_writes_the_same(form, adds_bos, tmp_path):
    model_dir = with_bos(tmp_path, form) if adds_bos else make_model(tmp_path, form)
    tokenizer = load_tokenizer(model_dir)
    reader = ModelMediaReader.of_model(model_dir, tokenizer)
    assert reader is not None
    model = FakeModel(tokenizer, ["."], media=reader)
    session = TokenSession(model)
    for item in (
        *(RoleBegin("system"), Text("Be brief."), RoleEnd("system")),
        *(RoleBegin("user"), Image(png(), "image/png"), Text("What is it?"), RoleEnd("user")),
        *(RoleBegin("assistant"), Text("A cat."), RoleEnd("assistant")),
        *(RoleBegin("user"), Text("Where?"), RoleEnd("user"), RoleBegin("assistant")),
    ):
        await session.extend(item)
    async for _ in session.generate(Gen("a", SamplingArgs(max_tokens=3))):
        pass
    media = reader.read([MediaPart("image", png(), "image/png")])
    expected = ChatPrompt(tokenizer, media=reader).prompt(in_parts(TALK), media=media)
    (prompt,) = model.prompts
    assert tokenizer.decode(prompt.input_ids) == tokenizer.decode(expected.input_ids)
    assert prompt.input_ids == expected.input_ids
    assert [item.start for item in prompt.media] == [item.start for item in expected.media]
    await session.close()


def test_a_video_stands_before_pictures(tmp_path):
    server = ScriptedServer(make_model(tmp_path, "video"), model_dir=tmp_path)
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": data_url(png())}},
        {"type": "video_url", "video_url": {"url": data_url(write_film([10, 200]), "video/mp4")}},
    ]
    response = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 200, response.text
    video, image = server.request.media
    assert (video.is_video, image.is_video) == (True, False)
    videos, images = "<video>" * len(video.rows), "<image>" * len(image.rows)
    assert server.prompt == f"USER: {videos}\n{images}\nWhat is it? ASSISTANT:"


@pytest.mark.parametrize("form", FORMS)
def test_a_line_break_is_behind_a_picture(form, tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path, form))
    assert ChatTurns.of_tokenizer(tokenizer, {"image": "<image>"}).around_media("image") == ("", "\n")


def test_a_turn_that_the_model_goes_on_with(tmp_path):
    """A content that is a text becomes a part, and the mark where it ends is found inside of the tag."""
    server = ScriptedServer(make_model(tmp_path, "yi"), model_dir=tmp_path)
    body = {"messages": TALK[:3], "continue_final_message": True, "add_generation_prompt": False}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert server.prompt.endswith("<|im_start|>assistant\nA cat.")


def with_bos(directory: Path, form: str) -> Path:
    """The same model, whose tokenizer puts BOS before a text, as those of Llama and Mistral do."""
    config = make_model(directory, form) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_bos_token": True}))
    return directory


@pytest.mark.parametrize("form", FORMS)
def test_bos_stands_before_what_no_template_wrote_one_in(form, tmp_path):
    """As `apply_chat_template` of Hugging Face's processors encodes it."""
    server = ScriptedServer(with_bos(tmp_path, form), model_dir=tmp_path)
    response = server.http.post("/v1/chat/completions", json={"messages": TALK})
    assert response.status_code == 200, response.text
    (item,) = server.request.media
    assert server.prompt == "<s>" + FORMS[form][2].replace("<image>", "<image>" * len(item.rows))
    assert server.request.input_ids.index(server.tokenizer.token_id("<image>")) == item.start
    assert server.http.post("/v1/chat/completions", json={"messages": TALK[-1:]}).status_code == 200
    assert server.prompt.startswith("<s>") and server.prompt.count("<s>") == 1, "without a picture too"


def test_a_bos_of_the_template_is_enough(tmp_path):
    model_dir = with_bos(tmp_path, "mistral")
    (model_dir / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}" + MISTRAL}))
    server = ScriptedServer(model_dir, model_dir=model_dir)
    assert server.http.post("/v1/chat/completions", json={"messages": TALK}).status_code == 200
    assert server.prompt.startswith("<s><<SYS>>") and server.prompt.count("<s>") == 1
