"""Several videos and pictures of one prompt: each is where its client put it, however it was sent."""

from pathlib import Path

import pytest

from jsg.processing.media.base64_files import write_base64
from tests.server.films import frames_of, write_two_films
from tests.server.scripted import ScriptedServer
from tests.server.vision_model import VISION_TEMPLATE, base64_of, data_url, png, write_vision_model

FRAME_TOKENS = 4  # of a frame, which has 5 × 5 patches that are pooled by twos
NUM_FRAMES = 3
IN_ORDER = (  # writes parts as they come; most published templates write pictures first
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def films() -> tuple[bytes, bytes]:
    return write_two_films()


def make_server(directory: Path, template: str) -> ScriptedServer:
    model_dir = write_vision_model(directory, "llava_next_video", chat_template=template)
    return ScriptedServer(model_dir, model_dir=model_dir)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ScriptedServer:
    return make_server(tmp_path_factory.mktemp("video") / "model", IN_ORDER)


def shown(server: ScriptedServer, path: str, body: dict) -> list[bytes]:
    """What the model is shown for this request, in the order of its prompt."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    media = server.request.media
    assert [item.start for item in media] == sorted(item.start for item in media)
    assert all(len(item.rows) == FRAME_TOKENS * NUM_FRAMES for item in media if item.is_video)
    return [item.digest for item in media]


def alone(server: ScriptedServer, **fields: object) -> bytes:
    (digest,) = shown(server, "/generate", {"text": "a", **fields})
    return digest


def of_films(server: ScriptedServer, films: tuple[bytes, bytes]) -> list[bytes]:
    """What each is by itself."""
    return [alone(server, video_data=base64_of(film), num_frames=NUM_FRAMES) for film in films]


def part(data: bytes) -> dict:
    return {"video": base64_of(data), "media_type": "video/mp4", "num_frames": NUM_FRAMES}


def video_url(data: bytes) -> dict:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), "num_frames": NUM_FRAMES}}


PICTURE = {"type": "image_url", "image_url": {"url": data_url(png())}}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_two_videos_stand_in_their_order(server, films, order):
    expected = of_films(server, films)
    given = [films[index] for index in order]
    data = [base64_of(film) for film in given]
    chat = {"messages": [{"role": "user", "content": [*map(video_url, given), {"type": "text", "text": "what?"}]}]}
    for path, body in (
        ("/generate", {"text": "a<video>b<video>", "video_data": data, "num_frames": NUM_FRAMES}),
        ("/generate", {"text": "at the front", "video_data": data, "num_frames": NUM_FRAMES}),
        ("/v1/completions", {"prompt": "a<video>b<video>", "video_data": data, "num_frames": NUM_FRAMES}),
        ("/generate", {"prompt": ["a", part(given[0]), "b", part(given[1])]}),
        ("/v1/chat/completions", chat),
    ):
        assert shown(server, path, body) == [expected[index] for index in order], body.keys()


def test_a_video_may_come_as_its_frames_beside_one_that_is_a_file(server, films):
    first, second = of_films(server, films)
    frames = write_base64(frames_of(films[0]))
    body = {"text": "<video><video>", "video_data": [base64_of(films[1]), frames], "num_frames": NUM_FRAMES}
    assert shown(server, "/generate", body) == [second, first]


@pytest.mark.parametrize(
    ("text", "order"),
    [("<video>a<image>b<video>c", "vpw"), ("<image>a<video>b<video>", "pvw"), ("<video><video>a<image>", "vwp")],
)
def test_pictures_between_videos(server, films, text, order):
    first, second = of_films(server, films)
    known = {"v": first, "w": second, "p": alone(server, image_data=base64_of(png()))}
    expected = [known[letter] for letter in order]
    data = [base64_of(film) for film in films]
    body = {"text": text, "image_data": base64_of(png()), "video_data": data, "num_frames": NUM_FRAMES}
    assert shown(server, "/generate", body) == expected
    as_part = {"v": part(films[0]), "w": part(films[1]), "p": {"image": base64_of(png()), "media_type": "image/png"}}
    assert shown(server, "/generate", {"prompt": [as_part[letter] for letter in order]}) == expected
    as_content = {"v": video_url(films[0]), "w": video_url(films[1]), "p": PICTURE}
    content = [as_content[letter] for letter in order]
    chat = {"messages": [{"role": "user", "content": content}]}
    assert shown(server, "/v1/chat/completions", chat) == expected


def test_a_template_may_write_pictures_first(films, tmp_path):
    server = make_server(tmp_path, VISION_TEMPLATE)
    first, second = of_films(server, films)
    picture = alone(server, image_data=base64_of(png()))
    chat = {"messages": [{"role": "user", "content": [video_url(films[1]), PICTURE, video_url(films[0])]}]}
    assert shown(server, "/v1/chat/completions", chat) == [picture, second, first]
