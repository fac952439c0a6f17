"""Images in the scheduler: what is cached, when images are encoded, and what has room in the vision pool."""

import dataclasses
import hashlib
import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jsg.errors import QueueFullError, RequestError
from jsg.media import MIN_TOKENS, MediaInput
from jsg.sched import admission, vision_store
from jsg.sched.request import Placement, new_running_request
from jsg.sched.vision_store import NUM_FIXED_ROWS, VisionShape, VisionStore
from jsg.types import FinishType, Request, SamplingParams
from tests.sched.integrity import check_vision
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_traffic import Traffic, abort_somebody, check_wild, random_request
from tests.sched.token_model import FRAME_ROWS, TILE_ROWS, VOCAB, TokenModel

PLACEHOLDER = VOCAB - 2
no_lock: Any = None
SHAPE = EngineShape(num_pages=100, context_length=100, vision_rows=4 * TILE_ROWS + NUM_FIXED_ROWS)


def image(start: int, *tiles: int, order: tuple[int, ...] | None = None, is_video: bool = False) -> MediaInput:
    """Tiles of one pixel each; its rows one after another, with a newline at the end, or in another order."""
    num_rows = FRAME_ROWS if is_video else TILE_ROWS
    rows = (*range(len(tiles) * num_rows), -1) if order is None else order
    digest = hashlib.sha256(repr((tiles, order, is_video)).encode()).digest()
    words = np.frombuffer(digest * len(rows), np.uint32)[: len(rows)] % 2**30 + VOCAB
    pixels = np.broadcast_to(np.array(tiles, np.float32)[:, None, None, None], (len(tiles), 3, 1, 1))
    return MediaInput(start, words.astype(np.int32), np.array(rows, np.int32), pixels, digest, is_video)


def request(rid: str, *parts: tuple[int, ...] | MediaInput, max_new_tokens: int = 3, **fields: object) -> Request:
    """Tokens and images one after another; an image's `start` is put right here."""
    ids: tuple[int, ...] = ()
    media: tuple[MediaInput, ...] = ()
    for part in parts:
        if isinstance(part, MediaInput):
            media += (dataclasses.replace(part, start=len(ids)),)
            ids += (PLACEHOLDER,) * len(part.rows)
        else:
            ids += part
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(rid=rid, input_ids=ids, media=media, sampling=sampling, **fields)  # pyright: ignore[reportArgumentType]


def run(engine: SimulatedEngine, *requests: Request) -> list[int]:
    """Runs them together; how many tokens of each were cached."""
    for each in requests:
        engine.add(each)
    engine.run_until_idle()
    return [engine.answers[each.rid].cached_tokens for each in requests]


def num_encoded(engine: SimulatedEngine) -> int:
    return sum(len(batch.encodings) for batch in engine.batches)


def test_questions_about_one_image_share_its_cache_and_its_encoding():
    engine = SimulatedEngine(SHAPE)
    picture = image(0, 5, 6)
    assert run(engine, request("a", (1, 2), picture, (3, 3))) == [0]
    assert num_encoded(engine) == 2
    assert run(engine, request("b", (1, 2), picture, (4, 4))) == [2 + 9]
    assert num_encoded(engine) == 2, "what is wholly cached is not encoded"
    assert run(engine, request("c", (2, 2), picture, (3, 3))) == [0]
    assert num_encoded(engine) == 2, "keys and values are of another place, but features are not"
    assert engine.scheduler.table.vision.num_found == 1
    engine.check_answers()


def test_requests_of_one_moment_share_one_encoding():
    engine = SimulatedEngine(dataclasses.replace(SHAPE, chunk=20))
    picture = image(0, 5, 6)
    run(engine, *(request(str(i), (1,), picture, (i, 3)) for i in range(4)))
    assert num_encoded(engine) == 2
    engine.check_answers()


@pytest.mark.parametrize(
    "other",
    [
        image(0, 5, 7),
        image(0, 5, 6, order=(*range(TILE_ROWS, 2 * TILE_ROWS), *range(TILE_ROWS), -1)),
        image(0, 5, 6, is_video=True),
    ],
    ids=["other pixels", "other tiling", "other mode"],
)
def test_another_image_shares_the_text_before_it_only(other: MediaInput):
    engine = SimulatedEngine(SHAPE)
    run(engine, request("a", (1, 2), image(0, 5, 6), (3, 3)))
    assert run(engine, request("b", (1, 2), other, (3, 3))) == [2]
    engine.check_answers()


