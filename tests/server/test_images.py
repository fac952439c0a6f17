"""Pictures and videos in requests: where they stand in a prompt, in every API, and whose decoding they cost."""

import threading
from pathlib import Path

import numpy as np
import pytest

from jsg.engine import media_reader
from jsg.engine.media_reader import ModelMediaReader
from jsg.errors import ModelError
from jsg.media import MediaInput
from jsg.processing.media_prompt import PromptMedia, put_media
from jsg.processing.tokenizer import load_tokenizer
from jsg.server.shared import media_fields
from tests.golden.vision_variants import IMAGE_TOKEN, VIDEO_TOKEN
from tests.server.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_byte_tokenizer
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import (
    PATCHES,
    VISION_TEMPLATE,
    base64_of,
    data_url,
    png,
    vision_special_tokens,
    write_vision_model,
)

LAST_BYTE = 255
SHOWN = "<image>" * PATCHES
ASKED = [{"type": "image_url", "image_url": {"url": data_url(png())}}, {"type": "text", "text": "what?"}]


@pytest.fixture
def server(model_dir: Path) -> ScriptedServer:
    return ScriptedServer(model_dir, model_dir=model_dir)


def chat(server: ScriptedServer, *contents: object) -> dict:
    """Contents of the user and the assistant in turn; the answer's body."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    return response.json()


def media_of(server: ScriptedServer) -> tuple[MediaInput, ...]:
    """Of the last request; its tokens are placeholders and its words are none."""
    request = server.request
    for item in request.media:
        placeholder = VIDEO_TOKEN if item.is_video else IMAGE_TOKEN
        assert set(request.input_ids[item.start : item.end]) == {placeholder}
        assert item.words.min() >= server.engine.info.vocab_size
    return request.media


def error_of(response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_picture_in_the_input_of_decisions_is_in_the_prompt_of_each_question(server: ScriptedServer):
    server.engine.score = lambda ids, index: -1.0
    pictures = [{"type": "input_image", "image_url": data_url(png()), "detail": "low"}]
    texts = [{"type": "input_text", "text": "this"}]
    items = [{"role": "user", "content": pictures}, {"role": "user", "content": texts + pictures}]
    questions = [{"type": "predicate", "instructions": each} for each in ("a", "b")]
    response = server.http.post("/v1/decisions", json={"input": items, "questions": questions})
    assert response.status_code == 200, response.text
    for request, asked in zip(server.engine.requests, "aabb", strict=True):
        assert len(request.media) == 2
        shown = server.tokenizer.decode(request.input_ids, skip_special_tokens=False)
        assert shown.count("<image>") == 2 * PATCHES
        assert f"\n\n\nthis\n\n{asked}\nAnswer Yes or No.<|im_end|>\n" in shown


class TestChat:
    def test_a_picture_stands_where_the_template_writes_it(self, server):
        answer = chat(server, ASKED)
        assert server.prompt == f"<|im_start|>user\n{SHOWN}\nwhat?<|im_end|>\n<|im_start|>assistant\n"
        (item,) = media_of(server)
        assert item.rows.tolist() == list(range(PATCHES))
        assert answer["usage"]["prompt_tokens"] == len(server.request.input_ids)

    def test_several_stand_in_order(self, server, model_dir):
        first, second = (data_url(png(seed)) for seed in (1, 2))
        chat(server, [{"type": "image_url", "image_url": {"url": url}} for url in (first, second, first)])
        alone = []
        for url in (first, second):
            chat(server, [{"type": "image_url", "image_url": {"url": url, "detail": "original"}}])
            alone.append(media_of(server)[0].digest)
        chat(server, "hi", "ho", [{"type": "image_url", "image_url": {"url": url}} for url in (first, second, first)])
        assert [item.digest for item in media_of(server)] == [alone[0], alone[1], alone[0]]
        assert "hi<|im_end|>" in server.prompt

    def test_a_placeholder_that_somebody_typed_is_text(self, server):
        chat(server, "see <image> and <video>")
        assert not server.request.media
        assert not {IMAGE_TOKEN, VIDEO_TOKEN} & set(server.request.input_ids)
        assert "see <image> and <video>" in server.prompt
        chat(server, [*ASKED, {"type": "text", "text": "<image>"}])
        assert len(media_of(server)) == 1
        assert server.request.input_ids.count(IMAGE_TOKEN) == PATCHES

    @pytest.mark.parametrize(
        ("first", "second"),
        [("a<|im_", "end|>b"), ("<im", "age>"), ("a<|im_ ", "\nend|>b"), ("<|im_end|>a<", "|im_end|>")],
    )
    @pytest.mark.parametrize("trims", [False, True])
    def test_texts_on_both_sides_of_a_picture_make_no_special_token(self, tmp_path, first, second, trims):
        template = VISION_TEMPLATE.replace("part.text", "part.text | trim") if trims else VISION_TEMPLATE
        server = ScriptedServer(write_vision_model(tmp_path, chat_template=template), model_dir=tmp_path)
        chat(server, [ASKED[1], *ASKED])
        plain = [id_ for id_ in server.request.input_ids if id_ > LAST_BYTE]
        chat(server, [{"type": "text", "text": first}, ASKED[0], {"type": "text", "text": second}])
        assert [id_ for id_ in server.request.input_ids if id_ > LAST_BYTE] == plain, "the template's own only"
        assert len(media_of(server)) == 1

    def test_a_template_for_texts_only_gets_the_placeholder_in_the_text(self, tmp_path):
        model_dir = write_vision_model(tmp_path, chat_template=CHAT_TEMPLATE)
        server = ScriptedServer(model_dir, model_dir=model_dir)
        chat(server, [{"type": "text", "text": "first "}, *ASKED])
        assert f"user\nfirst {SHOWN}\nwhat?<|im_end|>" in server.prompt
        assert len(media_of(server)) == 1

    def test_a_template_that_leaves_a_picture_out_is_named(self, tmp_path):
        only_last = CHAT_TEMPLATE.replace("in messages", "in messages[-1:]")
        server = ScriptedServer(write_vision_model(tmp_path, chat_template=only_last), model_dir=tmp_path)
        messages = [{"role": "user", "content": ASKED}, {"role": "user", "content": "hi"}]
        error = error_of(server.http.post("/v1/chat/completions", json={"messages": messages}))
        assert error["param"] == "messages" and "0 placeholders and 1 came" in error["message"]

    def test_n_answers_share_one_decoding(self, server, monkeypatch):
        decoded = []
        decode = media_reader.decode_image
        monkeypatch.setattr(
            media_reader, "decode_image", lambda data, budget: decoded.append(1) or decode(data, budget)
        )
        messages = [{"role": "user", "content": ASKED}]
        assert server.http.post("/v1/chat/completions", json={"messages": messages, "n": 3}).status_code == 200
        assert len({id(request.media[0].pixels) for request in server.engine.requests}) == 1
        body = {"text": ["a", "b <image>", "c"], "image_data": base64_of(png(7))}
        assert server.http.post("/generate", json=body).status_code == 200
        assert [len(request.media) for request in server.engine.requests[-3:]] == [1, 1, 1]
        assert len(decoded) == 2, "one for each file"

    def test_tokens_are_counted_with_pictures(self, server):
        chat(server, ASKED)
        ids = server.request.input_ids
        body = {"messages": [{"role": "user", "content": ASKED}]}
        assert server.http.post("/tokenize", json=body).json()["tokens"] == list(ids)
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(png())}}
        body = {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "what?"}]}]}
        counted = server.http.post("/v1/messages/count_tokens", json=body).json()
        assert counted == {"input_tokens": len(ids)}


class TestOtherApis:
    def test_responses_keep_pictures_for_those_that_continue_them(self, server):
        content = [
            {"type": "input_text", "text": "see "},
            {"type": "input_image", "image_url": data_url(png()), "detail": "auto"},
            {"type": "input_text", "text": "this"},
        ]
        client = server.openai()
        first = client.responses.create(model="fake", input=[{"role": "user", "content": content}])
        assert f"user\n{SHOWN}\nsee this<|im_end|>" in server.prompt
        digest = media_of(server)[0].digest
        client.responses.create(model="fake", input="again", previous_response_id=first.id)
        assert [item.digest for item in media_of(server)] == [digest]
        assert "again<|im_end|>" in server.prompt
        (item,) = server.http.get(f"/v1/responses/{first.id}/input_items").json()["data"]
        assert [part["type"] for part in item["content"]] == ["input_text", "input_image", "input_text"]
        assert item["content"][1]["image_url"] == content[1]["image_url"]

    @pytest.mark.parametrize("second", ["hello", [{"type": "input_text", "text": "hello"}]])
    def test_a_picture_for_the_system(self, server, second):
        picture = [{"type": "input_image", "image_url": data_url(png()), "detail": "original"}]
        items = [
            {"role": "system", "content": picture},
            {"role": "system", "content": second},
            {"role": "user", "content": "x"},
        ]
        response = server.http.post("/v1/responses", json={"input": items})
        assert response.status_code == 200, response.text
        assert server.prompt.startswith(f"<|im_start|>system\n{SHOWN}\n<|im_end|>\n<|im_start|>system\nhello<|im_end|>")

    def test_the_assistant_sends_no_pictures(self, server):
        items = [{"role": "assistant", "content": [{"type": "input_image", "image_url": data_url(png())}]}]
        assert "message of the user" in error_of(server.http.post("/v1/responses", json={"input": items}))["message"]

    @pytest.mark.parametrize("place", ["tool_result", "system", "assistant"])
    def test_anthropic_says_where_pictures_go(self, server, place):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(png())}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
        said = {"role": "user", "content": [result] if place == "tool_result" else "x"}
        if place == "assistant":
            said = {"role": "assistant", "content": [image]}
        body = {"messages": [said], "max_tokens": 1} | ({"system": [image]} if place == "system" else {})
        response = server.http.post("/v1/messages", json=body)
        assert response.status_code == 400, response.text
        assert "send the picture in a message of the user" in response.json()["error"]["message"]

    def test_what_came_of_a_call_is_text(self, server):
        output = [{"type": "input_image", "image_url": data_url(png())}]
        items = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]
        assert "must be text" in error_of(server.http.post("/v1/responses", json={"input": items}))["message"]

    def test_anthropic_messages_of_one_role_are_one_turn(self, server):
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(png())}}
        by_url = {"type": "image", "source": {"type": "url", "url": data_url(png(1))}}
        messages = [
            {"role": "user", "content": "first"},
            {"role": "user", "content": [block, {"type": "text", "text": "what?"}, by_url]},
        ]
        answer = server.anthropic().messages.create(model="fake", messages=messages, max_tokens=5)
        assert f"user\n{SHOWN}\n{SHOWN}\nfirst\n\nwhat?<|im_end|>" in server.prompt
        assert answer.usage.input_tokens == len(server.request.input_ids)

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ({"type": "base64", "data": "aaaa"}, "must have media_type"),
            ({"type": "url", "url": "x", "data": "aaaa"}, "must not have data"),
            ({"type": "url", "url": "data:image/png;base64,###"}, "base64"),
        ],
    )
    def test_wrong_sources(self, server, source, said):
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        response = server.http.post("/v1/messages", json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 400 and said in response.json()["error"]["message"]

    def test_the_model_says_what_it_takes(self, server):
        info = server.http.get("/get_model_info").json()
        assert info["is_multimodal"] and info["modalities"] == ["text", "image"]
        assert server.http.get("/v1/models").json()["data"][0]["modalities"] == ["text", "image"]
        assert server.http.get("/get_chat_template").json()["placeholders"] == {"image": "<image>"}


class TestRawPrompts:
    @pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
    @pytest.mark.parametrize(
        ("prompt", "images", "shown"),
        [
            ("a<image>b<image>c", [base64_of(png()), data_url(png(1))], f"a{SHOWN}b{SHOWN}c"),
            ("ab", [base64_of(png()), data_url(png(1))], f"{SHOWN}{SHOWN}ab"),
            ("ab", base64_of(png()), f"{SHOWN}ab"),
            ([97, IMAGE_TOKEN, 98], base64_of(png()), None),
        ],
    )
    def test_they_take_the_places_of_placeholders(self, server, path, prompt, images, shown):
        field = "prompt" if path == "/v1/completions" else "text" if isinstance(prompt, str) else "input_ids"
        response = server.http.post(path, json={field: prompt, "image_data": images})
        assert response.status_code == 200, response.text
        assert shown is None or server.prompt == shown
        if shown is None:
            assert server.request.input_ids == (97, *[IMAGE_TOKEN] * PATCHES, 98)
        assert len(media_of(server)) == (len(images) if isinstance(images, list) else 1)

    def test_each_prompt_of_a_list_has_its_own(self, server):
        images = [None, base64_of(png()), [base64_of(png(1)), base64_of(png(2))]]
        body = {"text": ["a", "<image>b", "c"], "image_data": images}
        assert server.http.post("/generate", json=body).status_code == 200
        by_text = {server.tokenizer.decode(request.input_ids): len(request.media) for request in server.engine.requests}
        assert by_text == {"a": 0, "b": 1, "c": 2}

    def test_a_picture_that_comes_often_is_counted_before_it_is_put(self, server, monkeypatch):
        put: list[int] = []
        monkeypatch.setattr(PromptMedia, "at", lambda item, start: put.append(start))
        count = server.engine.info.max_request_tokens // PATCHES + 1
        content = [ASKED[0]] * count
        for path, param, body in (
            ("/generate", "text", {"text": "a", "image_data": [base64_of(png())] * count}),
            ("/v1/completions", "prompt", {"prompt": "a", "image_data": [base64_of(png())] * count}),
            ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": content}]}),
        ):
            error = error_of(server.http.post(path, json=body))
            assert error["param"] == param and "with its pictures and videos has" in error["message"]
        assert not put

    def test_prompts_are_searched_beside_the_event_loop(self, server, monkeypatch):
        threads = set()

        def put(*args):
            threads.add(threading.current_thread().name)
            return put_media(*args)

        monkeypatch.setattr(media_fields, "put_media", put)
        room = server.engine.info.max_request_tokens - 200
        for body in (
            {"input_ids": [[97] * room] * 20},
            {"text": "a", "image_data": base64_of(png())},
        ):
            response = server.http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 1}})
            assert response.status_code == 200, response.text
        assert threads and all(name.startswith("jsg-") for name in threads), threads

    def test_echo_scores_no_picture(self, server):
        body = {"prompt": "a<image>b", "image_data": base64_of(png()), "echo": True, "logprobs": 1}
        error = error_of(server.http.post("/v1/completions", json=body))
        assert error["param"] == "echo" and "logprob_start_len" not in error["message"]
        assert server.http.post("/v1/completions", json=body | {"logprobs": None}).status_code == 200

    @pytest.mark.parametrize(
        ("fields", "param", "said"),
        [
            ({"text": "<image>"}, "text", "1 placeholders and 0 came"),
            ({"text": "<image>", "image_data": [base64_of(png())] * 2}, "text", "1 placeholders and 2 came"),
            ({"text": ["a", "b"], "image_data": [base64_of(png())]}, "image_data", "each of the 2 prompts"),
            ({"text": "a", "image_data": [[base64_of(png())]]}, "image_data", "one prompt must be a text"),
            ({"text": "a", "video_data": base64_of(png())}, "video_data", "pictures only"),
            ({"prompt": ["a"], "image_data": base64_of(png())}, "image_data", "as parts of the prompt"),
            ({"text": "a", "num_frames": 3}, "num_frames", "no video_data"),
            ({"text": "a", "image_data": "###"}, "image_data", "base64"),
            ({"text": "a", "image_data": "http://example.com/a.png"}, "image_data", "--allowed-media-host"),
        ],
    )
    def test_what_does_not_fit_is_named(self, server, fields, param, said):
        error = error_of(server.http.post("/generate", json=fields))
        assert (error["param"], said in error["message"]) == (param, True), error


class TestParts:
    def test_a_picture_is_a_part_and_no_text_is_one(self, server):
        part = {"image": base64_of(png()), "media_type": "image/png"}
        body = {"prompt": [{"markup": "<|im_start|>user\n<image>"}, part, "what?", part]}
        response = server.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        assert server.prompt == f"<|im_start|>user\n<image>{SHOWN}what?{SHOWN}"
        assert len(media_of(server)) == 2
        part_ids = response.json()["meta_info"]["part_ids"]
        assert [bytes(server.tokenizer.decode(ids, skip_special_tokens=False), "ascii") for ids in part_ids] == [
            b"<|im_start|>user\n<image>",
            b"what?",
        ]

    def test_a_placeholder_among_token_ids_is_an_ordinary_token(self, server):
        """A model may write one, and what it wrote is sent back as `kept_ids`."""
        response = server.http.post("/generate", json={"prompt": [[97, IMAGE_TOKEN], "b"]})
        assert response.status_code == 200, response.text
        assert server.request.input_ids == (97, IMAGE_TOKEN, *server.tokenizer.encode("b"))
        assert not server.request.media

    def test_choices_are_scored_behind_it(self, server):
        part = {"image": base64_of(png()), "media_type": "image/png"}
        response = server.http.post("/select", json={"prompt": [part, "is it "], "choices": ["a cat", "a dog"]})
        assert response.status_code == 200, response.text
        for request in server.engine.requests:
            assert [item.start for item in request.media] == [0]

    @pytest.mark.parametrize(
        "others", [[{"offset": 3}, "text"], [{"branches": [["a"], ["b"]]}, "text"]], ids=["offset", "branches"]
    )
    def test_nothing_moves_beside_a_picture(self, server, others):
        body = {"prompt": ["a", {"image": base64_of(png()), "media_type": "image/png"}, *others]}
        assert "must not have" in error_of(server.http.post("/generate", json=body))["message"]

    def test_bos_comes_before_a_picture_that_begins_a_prompt(self, model_dir, tmp_path):
        write_byte_tokenizer(tmp_path, None, vision_special_tokens())
        config = (tmp_path / "tokenizer_config.json").read_text()
        (tmp_path / "tokenizer_config.json").write_text(
            config.replace('"add_bos_token": false', '"add_bos_token": true')
        )
        server = ScriptedServer(tmp_path, model_dir=model_dir)
        part = {"image": base64_of(png()), "media_type": "image/png"}
        for body in ({"prompt": [part, "a"]}, {"text": "a", "image_data": base64_of(png())}):
            assert server.http.post("/generate", json=body).status_code == 200
            assert server.prompt == f"<s>{SHOWN}a"
        body = {"prompt": [{"template": "a"}, part]}
        assert server.http.post("/generate", json=body).status_code == 200
        assert server.prompt == f"<s>a{SHOWN}", "as Hugging Face's processors encode what a template wrote"


class TestFilesOfTheModel:
    def test_a_placeholder_is_a_special_token(self, model_dir, tmp_path):
        write_byte_tokenizer(tmp_path, None, SPECIAL_TOKENS)
        with pytest.raises(ModelError, match="must be a special token"):
            ModelMediaReader.of_model(model_dir, load_tokenizer(tmp_path))

    def test_the_two_configs_agree(self, tmp_path):
        write_vision_model(tmp_path)
        config = (tmp_path / "preprocessor_config.json").read_text()
        (tmp_path / "preprocessor_config.json").write_text(config.replace("28", "56"))
        with pytest.raises(ModelError, match="tiles of 28 pixels"):
            ModelMediaReader.of_model(tmp_path, load_tokenizer(tmp_path))

    def test_a_model_without_eyes_says_so(self, tokenizer_dir):
        server = ScriptedServer(tokenizer_dir)
        body = {"messages": [{"role": "user", "content": ASKED}]}
        assert "cannot see" in error_of(server.http.post("/v1/chat/completions", json=body))["message"]
        assert (
            "cannot see" in error_of(server.http.post("/generate", json={"text": "a", "image_data": "aaaa"}))["message"]
        )
        assert server.http.get("/get_model_info").json()["modalities"] == ["text"]

    def test_tiles_of_the_grid_become_tokens_with_newlines(self, tmp_path):
        write_vision_model(tmp_path, "llava_next")
        server = ScriptedServer(tmp_path, model_dir=tmp_path)
        chat(server, ASKED)
        (item,) = media_of(server)
        assert item.pixels.shape == (3, 3, 28, 28) and item.pixels.dtype == np.float32
        assert item.rows.max() < 3 * PATCHES
        assert item.rows[:PATCHES].tolist() == list(range(PATCHES)), "the base tile first"
        assert (item.rows == -1).sum() == 4, "a newline behind each row of patches"
