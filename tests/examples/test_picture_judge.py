"""`examples/tiny_vision/picture_judge.py` judges essays about pictures, on a scripted model and on the embedded one."""

import io
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import jsg
from tests.examples import oracle
from tests.examples.conftest import EXAMPLES
from tests.lang.scripted import ScriptedBackend

FOLDER = EXAMPLES / "tiny_vision"


@pytest.fixture(scope="module")
def seeing_engine(compile_cache_dir: str) -> Iterator[jsg.Engine]:
    options = {"max_running_requests": 4, "chunked_prefill_size": 64, "max_total_tokens": 4096}
    with jsg.Engine("tiny-vision", compilation_cache_dir=compile_cache_dir, **options) as engine:
        yield engine


@pytest.fixture
def judge() -> Iterator[ModuleType]:
    """The example as a module, on a scripted model."""
    sys.path.insert(0, str(FOLDER))
    jsg.set_default_backend(ScriptedBackend(oracle.answer, oracle.choose))
    try:
        yield __import__("picture_judge")
    finally:
        jsg.set_default_backend(None)
        sys.path.remove(str(FOLDER))
        for name in ("picture_judge", "scenes"):
            sys.modules.pop(name, None)


@pytest.fixture
def seeing(judge: ModuleType, seeing_engine: jsg.Engine) -> jsg.Engine:
    """The engine, with an empty cache, that the example runs on then."""
    assert seeing_engine.flush_cache()
    jsg.set_default_backend(seeing_engine)
    return seeing_engine


def png(judge: ModuleType, *shapes: tuple[str, str, int]) -> bytes:
    """A picture of these: color, kind, cell."""
    scenes = judge.scenes
    shown = [scenes.Shape(color, kind, cell, shade=scenes.COLORS[color]) for color, kind, cell in shapes]
    file = io.BytesIO()
    scenes.draw(scenes.Scene(tuple(shown)), side=180).save(file, "PNG")
    return file.getvalue()


def num_encoded(engine: jsg.Engine) -> int:
    return engine.get_server_info()["num_encoded_tiles"]


def check_grades(judge: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    judge.main()
    lines = capsys.readouterr().out.splitlines()
    summary = '{"color": "blue", "shape": "star", "place": "top right"}'
    right, other_color, all_wrong = judge.ESSAYS
    assert lines[::2] == [f"{right} -> A {summary}", f"{other_color} -> B {summary}", f"{all_wrong} -> D {summary}"]
    assert lines[3].strip().startswith("Essay: red. Picture: blue. Essay: a star. Picture: a star. ")


def test_each_essay_gets_its_grade(judge, capsys):
    check_grades(judge, capsys)


@pytest.mark.slow
def test_each_essay_gets_its_grade_and_the_picture_is_encoded_once(judge, seeing, capsys):
    before = num_encoded(seeing)
    check_grades(judge, capsys)
    assert num_encoded(seeing) == before + 1, "one picture, however many questions and essays"


@pytest.mark.slow
@pytest.mark.usefixtures("seeing")
def test_branches_share_the_picture(judge):
    state = judge.judge.run(png(judge, ("red", "circle", 4)), "I see a red circle in the center.")
    assert state.ret_value[0] == "A"
    cached = state.get_meta_info("summary")["cached_tokens"]
    num_patches = 36
    assert cached > num_patches


@pytest.mark.slow
def test_a_picture_of_several_things_ends_it_early(judge, seeing):
    before = num_encoded(seeing)
    several = png(judge, ("blue", "star", 2), ("green", "circle", 6))
    state = judge.judge.run(several, judge.ESSAYS[0])
    assert state["count"] == "Two." and state.ret_value == ("F", None)
    assert "compared" not in state and "summary" not in state
    one = png(judge, ("blue", "star", 2))
    assert judge.judge.run(one, judge.ESSAYS[0]).ret_value[0] == "A"
    assert num_encoded(seeing) == before + 2, "as many as there were pictures"


@pytest.mark.parametrize(
    ("answer", "agrees"),
    [
        ("Essay: red. Picture: red.", True),
        ("Essay: red. Picture: blue.", False),
        ("Essay: red.", False),
        ("Red.", False),
        ("", False),
    ],
)
def test_an_answer_of_another_form_agrees_with_nothing(judge, answer, agrees):
    assert judge.agrees(answer) is agrees