def beginning_as(other: MediaInput, item: MediaInput, num_words: int) -> MediaInput:
    """The item, but its first words are those of another one."""
    return dataclasses.replace(item, words=np.concatenate([other.words[:num_words], item.words[num_words:]]))


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("num_words", range(1, MIN_TOKENS))
@pytest.mark.parametrize("num_before", [1, 2])
def test_images_whose_first_words_agree_by_chance_share_nothing(page_size: int, num_words: int, num_before: int):
    """Fewer than MIN_TOKENS words are no proof; whether the other came before, in the same step or in between."""
    one, more, chunk = image(0, 5, 6), (3, 3), 6
    text = (1, 2)[:num_before]
    other = beginning_as(one, image(0, 7, 6), num_words)
    for together in (False, True):
        engine = SimulatedEngine(dataclasses.replace(SHAPE, page_size=page_size, chunk=40 if together else chunk))
        requests = request("a", text, one, more), request("b", text, other, more)
        cached = run(engine, *requests) if together else run(engine, requests[0]) + run(engine, requests[1])
        assert cached[1] <= num_before
        engine.check_answers()
    engine = SimulatedEngine(dataclasses.replace(SHAPE, page_size=page_size, chunk=num_words + num_before))
    run(engine, request("a", text, one, more), request("b", text, other, more), request("c", text, other, (4,)))
    engine.check_answers()


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_whole_pages_that_end_behind_few_words_are_cut_back_as_often_as_needed(page_size: int):
    running = new_running_request(request("r", (1, 2, 3), image(0, 1), image(0, 2, 3), (4,)), 0, 0.0)
    starts = [item.start for item in running.request.media]
    assert starts == [3, 8]
    for num_tokens in range(19):
        count = running.trusted(num_tokens, page_size)
        assert count <= num_tokens and not count % page_size
        assert not any(start < count < start + MIN_TOKENS for start in starts)
        larger = range(count + page_size, num_tokens + 1, page_size)
        assert all(any(start < n < start + MIN_TOKENS for start in starts) for n in larger), "no more than needed"


def test_a_namespace_finds_nothing_of_another():
    engine = SimulatedEngine(SHAPE)
    run(engine, request("a", image(0, 5), (3,)))
    run(engine, request("b", image(0, 5), (3,), namespace="tenant"))
    assert num_encoded(engine) == 2 and engine.scheduler.table.vision.num_found == 0
    engine.check_answers()


def test_a_chunk_may_end_inside_an_image_and_encodes_no_more_than_it_needs():
    engine = SimulatedEngine(dataclasses.replace(SHAPE, chunk=5))
    run(engine, request("a", (1,), image(0, 1, 2, 3), (2,)))
    parts = [(batch.entries[0].num_new, len(batch.encodings)) for batch in engine.batches]
    assert parts[:3] == [(5, 1), (5, 2), (5, 0)]
    engine.check_answers()


def test_the_rest_of_an_image_that_was_evicted_is_encoded_again():
    engine = SimulatedEngine(dataclasses.replace(SHAPE, chunk=20))
    first, *others = (image(0, *range(10 * i, 10 * i + 2)) for i in range(4))
    run(engine, request("a", first, (2,)))
    run(engine, *(request(str(i), other, (2,)) for i, other in enumerate(others)))
    assert engine.scheduler.table.vision.num_evicted >= 2
    before = num_encoded(engine)
    assert run(engine, request("b", first, (3,))) == [9]
    assert num_encoded(engine) == before, "what is cached needs no features"
    engine.cache.reset()
    assert run(engine, request("c", first, (3,))) == [0]
    assert num_encoded(engine) == before + 2
    engine.check_answers()


def test_images_wait_for_room_and_later_ones_do_not_pass():
    """The pool holds one of these images at a time, and each is cut by chunks."""
    engine = SimulatedEngine(dataclasses.replace(SHAPE, chunk=6, num_pages=200, max_running=6))
    requests = [request(str(i), (1,), image(0, *range(10 * i, 10 * i + 3)), (2,), max_new_tokens=1) for i in range(6)]
    run(engine, *requests[:3])
    for each in requests[3:]:
        engine.add(each)
        engine.step()
    engine.run_until_idle()
    ends = [entry.running.request.rid for batch in engine.batches for entry in batch.entries if entry.ends_prefill]
    assert ends == sorted(ends)
    assert num_encoded(engine) == 6 * 3, "an image is encoded once, however its prompt is cut"
    engine.check_answers()


