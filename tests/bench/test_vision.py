"""The parts of `bench.vision` on a model so small that only what they do counts, not how long it takes."""

import pathlib

import pytest

from bench.report import Report
from bench.shapes import CLIP_SMALL, LLAMA_SMALL, llava, llava_next_video, write_model
from bench.vision import APART, NO_RADIX, SHARED, Workload, measure_encoder, measure_questions
from jsg.models.config import read_spec

TEXT = LLAMA_SMALL | {"num_hidden_layers": 1}
TOWER = CLIP_SMALL | {"num_hidden_layers": 1}
PATCHES = 16


@pytest.fixture
def report() -> Report:
    return Report("bench.vision", [], None)


def test_images_are_in_the_middle_of_prompts_and_the_same_for_each_question(tmp_path: pathlib.Path):
    model = read_spec(write_model(tmp_path, llava(TEXT, TOWER)))
    requests = Workload(num_images=2, num_questions=3, before_len=4, question_len=5).requests(model)
    assert [request.media[0].digest for request in requests[:2]] * 3 == [each.media[0].digest for each in requests]
    assert len({request.media[0].digest for request in requests}) == 2
    assert len({request.input_ids[-5:] for request in requests}) == 6
    for request in requests:
        assert [index for index, token in enumerate(request.input_ids) if token == 1023] == list(range(4, 4 + PATCHES))


@pytest.mark.usefixtures("late")
def test_what_is_shared_is_neither_encoded_nor_computed_again(report: Report, tmp_path: pathlib.Path):
    directory = write_model(tmp_path, llava(TEXT, TOWER))
    workload = Workload(num_images=2, num_questions=3, before_len=4, question_len=8, output_len=2)
    measure_questions(report, directory, rounds=1, workload=workload, max_running_requests=1, chunked_prefill_size=64)
    figures = {figure.name: figure for figure in report.figures}
    shared, no_radix, apart = (figures[f"6 questions, {name}"] for name in (SHARED, NO_RADIX, APART))
    prompt = 4 + PATCHES + 8
    # The text before the images is computed once, each image once, each question by itself.
    assert shared.facts["cached_share"] == pytest.approx(1 - (4 + 2 * PATCHES + 6 * 8) / (6 * prompt))
    assert no_radix.facts["cached_share"] == apart.facts["cached_share"] == 0
    assert [each.facts["encoded_tiles"] for each in (shared, no_radix, apart)] == [2, 2, 6]
    assert no_radix.facts["same_answers"] == apart.facts["same_answers"] == 1
    (ratio,) = figures[f"throughput, {SHARED} / {NO_RADIX}"].samples
    assert ratio == pytest.approx(no_radix.samples[0] / shared.samples[0])


def test_the_encoder_takes_tiles_and_frames(report: Report, tmp_path: pathlib.Path):
    directory = write_model(tmp_path, llava_next_video(TEXT, TOWER))
    measure_encoder(report, directory, rounds=2, per_round=1, at_once=(2,))
    images, frames = report.figures
    assert images.name == "encoder, images, 2 at a time" and frames.name == "encoder, frames, 2 at a time"
    assert len(images.samples) == 2
    assert images.facts["images_per_s"] == pytest.approx(2000 / min(images.samples))
    assert (images.facts["tokens_each"], frames.facts["tokens_each"]) == (PATCHES, PATCHES // 4)
