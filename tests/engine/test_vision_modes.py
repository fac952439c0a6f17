"""Images in deterministic mode, after warm-up and during it: the same answers, and nothing that compiles."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine import shapes, startup
from jsg.engine.core import EngineCore
from jsg.engine.device import memory
from jsg.engine.device.executables import Executables
from jsg.media import MediaInput
from jsg.models.image_layout import image_layout, num_tiles, video_layout
from jsg.processing.media.key import image_key, key_words
from jsg.types import FinishType, Request
from tests.engine import small
from tests.engine.small import DETERMINISTIC
from tests.engine.test_vision import VARIANT, question
from tests.golden.variants import random_numbers
from tests.golden.vision_golden import VisionGolden

RUNS = 4
SIZES = ((23, 40), (40, 23), (28, 28), 2, 3)  # heights and widths of images, numbers of frames of videos
CHUNK = 64
OPTIONS = {"load_format": "auto", "context_length": 256, "chunked_prefill_size": CHUNK}

Cores = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp(VARIANT)


@pytest.fixture(scope="module")
def golden(directory: pathlib.Path) -> VisionGolden:
    return VisionGolden(VARIANT, directory)


@pytest.fixture(scope="module")
def cores(golden: VisionGolden, directory: pathlib.Path, compile_cache_dir: str) -> Iterator[Cores]:
    """Makes an engine, or returns the one made before, its cache emptied."""

    def make(**knobs: object) -> EngineCore:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "IMAGES_KEPT", 2)
            return small.make_core(directory, compile_cache_dir, **(OPTIONS | knobs))

    with small.shared_cores(make) as get:
        yield get


@pytest.fixture(scope="module")
def items(golden: VisionGolden) -> list[MediaInput]:
    """Pictures and videos that look different; they begin at index 0."""
    made = []
    for number, size in enumerate(SIZES):
        is_video = isinstance(size, int)
        rows = video_layout(golden.vision, size) if is_video else image_layout(golden.vision, size)
        count = size if is_video else num_tiles(golden.vision, size)
        pixels = random_numbers(f"picture {number}", (count, 3, *[golden.vision.image_size] * 2)).astype(np.float32)
        digest = image_key(pixels, mode="video" if is_video else "image", size=pixels.shape[2:])
        words = key_words(digest, len(rows), golden.config.vocab_size)
        made.append(MediaInput(0, words, rows, pixels, digest, is_video))
    return made


def traffic(golden: VisionGolden, items: list[MediaInput], seed: int) -> list[tuple[int, Request]]:
    """Random requests; most have pictures, between texts of which many are the same."""
    rng = np.random.default_rng(seed)
    arrivals = []
    for when, request in small.traffic(seed):
        tokens, media = list(request.input_ids[: rng.integers(1, 12)]), []
        for number in rng.choice(len(items), size=rng.choice([0, 1, 1, 2]), replace=True):
            item = dataclasses.replace(items[number], start=len(tokens))
            placeholder = golden.vision.video_token_id if item.is_video else golden.vision.image_token_id
            tokens += [placeholder] * len(item.rows)
            tokens += request.input_ids[: rng.integers(1, 4)]
            media.append(item)
        sampling = dataclasses.replace(request.sampling, max_new_tokens=int(rng.integers(0, 50)), min_new_tokens=0)
        fields = {"input_ids": tuple(tokens), "media": tuple(media), "sampling": sampling, "logprob_start_len": -1}
        arrivals.append((when, dataclasses.replace(request, **fields)))
    return arrivals


BUSY = {
    **DETERMINISTIC,
    "speculative": "auto",
    "max_total_tokens": 240,
    "schedule_conservativeness": 0.01,
    "chunked_prefill_size": 23,
}


class TestDeterministic:
    @pytest.mark.slow
    @given(seed=st.integers(0, 2**20))
    @settings(max_examples=8)
    def test_pictures_are_bitwise_the_same_alone_and_in_much_traffic(self, cores, golden, items, seed: int):
        check_bitwise(cores(**BUSY), cores, traffic(golden, items, seed), seed)

    def test_pictures_are_bitwise_the_same_in_traffic_that_shares_evicts_and_retracts(self, cores, golden, items):
        core = cores(**BUSY, max_queued_requests=100)  # of its own: how much is admitted depends on what it has seen
        for seed in range(2):
            check_bitwise(core, cores, traffic(golden, items, seed), seed)
        stats = core.stats()
        for counter in ("num_retracts", "num_evicted_tokens", "num_found_images", "num_evicted_images"):
            assert stats[counter] > 0, counter

    def test_it_gives_the_tokens_of_hugging_face(self, cores, golden):
        answers = small.run(cores(**DETERMINISTIC), [(0, question(golden, "r"))])
        assert answers["r"].token_ids == golden.arrays["greedy"].tolist()


def check_bitwise(busy: EngineCore, cores: Cores, arrivals: list[tuple[int, Request]], seed: int) -> None:
    """Runs random traffic and compares every answer with the same request alone, to the last bit."""
    reference = cores(**DETERMINISTIC, disable_radix_cache=True)
    aborts = small.random_aborts(seed, arrivals)
    outcomes = small.run(busy, arrivals, aborts)
    for _, request in arrivals:
        outcome, expected = outcomes[request.rid], small.alone(reference, request)
        if outcome.finish is not None and outcome.finish.type is FinishType.ABORT:
            assert request.rid in aborts
            small.assert_is_prefix_of(outcome, expected)
        else:
            assert outcome.token_ids == expected.token_ids and outcome.logprobs == expected.logprobs
            assert outcome.finish == expected.finish


@pytest.mark.parametrize(
    "knobs", [pytest.param({}, marks=pytest.mark.slow), DETERMINISTIC], ids=["default", "deterministic"]
)
def test_no_trace_and_no_compile_after_warm_up(cores: Cores, golden: VisionGolden, items, knobs: dict):
    with small.few_variants():
        core = cores(**knobs, is_warm=True)
    before = core.stats()["num_encoded_tiles"]
    with small.nothing_compiled(core):
        small.run(core, traffic(golden, items, 11))
    assert core.stats()["num_encoded_tiles"] > before


@pytest.mark.slow
def test_answers_are_right_while_encoders_make_their_first_runs(
    golden: VisionGolden, directory: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: the essential programs are warm, the encoder of two tiles and others run on padding first."""
    monkeypatch.setitem(startup.RUNS_BEFORE_READY, "cpu", RUNS)
    monkeypatch.setitem(shapes.ENCODE_SIZES, "cpu", (1, 2, 4))
    few = {"max_running_requests": 1, "chunked_prefill_size": 32}
    core = small.make_core(directory, compile_cache_dir, forbid_compile=False, **(OPTIONS | few))
    executables, runner = core._executables, core._runner
    executables._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
    cold = set(executables.cold())
    assert {("encode", 2, False), ("encode", 2, True)} <= cold
    calls: list[object] = []
    call = Executables.__call__

    def spy(self: Executables, name: tuple, *args: object) -> object:
        calls.append(name)
        return call(self, name, *args)

    monkeypatch.setattr(Executables, "__call__", spy)
    answers = small.run(core, [(3 * i, question(golden, str(i), namespace=str(i))) for i in range(4)])
    assert [answer.token_ids for answer in answers.values()] == [golden.arrays["greedy"].tolist()] * 4
    assert {("encode", 2, False), ("encode", 2, True)} <= cold & set(calls), "they ran on padding beside the requests"
    assert all(map(executables.is_ready, executables.names()))
    before = np.asarray(runner.replica.state.vision)
    for name in runner.programs.encoders:
        runner._run_on_padding(name)
    assert np.array_equal(before[1:], np.asarray(runner.replica.state.vision)[1:]), "only row 0 is for padding"
    core.close()