def test_the_longest_unused_image_gives_way():
    engine = SimulatedEngine(SHAPE)
    old, used, new = image(0, 1, 2), image(0, 3, 4), image(0, 5, 6)
    for number, item in enumerate((used, old, used, new)):  # behind another token each, so that all are computed
        run(engine, request(str(number), (number,), item, (2,)))
    assert engine.scheduler.table.vision.num_evicted == 1
    before = num_encoded(engine)
    run(engine, request("used", (5,), used, (2,)))
    assert num_encoded(engine) == before
    run(engine, request("old", (5,), old, (2,)))
    assert num_encoded(engine) == before + 2


def test_while_an_item_has_no_room_no_later_one_gets_any():
    store = VisionStore(SHAPE.vision, VOCAB)
    cut, blocked, small = (
        (new_running_request(request(str(i), image(0, *tiles), (2,)), i, 0.0), Placement(i + 1, no_lock, 0, 0))
        for i, tiles in enumerate(((1, 2, 3), (4, 5), (6,)))
    )
    for place in (cut, blocked, small):
        store.acquire(place[0].request)
    store.begin_round()
    assert store.reserve(*cut, 0, 5) == 5
    assert store.reserve(*blocked, 0, 9) == 0, "its two tiles are one too many"
    assert store.reserve(*small, 0, 5) == 0, "its tile would have room, but it is later"
    store.take_encodings()
    store.begin_round()
    assert store.reserve(*small, 0, 5) == 5
    store.take_encodings()
    store.begin_round()
    assert store.reserve(*cut, 5, 8) == 8
    assert store.reserve(*blocked, 0, 9) == 0, "the step that is planned reads what is there"
    store.take_encodings()
    store.begin_round()
    assert store.reserve(*blocked, 3, 0) == 0
    assert not store.take_encodings(), "where there is no memory for a token, no room is made for its features"
    assert store.reserve(*blocked, 0, 9) == 9 and len(store.take_encodings()) == 2
    check_vision(store, [place for _, place in (cut, blocked, small)])


def test_an_image_that_waits_for_room_is_not_starved_by_requests_for_one_that_is_stored():
    """The pool holds either; each request on the one that is stored would pin it before the one before it is done."""
    shape = dataclasses.replace(SHAPE, chunk=12, num_pages=400, max_running=8, policy="fcfs", has_cache=False)
    engine = SimulatedEngine(shape, TokenModel(broken_every=10**9))
    stored, rids = image(0, 1, 2), itertools.count()

    def add_one_more() -> None:
        engine.add(request(f"r{next(rids)}", (1, 2), stored, (2,), max_new_tokens=1))

    engine.add(request("shift", (1, 2, 3, 4, 5), max_new_tokens=1))  # so that chunks end inside of the image
    for _ in range(3):
        add_one_more()
    engine.step()
    engine.add(request("waits", (7,), image(0, 3, 4, 5), (2,), max_new_tokens=1))
    for _ in range(30):
        while len(engine.scheduler._requests.live) < 5:
            add_one_more()
        engine.step()
    assert engine.answers["waits"].finish is not None
    engine.run_until_idle()
    engine.check_answers()


def test_requests_whose_images_have_no_room_take_no_rows():
    """One may have been admitted before that was known; the others leave their rows to who can run."""
    engine = SimulatedEngine(dataclasses.replace(SHAPE, chunk=12, num_pages=200, max_running=6, policy="fcfs"))
    for number in range(5):
        engine.add(request(str(number), (1,), image(0, *range(10 * number, 10 * number + 3)), (2,)))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(running.place.is_prefilling for running in engine.scheduler.running if running.place))
    assert most == 1
    engine.check_answers()


def test_a_request_that_is_retracted_inside_an_image_loses_its_pin_and_finds_the_image_again():
    engine = SimulatedEngine(dataclasses.replace(SHAPE, num_pages=18, chunk=4, conservativeness=0.01, max_running=2))
    run(engine, request("a", (1, 2, 3), max_new_tokens=14), request("b", (1,), image(0, 1, 2, 3), (2,)))
    assert engine.scheduler.totals.num_retracts > 0
    assert engine.scheduler.table.vision.num_found > 0, "it was retracted elsewhere"
    assert num_encoded(engine) == 3
    engine.check_answers()


def test_a_report_shows_no_words_of_images():
    engine = SimulatedEngine(SHAPE)
    run(engine, request("a", (1,), image(0, 5), (3,)))
    run(engine, request("b", (1,), image(0, 6), (3,), return_cache_info=True), request("c", (1, 2, 3, 4)))
    report = engine.answers["b"].cache_report
    assert report is not None
    assert (report.matched_tokens, report.first_difference, report.cached_continuations) == (1, 1, ())


