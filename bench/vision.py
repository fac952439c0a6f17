"""Measures questions about images, and the vision encoder, on one core of this CPU: `python -m bench.vision`.

Everything is float32, weights are random, and times are processor time of the whole process. The text model has 100
million parameters, and the vision tower is that of CLIP ViT-B/16. Parts:

    questions   several questions about each of several images, all sent at once; three ways of sharing take turns
    encoder     the tower alone: tiles of images, and frames of videos, several at a time

Pixels are ready when the clock starts, because the front decodes and cuts images.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.clock import Timed, alternate, pin_to_one_core, timed
from bench.loop import greedy, make_engine, random_prompt
from bench.report import Report
from bench.shapes import CLIP_B, LLAMA_100M, llava, llava_next_video, write_model
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import COMPILER_OPTIONS, use_compilation_cache
from jsg.media import MediaInput
from jsg.models.clip import VisionTower
from jsg.models.config import read_spec
from jsg.models.image_layout import image_layout
from jsg.models.llava import Llava
from jsg.models.loading import load_model
from jsg.models.spec import ModelSpec
from jsg.models.vision_config import VisionConfig
from jsg.processing.media.key import image_key, key_words
from jsg.prompt_ids import PromptIds
from jsg.types import Request

PARTS = ("questions", "encoder")
TARGET_SPEED_UP = ">= 3"
AT_ONCE = (1, 2, 4, 8)
"""The numbers of tiles or frames that the encoder takes at once."""
SHARED, NO_RADIX, APART = "all shared", "radix cache off", "nothing shared"
COUNTED = ("num_steps", "num_encoder_calls", "num_encoded_tiles")
FEATURE_BYTES = 4  # features are float32


class Workload(NamedTuple):
    """A number of questions about each image. A prompt has the image first and the question last."""

    num_images: int = 4
    num_questions: int = 6
    before_len: int = 4
    question_len: int = 16
    output_len: int = 4

    def requests(self, model: ModelSpec) -> list[Request]:
        """The same requests each time: a question about every image, then the next question about every image."""
        vision = vision_of(model)
        items = [_image(model, seed, start=self.before_len) for seed in range(self.num_images)]
        before = random_prompt(-1, self.before_len, vision.image_token_id)
        requests = []
        for index in range(self.num_images * self.num_questions):
            item = items[index % self.num_images]
            question = random_prompt(index, self.question_len, vision.image_token_id)
            tokens = before + (vision.image_token_id,) * len(item.rows) + question
            sampling = greedy(self.output_len)
            requests.append(Request(rid=str(index), input_ids=PromptIds.of(tokens), sampling=sampling, media=(item,)))
        return requests


def _image(model: ModelSpec, seed: int, *, start: int) -> MediaInput:
    """An image of one tile with random pixels, which depend only on the seed."""
    vision = vision_of(model)
    size = (vision.image_size, vision.image_size)
    pixels = np.random.default_rng(seed).standard_normal((1, 3, *size), np.float32)
    rows, digest = image_layout(vision, size), image_key(pixels, mode="image", size=size)
    return MediaInput(start, key_words(digest, len(rows), model.vocab_size), rows, pixels, digest)


class Run(NamedTuple):
    """One pass over all requests: its time, what was shared, and the answers by request."""

    cpu_s: float
    cached_share: float
    num_steps: int
    num_encoder_calls: int
    num_encoded_tiles: int
    answers: dict[str, tuple[int, ...]]


def vision_of(model: ModelSpec) -> VisionConfig:
    """The vision half of a vision model."""
    assert model.vision is not None, "only a model that sees can be asked about images"
    return model.vision


def measure_questions(
    report: Report, directory: Path, *, rounds: int, workload: Workload | None = None, **knobs: Any
) -> None:
    """Measures three ways of sharing in turns. Each run begins with empty caches. Both engines have the same `knobs`.

    Without the radix cache, the keys and values of an image are computed for each question, but its features are found
    in the engine's store. With a namespace for each request, requests share nothing, so images are encoded again too.
    """
    workload = workload or Workload()
    model = read_spec(directory)
    requests = workload.requests(model)
    apart = [dataclasses.replace(request, namespace=request.rid) for request in requests]
    context_len = len(requests[0].input_ids) + workload.output_len
    feature_bytes = workload.num_images * vision_of(model).patches_per_tile * model.hidden_size * FEATURE_BYTES
    knobs = {
        "context_length": context_len,
        "max_total_tokens": len(requests) * context_len,
        "vision_cache_size": feature_bytes // 2**20 + 1,  # MiB: the features of all images
    } | knobs
    engine = make_engine(directory, **knobs)
    without_radix = make_engine(directory, disable_radix_cache=True, **knobs)
    arms = {SHARED: (engine, requests), NO_RADIX: (without_radix, requests), APART: (engine, apart)}
    for core, each in arms.values():
        run_all(core, each[: workload.num_images])
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (core, each) in arms.items():
            runs[name].append(run_all(core, each))
    engine.close()
    without_radix.close()
    _report_questions(report, runs, workload)


def _report_questions(report: Report, runs: dict[str, list[Run]], workload: Workload) -> None:
    num_requests = workload.num_images * workload.num_questions
    expected = runs[SHARED][-1].answers
    for name, passes in runs.items():
        cpu_s, last = [run.cpu_s for run in passes], passes[-1]
        report.add(
            f"{num_requests} questions, {name}",
            "s cpu",
            cpu_s,
            requests_per_s=num_requests / min(cpu_s),
            cached_share=last.cached_share,
            steps=last.num_steps,
            encoder_calls=last.num_encoder_calls,
            encoded_tiles=last.num_encoded_tiles,
            same_answers=sum(last.answers[rid] == expected[rid] for rid in expected) / num_requests,
        )

    def compare(fast: str, slow: str, **facts: Any) -> None:
        ratios = [a.cpu_s / b.cpu_s for a, b in zip(runs[slow], runs[fast], strict=True)]
        report.add(f"throughput, {fast} / {slow}", "x", ratios, **facts)

    compare(SHARED, NO_RADIX, target=TARGET_SPEED_UP, **workload._asdict())
    compare(SHARED, APART)
    compare(NO_RADIX, APART)


def run_all(core: EngineCore, requests: Sequence[Request]) -> Run:
    """Sends all requests at once to an engine with empty caches, and steps until the last request has ended."""
    assert core.flush_cache(), "requests of an earlier run are left"
    answers: dict[str, tuple[int, ...]] = {request.rid: () for request in requests}
    before, cpu, cached, total = core.stats(), time.process_time(), 0, 0
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            answers[output.rid] += output.token_ids
            if output.finish is not None:
                cached, total = cached + output.cached_tokens, total + output.prompt_tokens
    cpu_s, after = time.process_time() - cpu, core.stats()
    counted = {name: int(after[name] - before[name]) for name in COUNTED}
    return Run(cpu_s=cpu_s, cached_share=cached / total, answers=answers, **counted)


def measure_encoder(
    report: Report, directory: Path, *, rounds: int, per_round: int = 2, at_once: Sequence[int] = AT_ONCE
) -> None:
    """Measures the tower and projector of a video model. Pixels come from the host, as in the engine."""
    model = read_spec(directory)
    vision = vision_of(model)
    tower = cast(Llava, load_model(None, model, load_format="dummy", dtype=jnp.float32)).vision
    tokens = {"image": vision.patches_per_tile, "frame": vision.patches_per_frame}
    work = {f"encoder, {unit}s, {count} at a time": (unit, count) for unit in tokens for count in at_once}
    sides: dict[str, Timed] = {}
    for name, (unit, count) in work.items():
        shape = (count, 3, vision.image_size, vision.image_size)
        pixels = np.random.default_rng(0).standard_normal(shape, np.float32)
        sides[name] = timed(_encoder(tower, pixels, is_video=unit == "frame"))
    samples = alternate(sides, rounds=rounds, per_round=per_round, warm_up=1)
    for name, (unit, count) in work.items():
        cpu_ms = [sample.cpu_ms for sample in samples[name]]
        report.add(
            name,
            "ms cpu",
            cpu_ms,
            **{f"{unit}s_per_s": count / min(cpu_ms) * 1e3},
            min_wall_ms=min(sample.wall_ms for sample in samples[name]),
            tokens_each=tokens[unit],
        )


def _encoder(tower: VisionTower, pixels: np.ndarray, *, is_video: bool) -> Callable[[], jax.Array]:
    """A function that encodes the same pixels at each call, and waits for the result."""
    graph, leaves = nnx.split(tower)

    def encode(leaves: nnx.State, pixels: jax.Array) -> jax.Array:
        tower = nnx.merge(graph, leaves)
        return tower.encode_frames(pixels) if is_video else tower.encode(pixels)

    options = COMPILER_OPTIONS.get(jax.default_backend())
    compiled = jax.jit(encode).lower(leaves, pixels).compile(dict(options) if options else None)
    return lambda: jax.block_until_ready(compiled(leaves, pixels))


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    core = pin_to_one_core()
    use_compilation_cache(None)
    with tempfile.TemporaryDirectory() as folder:
        report = Report(
            "bench.vision",
            arguments,
            options.output,
            model="100M with the tower of CLIP ViT-B/16: random weights, float32",
            pinned_to_core=core,
            platform=jax.default_backend(),
        )
        if "questions" in options.only:
            directory = write_model(Path(folder, "llava"), llava(LLAMA_100M, CLIP_B))
            workload = Workload(options.images, options.questions, output_len=options.output_len)
            measure_questions(report, directory, rounds=options.rounds, workload=workload)
        if "encoder" in options.only:
            directory = write_model(Path(folder, "video"), llava_next_video(LLAMA_100M, CLIP_B))
            measure_encoder(report, directory, rounds=options.rounds)
        report.close()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    defaults = Workload()
    parser = argparse.ArgumentParser(
        prog="python -m bench.vision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="the parts to run; default: both")
    parser.add_argument("--rounds", type=int, default=3, help="how many times each way is timed")
    parser.add_argument("--images", type=int, default=defaults.num_images, help="number of images")
    parser.add_argument(
        "--questions", type=int, default=defaults.num_questions, help="number of questions about each image"
    )
    parser.add_argument("--output-len", type=int, default=defaults.output_len, help="tokens of each answer")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
