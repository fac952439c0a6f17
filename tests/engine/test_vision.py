"""Images and videos through the engine: answers are those of Hugging Face, however prompts are cut and shared."""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from jsg.config import EngineConfig
from jsg.engine.child import wire
from jsg.engine.child.protocol import ToEngine
from jsg.engine.core import EngineCore
from jsg.engine.device.memory import IMAGES_KEPT, vision_shape
from jsg.errors import ConfigError, RequestError
from jsg.media import MediaInput
from jsg.models.config import read_spec
from jsg.processing.media.key import image_key, key_words
from jsg.types import FinishType, Request, SamplingParams
from tests.engine import small
from tests.golden.vision_golden import VisionGolden
from tests.golden.vision_variants import ITEMS

VARIANT = "llava_next_video"  # its prompt has a video and an image, with newlines
CHUNK = 64  # the prompt takes two: the first ends inside of the image
NUM_TILES = 6  # frames and tiles of that prompt


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp(VARIANT)


@pytest.fixture(scope="module")
def golden(directory: pathlib.Path) -> VisionGolden:
    return VisionGolden(VARIANT, directory)


@pytest.fixture(scope="module")
def engine(golden: VisionGolden, directory: pathlib.Path, compile_cache_dir: str) -> Iterator[EngineCore]:
    core = small.make_core(
        directory,
        compile_cache_dir,
        load_format="auto",
        context_length=256,
        max_running_requests=4,
        max_total_tokens=300,
        chunked_prefill_size=CHUNK,
    )
    yield core
    core.close()


@pytest.fixture
def core(engine: EngineCore) -> EngineCore:
    assert engine.flush_cache()
    engine._overlaps = True
    return engine


def items_of(golden: VisionGolden, *, size: tuple[int, int] | None = None) -> tuple[MediaInput, ...]:
    """The video and the image of the recorded prompt; `size` makes other words and another digest of the same bytes."""
    media, where = [], 0
    tokens = np.array(golden.tokens)
    for item, rows, pixels in zip(ITEMS[VARIANT], golden.layouts, golden.pixels, strict=True):
        is_video = isinstance(item, int)
        placeholder = golden.vision.video_token_id if is_video else golden.vision.image_token_id
        where = int(np.flatnonzero(tokens == placeholder)[0])
        digest = image_key(pixels, mode="video" if is_video else "image", size=size or pixels.shape[2:])
        words = key_words(digest, len(rows), golden.config.vocab_size)
        media.append(MediaInput(where, words, rows, pixels, digest, is_video))
    return tuple(media)