def test_equal_pixels_are_kept_once_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vision_store, "MAX_PIXEL_BYTES", 3 * 12)
    with pytest.raises(RequestError, match="may have 36 bytes of pixels, but got 48; send fewer or smaller"):
        VisionStore(SHAPE.vision, VOCAB).acquire(request("large", image(0, 1, 2), image(0, 3, 4), (2,)))
    engine = SimulatedEngine(SHAPE)
    vision = engine.scheduler.table.vision
    for rid in "ab":
        engine.add(request(rid, (1,), image(0, 5, 6), (2,)))
    assert vision.num_pixel_bytes == 2 * 12
    first, second = (engine.scheduler._requests.live[rid].request.media[0].pixels for rid in "ab")
    assert first is second
    with pytest.raises(QueueFullError, match="try again later"):
        engine.scheduler.add(request("c", (1,), image(0, 7), image(0, 8), (2,)))
    engine.add(request("d", (1,), image(0, 7), (2,)))
    assert vision.num_pixel_bytes == 3 * 12
    engine.abort("a")
    engine.run_until_idle()
    assert vision.num_pixel_bytes == 0
    engine.check_answers()


def test_a_hold_keeps_no_pixels():
    engine = SimulatedEngine(SHAPE)
    picture = image(0, 5, 6)
    run(engine, request("a", (1,), picture, (2,), max_new_tokens=0, hold=True))
    assert "a" in engine.scheduler.holds and engine.scheduler.table.vision.num_pixel_bytes == 0
    assert run(engine, request("b", (1,), picture, (2, 3))) == [1 + 9 + 1]
    held = engine.scheduler.holds["a"]
    assert not held.request.media, "the arrays themselves are kept"
    engine.abort("a")
    engine.run_until_idle()
    engine.check_answers()


@pytest.mark.parametrize("other", [image(0, 5), image(0, 5, 6, is_video=True)], ids=["other shape", "other mode"])
def test_features_of_another_shape_or_mode_are_not_taken_for_those_of_equal_digest(other: MediaInput):
    engine = SimulatedEngine(SHAPE)
    one = image(0, 5, 6)
    run(engine, request("a", one, (2,)), request("b", dataclasses.replace(other, digest=one.digest), (2,)))
    assert num_encoded(engine) == 2 + len(other.pixels)
    engine.check_answers()


def test_images_of_a_request_whose_logits_were_not_finite_are_encoded_anew():
    """A fault of the device that has passed must not be served from the store for ever."""
    engine = SimulatedEngine(SHAPE, TokenModel(broken_every=1))
    run(engine, request("bad", (1,), image(0, 5, 6), (2,)))
    finish = engine.answers["bad"].finish
    assert finish is not None and finish.type is FinishType.ERROR
    engine.device._model = engine.model = TokenModel(broken_every=10**9)
    run(engine, request("good", (1,), image(0, 5, 6), (2,)))
    assert num_encoded(engine) == 4
    assert len(engine.answers["good"].tokens) == 3


def random_images(rng: random.Random, plain: Request, limit: int) -> Request:
    """The request with up to three images in it, of those that others have too; of at most so many tokens."""
    parts: list[tuple[int, ...] | MediaInput] = []
    room = limit - len(plain.input_ids) - plain.sampling.max_new_tokens - 1
    ids = plain.input_ids
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        is_video = rng.random() < 0.3
        item = image(0, *range(first := rng.randrange(3), first + rng.randint(1 + is_video, 3)), is_video=is_video)
        if len(item.rows) > room:
            break
        cut = rng.randint(0, len(ids))
        parts += [ids[:cut], item]
        ids, room = ids[cut:], room - len(item.rows)
    whole = request(plain.rid, *parts, ids or (0,))
    last = max((item.end for item in whole.media), default=0)
    scored = plain.return_logprob and not last
    return dataclasses.replace(
        plain, input_ids=whole.input_ids, media=whole.media, logprob_start_len=plain.logprob_start_len if scored else -1
    )


