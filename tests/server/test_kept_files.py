"""Files that a client has sent and then names: read as if they came again, and only by who sent them."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jsg.processing.media.base64_files import write_base64
from jsg.server import kept_files
from jsg.server.kept_files import ENTRY_BYTES, KeptFiles
from tests.server.running import check_discreet
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import base64_of, png, saved, write_vision_model

KEY_A, KEY_B = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
FRAMES = tuple(png(seed, (32, 48)) for seed in range(4))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", "llava_next_video")


@pytest.fixture
def server(model_dir: Path) -> ScriptedServer:
    return ScriptedServer(model_dir, model_dir=model_dir)


def name_of(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def sent(file: bytes) -> dict[str, str]:
    return {"image": base64_of(file), "media_type": "image/png"}


def named(file: bytes) -> dict[str, str]:
    return {"image_sha256": name_of(file)}


def ask(server: ScriptedServer, *parts: Any, headers: dict[str, str] | None = None, **fields: Any):
    return server.http.post("/generate", json={"prompt": ["see ", *parts, " this"], **fields}, headers=headers)


def check_unknown(response) -> str:
    """A 404 that tells nothing of the file; its message."""
    assert response.status_code == 404, response.text
    check_discreet(response.text)
    error = response.json()["error"]
    assert error["type"] == "NotFoundError" and "not kept here; send the file" in error["message"]
    return error["message"]


def test_a_prompt_that_names_a_picture_is_the_prompt_that_brings_it(server):
    first, second = png(1), png(2)
    whole = ask(server, sent(first), "and", sent(second)).json()
    expected = server.request
    for parts in ((named(first), "and", named(second)), (named(first), "and", sent(second))):
        answer = ask(server, *parts)
        assert answer.status_code == 200, answer.text
        assert server.request.input_ids == expected.input_ids
        assert [item.digest for item in server.request.media] == [item.digest for item in expected.media]
        assert answer.json()["meta_info"]["part_ids"] == whole["meta_info"]["part_ids"]


def test_choices_stand_behind_a_named_picture(server):
    body = {"choices": ["yes", "no"]}
    bringing = server.http.post("/select", json={"prompt": [sent(png()), "so "], **body})
    digest = server.request.media[0].digest
    naming = server.http.post("/select", json={"prompt": [named(png()), "so "], **body})
    assert naming.status_code == 200, naming.text
    assert server.request.media[0].digest == digest
    assert naming.json()["choices"] == bringing.json()["choices"]


def test_a_hold_and_a_stream_take_names(server):
    assert ask(server, sent(png())).status_code == 200
    digest = server.request.media[0].digest
    server.engine.break_holds.set()
    for fields in ({"stream": True}, {"stream": True, "hold": True}):
        with server.http.stream("POST", "/generate", json={"prompt": [named(png()), "a"], **fields}) as response:
            assert response.status_code == 200
            response.read()
        assert server.request.media[0].digest == digest
    with server.http.stream("POST", "/generate", json={"prompt": [named(png(9))], "stream": True}) as response:
        response.read()
        check_unknown(response)  # before any event


def test_a_video_is_named_by_its_file_or_by_its_frames(server):
    video = {"video": write_base64(FRAMES), "media_type": "video/jpeg"}
    names = ",".join(map(name_of, FRAMES))
    assert ask(server, video).status_code == 200
    pixels = server.request.media[0].pixels
    assert len(pixels) == 4
    assert ask(server, {"video_sha256": names}).status_code == 200
    assert server.request.media[0].is_video and server.request.media[0].pixels.tobytes() == pixels.tobytes()
    assert ask(server, {"video_sha256": names, "num_frames": 2}).status_code == 200
    assert server.request.media[0].pixels.tobytes() == pixels[[0, 2]].tobytes()
    some = ",".join(map(name_of, FRAMES[2:]))
    assert ask(server, {"video_sha256": some}).status_code == 200
    assert server.request.media[0].pixels.tobytes() == pixels[2:].tobytes()
    assert "1 of 3" in check_unknown(ask(server, {"video_sha256": f"{some},{name_of(png(9))}"}))
    film = saved(
        Image.new("RGB", (32, 48)), "GIF", save_all=True, append_images=[Image.new("RGB", (32, 48), "red")] * 3
    )
    whole = {"video": base64_of(film), "media_type": "image/gif", "num_frames": 4}
    answers = [ask(server, part) for part in (whole, {"video_sha256": name_of(film), "num_frames": 4})]
    first, second = server.engine.requests[-2:]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert first.media[0].is_video and first.media[0].digest == second.media[0].digest


def test_what_was_never_sent_is_unknown(server):
    assert "prompt[1].image_sha256" in check_unknown(ask(server, named(png())))
    message = check_unknown(ask(server, "a", {"branches": [["b"], ["c", named(png())]]}))
    assert "prompt[2].branches[1][1].image_sha256" in message
    picture = {"text": "<image>", "image_data": base64_of(png())}
    assert server.http.post("/generate", json=picture).status_code == 200
    check_unknown(ask(server, named(png())))  # only parts are kept: nothing else can be named


def test_nobody_finds_or_learns_what_another_has_sent(model_dir):
    server = ScriptedServer(model_dir, model_dir=model_dir, api_key=("key-a", "key-b"), admin_api_key="key-z")
    assert ask(server, sent(png()), headers=KEY_A).status_code == 200
    assert ask(server, named(png()), headers=KEY_A).status_code == 200
    never_sent = check_unknown(ask(server, named(png(5)), headers=KEY_B))
    assert check_unknown(ask(server, named(png()), headers=KEY_B)) == never_sent
    check_unknown(ask(server, named(png()), headers={"x-api-key": "key-z"}))
    for salt in ({"cache_salt": "s"}, {"extra_key": "s"}):
        check_unknown(ask(server, named(png()), headers=KEY_A, **salt))
        assert ask(server, sent(png()), headers=KEY_A, **salt).status_code == 200
        assert ask(server, named(png()), headers=KEY_A, **salt).status_code == 200
    choices = {"prompt": [named(png()), "a"], "choices": ["b", "c"]}
    assert server.http.post("/select", json=choices, headers=KEY_A).status_code == 200
    check_unknown(server.http.post("/select", json=choices, headers=KEY_B))
    check_unknown(server.http.post("/select", json=choices | {"cache_salt": "t"}, headers=KEY_A))


def test_what_is_named_counts_towards_the_limits_of_a_request(model_dir):
    first, second = png(1), png(2)
    server = ScriptedServer(model_dir, model_dir=model_dir, max_media_bytes=len(first) + len(second) - 1)
    for file in (first, second):
        assert ask(server, sent(file)).status_code == 200
    for parts in ((named(first), named(second)), (sent(first), sent(second))):
        response = ask(server, *parts)
        assert response.status_code == 400
        assert f"{len(first) + len(second) - 1} bytes" in response.json()["error"]["message"]
    one_picture = ScriptedServer(model_dir, model_dir=model_dir, max_images_per_request=1)
    for file in (first, second):
        assert ask(one_picture, sent(file)).status_code == 200
    assert ask(one_picture, named(first), named(second)).status_code == 400


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"image_sha256": "a" * 63}, "prompt[1].image_sha256"),
        ({"image_sha256": "A" * 64}, "prompt[1].image_sha256"),
        ({"image_sha256": "a" * 64 + "\n"}, "prompt[1].image_sha256"),
        ({"image_sha256": "a" * 64 + "," + "b" * 64}, "prompt[1].image_sha256"),
        ({"video_sha256": "a" * 64 + ","}, "prompt[1].video_sha256"),
        ({"video_sha256": ",".join(["a" * 64] * 4097)}, "prompt[1].video_sha256"),
        ({"image_sha256": "a" * 64, "media_type": "image/png"}, "media_type only beside image or video"),
        ({"image_sha256": "a" * 64, "num_frames": 2}, "num_frames only beside video or video_sha256"),
        ({"image_sha256": "a" * 64, "image": base64_of(png())}, "exactly one of"),
    ],
)
def test_a_name_that_is_none_is_refused(server, part, said):
    response = ask(server, part)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]


def test_a_model_that_sees_nothing_keeps_nothing(tokenizer_dir):
    server = ScriptedServer(tokenizer_dir)
    for part in (sent(png()), named(png()), {"video_sha256": name_of(png())}):
        response = ask(server, part)
        assert response.status_code == 400 and "cannot see" in response.json()["error"]["message"]
    assert server.http.get("/get_chat_template").json()["keeps_files"] is False


def test_a_server_says_that_it_takes_names(server):
    assert server.http.get("/get_chat_template").json()["keeps_files"] is True


def test_what_was_not_used_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(kept_files, "KEPT_BYTES", 3 * (100 + ENTRY_BYTES))
    kept = KeptFiles()
    a, b, c, d = (bytes([number]) * 100 for number in range(4))
    for file in (a, b, c, a):
        kept.put("", file)
    digest = {file: hashlib.sha256(file).digest() for file in (a, b, c, d)}
    assert kept.get("", digest[b]) == b
    kept.put("another", d)  # one bound for all
    assert [kept.get("", digest[file]) for file in (a, b, c, d)] == [a, b, None, None]
    assert kept.get("another", digest[d]) == d
    kept.put("", bytes(3 * (100 + ENTRY_BYTES)))  # too large alone: drops nothing
    assert [kept.get("", digest[file]) for file in (a, b)] == [a, b]


def test_files_without_size_are_bounded_too(monkeypatch):
    monkeypatch.setattr(kept_files, "KEPT_BYTES", 10 * ENTRY_BYTES)
    kept = KeptFiles()
    for number in range(30):
        kept.put(str(number), b"")
    empty = hashlib.sha256(b"").digest()
    assert sum(kept.get(str(number), empty) is not None for number in range(30)) == 10