def question(golden: VisionGolden, rid: str, *, ending: tuple[int, ...] = (), **fields: object) -> Request:
    """The recorded prompt, and more behind it; with the recorded number of new tokens, greedily."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=len(golden.arrays["greedy"]))
    made = Request(rid=rid, input_ids=(*golden.tokens, *ending), sampling=sampling, media=items_of(golden))
    return dataclasses.replace(made, **fields)


def encoder(core: EngineCore) -> tuple[int, int]:
    """Calls of the encoder, and tiles that it encoded."""
    stats = core.stats()
    return int(stats["num_encoder_calls"]), int(stats["num_encoded_tiles"])


def since(core: EngineCore, before: tuple[int, int]) -> tuple[int, int]:
    now = encoder(core)
    return now[0] - before[0], now[1] - before[1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_answer_is_that_of_hugging_face_although_a_chunk_ends_inside_the_image(
    core: EngineCore, golden: VisionGolden, overlaps: bool
):
    core._overlaps = overlaps
    image = items_of(golden)[1]
    assert image.start < CHUNK < image.end
    before = encoder(core)
    answer = small.run(core, [(0, question(golden, "r"))])["r"]
    assert answer.token_ids == golden.arrays["greedy"].tolist() and answer.cached_tokens == 0
    assert since(core, before)[1] == NUM_TILES


def test_a_second_question_about_the_same_image_computes_its_text_only(core: EngineCore, golden: VisionGolden):
    first = small.run(core, [(0, question(golden, "a"))])["a"]
    before = encoder(core)
    more = small.run(core, [(0, question(golden, "b", ending=(3, 4, 5)))])["b"]
    assert more.cached_tokens == len(golden.tokens) > items_of(golden)[1].end
    assert since(core, before) == (0, 0)
    again = small.run(core, [(0, question(golden, "c"))])["c"]
    assert again.token_ids == first.token_ids
    assert since(core, before) == (0, 0)


def test_equal_bytes_of_another_shape_share_nothing(core: EngineCore, golden: VisionGolden):
    small.run(core, [(0, question(golden, "a"))])
    before = encoder(core)
    other = question(golden, "b", media=items_of(golden, size=(1, 1)))
    answer = small.run(core, [(0, other)])["b"]
    assert answer.cached_tokens == other.media[0].start, "the text before the first item is all they have in common"
    assert since(core, before)[1] == NUM_TILES
    assert answer.token_ids == golden.arrays["greedy"].tolist()


def test_requests_of_one_moment_are_encoded_together_and_once(core: EngineCore, golden: VisionGolden):
    """In other namespaces nothing is shared, but the frames of two requests, two each, are one call of the encoder."""
    video, _ = items_of(golden)
    half = dataclasses.replace(video, words=video.words[:8], rows=video.rows[:8], pixels=video.pixels[:2])
    short = question(golden, "0", input_ids=(*golden.tokens[: half.end], 3), media=(half,))
    requests = [dataclasses.replace(short, rid=str(i), namespace=str(i % 2)) for i in range(3)]
    before = encoder(core)
    answers = small.run(core, [(0, each) for each in requests])
    assert since(core, before) == (1, 4)
    alone = small.run(core, [(0, dataclasses.replace(short, rid="alone", namespace="alone"))])["alone"]
    assert since(core, before) == (3, 6), "two tiles are not padded to four"
    assert all(answer.token_ids == alone.token_ids for answer in answers.values())


def test_retracted_requests_answer_the_same(core: EngineCore, golden: VisionGolden):
    """The KV pool holds two of the prompts and a half, each for itself."""
    before = core.scheduler.totals.num_retracts
    requests = [question(golden, f"r{i}", namespace=f"{i}") for i in range(4)]
    sampling = dataclasses.replace(requests[0].sampling, max_new_tokens=60)
    answers = small.run(core, [(0, dataclasses.replace(each, sampling=sampling)) for each in requests])
    greedy = golden.arrays["greedy"].tolist()
    assert all(answer.token_ids[: len(greedy)] == greedy for answer in answers.values())
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1
    assert core.scheduler.totals.num_retracts > before


def test_images_give_way_to_others_while_steps_overlap(core: EngineCore, golden: VisionGolden):
    """The pool holds those of six: rows are written anew while the step that reads them may still run."""
    before = core.stats()["num_evicted_images"]
    requests = [question(golden, f"r{i}", namespace=f"{i}") for i in range(9)]
    answers = small.run(core, [(i, each) for i, each in enumerate(requests)])
    assert {tuple(answer.token_ids) for answer in answers.values()} == {tuple(golden.arrays["greedy"].tolist())}
    assert core.stats()["num_evicted_images"] > before


def test_images_that_are_not_finite_end_their_own_request_only(core: EngineCore, golden: VisionGolden):
    video, image = items_of(golden)
    broken = dataclasses.replace(image, pixels=np.full_like(image.pixels, np.nan), digest=b"x" * 32)
    words = key_words(broken.digest, len(broken.rows), golden.config.vocab_size)
    broken = dataclasses.replace(broken, words=words)
    answers = small.run(
        core, [(0, question(golden, "bad", media=(video, broken))), (0, question(golden, "good", namespace="x"))]
    )
    finish = answers["bad"].finish
    assert finish is not None and finish.type is FinishType.ERROR and "finite" in str(finish.message)
    assert answers["good"].token_ids == golden.arrays["greedy"].tolist()
    after = small.run(core, [(0, question(golden, "after"))])["after"]
    assert after.token_ids == golden.arrays["greedy"].tolist()


def test_what_images_take_of_the_pool_is_told_and_flushed(core: EngineCore, golden: VisionGolden):
    assert core.stats()["vision_bytes"] == 0
    small.run(core, [(0, question(golden, "r"))])
    rows = 3 * golden.vision.patches_per_frame + 3 * golden.vision.patches_per_tile
    assert core.stats()["vision_bytes"] == rows * golden.config.hidden_size * 4 and core.flush_cache()
    assert core.stats()["vision_bytes"] == 0


def test_the_encoder_writes_into_the_pool_where_it_lies(core: EngineCore):
    vision, executables = core._runner.replica.state.vision, core._executables
    assert vision is not None
    names = [name for name in core._runner.programs.encoders if executables.is_ready(name)]
    assert {is_video for _, _, is_video in names} == {False, True}
    for name in names:
        analysis = executables.compiled(name).memory_analysis()
        assert analysis is not None and analysis.alias_size_in_bytes == vision.nbytes


def test_an_image_that_cannot_be_run_is_refused_and_nothing_is_kept_of_it(core: EngineCore, golden: VisionGolden):
    video, image = items_of(golden)
    large = dataclasses.replace(image, pixels=np.zeros((100, *image.pixels.shape[1:]), np.float32))
    with pytest.raises(RequestError, match=r"at most 24 tiles or frames, but got 100; .* --vision-cache-size"):
        core.add(question(golden, "r", media=(video, large)))
    assert not core.has_work


def test_the_pool_holds_some_images_of_the_largest_size_or_what_was_asked_for(golden: VisionGolden, small_model):
    config, row_bytes = golden.config, 256
    tile = golden.vision.patches_per_tile
    made = [
        vision_shape(EngineConfig(vision_cache_size=size), config, platform=platform, row_bytes=row_bytes)
        for size, platform in ((None, "cpu"), (None, "gpu"), (1, "gpu"))
    ]
    assert [shape.num_rows if shape else None for shape in made] == [2 + IMAGES_KEPT * 3 * tile, 2**22 + 2, 2**12]
    with pytest.raises(ConfigError, match=f"must hold a tile, {tile} rows"):
        vision_shape(EngineConfig(vision_cache_size=1), config, platform="cpu", row_bytes=2**20)
    text = read_spec(small_model)
    assert vision_shape(EngineConfig(), text, platform="cpu", row_bytes=row_bytes) is None
    with pytest.raises(ConfigError, match="needs a model that takes images"):
        vision_shape(EngineConfig(vision_cache_size=1), text, platform="cpu", row_bytes=row_bytes)


def test_pixels_go_over_the_wire_once_and_as_they_are(golden: VisionGolden):
    requests = tuple(question(golden, f"r{i}") for i in range(3))
    requests = tuple(dataclasses.replace(each, media=requests[0].media) for each in requests)
    frames = wire.MessageEncoder().encode(ToEngine(requests=requests))
    pixels = sum(item.pixels.nbytes for item in requests[0].media)
    assert pixels < sum(map(len, frames)) < 1.2 * pixels
    arrived = wire.MessageDecoder().decode([memoryview(bytes(frame)) for frame in frames])
    for sent, got in zip(requests, [each.make() for each in arrived.requests], strict=True):
        assert dataclasses.replace(got, media=()) == dataclasses.replace(sent, media=())
        for mine, theirs in zip(sent.media, got.media, strict=True):
            for name in ("words", "rows", "pixels"):
                ours, other = getattr(mine, name), getattr(theirs, name)
                assert ours.dtype == other.dtype and np.array_equal(ours, other)
            assert (mine.start, mine.digest, mine.is_video) == (theirs.start, theirs.digest, theirs.is_video)
    text = wire.MessageEncoder().encode(ToEngine(requests=(dataclasses.replace(requests[0], media=()),)))
    assert len(text) == 2, "the ids of a prompt are a frame too"