@pytest.mark.parametrize("num_examples", [6, pytest.param(80, marks=pytest.mark.slow)])
def test_images_change_no_answer(num_examples: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "DECAY_STEPS", 5)
    happened: Counter[str] = Counter()

    @settings(max_examples=num_examples, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=st.builds(
            EngineShape,
            page_size=st.sampled_from([1, 1, 2]),
            num_pages=st.integers(44, 60),
            context_length=st.just(100),
            max_running=st.sampled_from([4, 6, 8]),
            chunk=st.integers(6, 16),
            has_decode=st.sampled_from([True, True, False]),
            overlaps=st.booleans(),
            conservativeness=st.sampled_from([0.02, 0.05]),
            draft_len=st.sampled_from([0, 4]),
            vision_rows=st.integers(3 * TILE_ROWS, 6 * TILE_ROWS).map(lambda rows: rows + NUM_FIXED_ROWS),
        ),
        traffic=st.builds(
            Traffic,
            seed=st.integers(0, 2**32),
            num_requests=st.integers(5, 30),
            burst=st.integers(1, 10),
            abort_rate=st.sampled_from([0.0, 0.1]),
        ),
    )
    def play(shape: EngineShape, traffic: Traffic) -> None:
        rng, engine = random.Random(traffic.seed), SimulatedEngine(shape)
        small = dataclasses.replace(shape, context_length=30)
        for number in range(traffic.num_requests):
            engine.add(random_images(rng, random_request(rng, f"r{number}", small), shape.num_pages))
            if not number % traffic.burst:
                abort_somebody(engine, rng, traffic.abort_rate)
                engine.step()
        engine.run_until_idle()
        engine.check_answers()
        vision = engine.scheduler.table.vision
        happened["encodings"] += num_encoded(engine)
        happened["found"] += vision.num_found
        happened["evictions"] += vision.num_evicted
        happened["retracts"] += engine.scheduler.totals.num_retracts
        happened["hits"] += sum(answer.cached_tokens > 0 for answer in engine.answers.values())
        happened["cuts"] += sum(
            item.start < entry.start + entry.num_new < item.end
            for batch in engine.batches
            for entry in batch.entries
            for item in entry.running.request.media
        )
        vision.reset()
        check_vision(vision, [])
        assert not vision.num_used_rows and not vision.num_pixel_bytes

    play()
    check_wild(happened, ("encodings", "found", "evictions", "retracts", "hits", "cuts"), 10)


# What is refused.

NEXT = VisionShape(num_rows=3 * TILE_ROWS, tile_rows=TILE_ROWS, frame_rows=FRAME_ROWS, image_size=1, has_newline=True)
PLAIN = dataclasses.replace(NEXT, frame_rows=0, has_newline=False)


@pytest.mark.parametrize(
    ("shape", "item", "message"),
    [
        (None, image(0, 1), "text only"),
        (PLAIN, image(0, 1, 2, is_video=True), "no videos"),
        (PLAIN, image(0, 1), "another model"),
        (NEXT, image(0, 1, order=(TILE_ROWS,) * 5), "another model"),
        (dataclasses.replace(NEXT, image_size=2), image(0, 1), "another model"),
        (
            NEXT,
            dataclasses.replace(image(0, 1, order=(0,) * 5), words=np.full(5, VOCAB - 1, np.int32)),
            "another model",
        ),
        (NEXT, image(0, 1, 2, 3), "at most 2 tiles or frames, but got 3; send fewer, or raise --vision-cache-size"),
    ],
)
def test_an_engine_refuses_what_it_could_never_run(shape: VisionShape | None, item: MediaInput, message: str):
    with pytest.raises(RequestError, match=message):
        VisionStore(shape, VOCAB).acquire(request("r", (1,), item))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"media": (image(4, 1),)}, "inside the prompt"),
        ({"media": (image(1, 1), image(2, 2))}, "in the order of their tokens"),
        ({"position_jumps": ((1, 1),)}, "position_jumps must be left out of a prompt with images"),
        ({"joined": (2, 3)}, "joined must be left out of a prompt with images"),
        ({"return_logprob": True, "logprob_start_len": 2}, "at least 6, behind the images and videos"),
    ],
)
def test_a_prompt_with_images_refuses_what_does_not_go_with_them(fields: dict, message: str):
    with pytest.raises(RequestError, match=message):
        Request(**{"rid": "r", "input_ids": (1,) * 8, "media": (image(1, 1),)} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"start": -1},
        {"words": np.full(5, 9, np.int64)},
        {"words": np.full(6, 9, np.int32)},
        {"words": np.full(5, -9, np.int32)},
        {"rows": np.zeros(0, np.int32)},
        {"rows": np.full(5, -2, np.int32)},
        {"rows": np.zeros(4, np.int32), "words": np.full(4, 9, np.int32)},
        {"pixels": np.zeros((1, 3, 2, 2))},
        {"pixels": np.zeros((1, 4, 2, 2), np.float32)},
        {"pixels": np.zeros((0, 3, 2, 2), np.float32)},
        {"pixels": np.zeros((1, 3, 2, 3), np.float32)},
        {"digest": b"short"},
        {"is_video": 1},
    ],
)
def test_an_item_is_what_it_says(fields: dict):
    with pytest.raises(RequestError, match="media must be"):
        dataclasses.replace(image(0, 1), **fields)
