"""Pictures and videos of compiled programs: constants and arguments, run here and sent whole."""

import asyncio
import base64
import json
from typing import Any

import pytest

import jsg as sgl
from jsg.errors import GraphError, RequestError
from jsg.lang.executor.arguments import arguments_from_json, arguments_to_json
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.executor.limits import ProgramLimits, check_limits
from jsg.lang.words.ir import Video
from tests.lang.graph_programs import PNG, backend, post
from tests.lang.scripted import ScriptedBackend
from tests.lang.test_remote_graph import GraphServer

MP4 = b"\0\0\0\x18ftypmp42"
FRAMES = (PNG, PNG + b"2", PNG + b"33")


@sgl.function
def program(s, clip, question):
    s += sgl.user("Watch " + sgl.video(clip, 4) + question)
    s += sgl.assistant(sgl.gen("answer"))
    forks = s.fork(2)
    forks += lambda i: sgl.user(f"{i}: " + sgl.video(MP4, 2)) + sgl.assistant(sgl.gen("again"))
    forks.join()


def videos(where: ScriptedBackend) -> list[tuple[Video, ...]]:
    """The videos in the prompt of each call of the model, by prompt."""
    calls = sorted((call for call in where.calls if call.kind == "generate"), key=lambda call: call.prompt)
    return [tuple(item for item in call.items if isinstance(item, Video)) for call in calls]


@pytest.fixture(params=["bytes", "path", "data URL", "video", "frames", "list of paths"])
def clip(request: pytest.FixtureRequest, tmp_path) -> Any:
    """A video in every form in which a program may be given one."""
    paths = [tmp_path / f"{i}" for i in range(3)]
    for path, frame in zip(paths, FRAMES, strict=True):
        path.write_bytes(frame)
    file = tmp_path / "clip"
    file.write_bytes(MP4)
    return {
        "bytes": MP4,
        "path": file,
        "data URL": f"data:video/mp4;base64,{base64.b64encode(MP4).decode()}",
        "video": sgl.video(list(FRAMES), 9),
        "frames": list(FRAMES),
        "list of paths": [str(path) for path in paths],
    }[request.param]


def test_a_video_is_the_same_interpreted_compiled_and_sent(clip: Any):
    plain = backend()
    source = list(clip.data) if isinstance(clip, Video) else clip
    interpreted = program.run(source, "What is it?", backend=plain, temperature=0)
    here, there = backend(), GraphServer()
    compiled = program.compile()
    run = compiled.run(clip, "What is it?", backend=here, temperature=0)
    sent = compiled.run(clip, "What is it?", backend=there, temperature=0)
    assert [state.error() for state in (interpreted, run, sent)] == [None] * 3
    assert len(there.bodies) == 1
    (shown,), *_ = videos(plain)
    assert (shown.data, shown.num_frames) in ((MP4, 4), (FRAMES, 4))
    assert videos(plain) == videos(here) == videos(there) == [(shown,), *((shown, Video(MP4, 2, "video/mp4")),) * 2]
    for state in (run, sent):
        assert state.messages() == interpreted.messages()
        assert (state["answer"], state["again"]) == (interpreted["answer"], interpreted["again"])
        assert state.text() == interpreted.text()


def test_a_graph_with_a_video_is_the_same_when_it_was_json():
    @sgl.function
    def constant(s, question):
        s += sgl.video(list(FRAMES), 2) + sgl.video(MP4, 3) + question + sgl.gen("answer")

    compiled = constant.compile()
    again = CompiledFunction.from_json(compiled.to_json())
    assert again.graph == compiled.graph
    assert f"video, {sum(map(len, FRAMES))} bytes" in str(again)
    where = backend()
    again.run("why", backend=where).sync()
    assert videos(where) == [(Video(FRAMES, 2, "video/jpeg"), Video(MP4, 3, "video/mp4"))]


def test_a_batch_of_videos():
    where = backend()
    clips = [MP4, list(FRAMES), sgl.video(MP4 + b"3", 1)]
    states = program.compile().run_batch([{"clip": clip, "question": "?"} for clip in clips], backend=where)
    assert [state.error() for state in states] == [None] * 3
    assert [f"<video {size}/4>" in state.text() for state, size in zip(states, (12, 51, 13), strict=True)] == [True] * 3


def test_what_is_no_video_is_refused_at_the_call():
    compiled = program.compile()
    for wrong, message in (
        (PNG, "video knows"),
        ([], "at least one frame"),
        ([PNG, MP4], "PNG, JPEG"),
        (7, "takes a path, bytes or a data: URL"),
        ("https://example.com/a.mp4", "fetch it first"),
    ):
        with pytest.raises(RequestError, match=message):
            compiled.run(wrong, "?", backend=backend())


@pytest.mark.parametrize("data", [MP4, FRAMES])
def test_a_video_that_was_posted_is_read_and_counted(data: Any):
    graph = program.trace()
    given = {"clip": Video(data, 1, "video/mp4"), "question": "?"}
    arguments = arguments_from_json(graph, json.loads(json.dumps(arguments_to_json(given))))
    assert arguments == given
    where = backend()
    _, result = asyncio.run(post(graph, where, arguments, limits=ProgramLimits()))
    assert result["errors"] == []
    assert {video.num_frames for video in sum(videos(where), ()) if video.data == data} >= {4}
    num_bytes = len(data) if isinstance(data, bytes) else sum(map(len, data))
    with pytest.raises(GraphError, match="text_chars up to"):
        check_limits(graph, arguments, ProgramLimits(text_chars=num_bytes))


def test_a_posted_video_says_what_is_wrong_with_it():
    graph = program.trace()
    good = {"video": base64.b64encode(MP4).decode(), "media_type": "video/mp4"}
    for wrong, message in (
        ({"image": good["video"], "media_type": "image/png"}, "an object with the field video"),
        (good | {"video": "not base64"}, "base64"),
        (good | {"num_frames": "four"}, "num_frames"),
        (good | {"frames": []}, "frames"),
    ):
        with pytest.raises(GraphError, match=message):
            arguments_from_json(graph, {"clip": wrong, "question": "?"})
