"""What `jsg convert` writes: the same model, divided for devices and readable by orbax, or nothing at all."""

import collections
import concurrent.futures
import errno
import json
import os
import shutil
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from bench.load import write_safetensors
from bench.shapes import LLAMA_SMALL
from jsg.conversion import convert as converting
from jsg.conversion import orbax_writer
from jsg.conversion.convert import convert
from jsg.errors import ConfigError, ModelError
from jsg.models import orbax_checkpoint
from jsg.models.checkpoint import open_checkpoint
from jsg.models.config import read_spec
from jsg.models.loading import abstract_model, checkpoint_shapes, load_model
from tests.golden.variants import VARIANTS, random_tensor, random_tensors, tensor_shapes, write_checkpoint
from tests.golden.vision_variants import vision_tensors, write_vision_checkpoint
from tests.models import packers
from tests.own_process import said
from tests.test_imports import run_python

FAMILIES = ("llama_gqa_head_dim", "llama_tied", "mistral_window", "mixtral_three_of_five", "qwen2", "qwen3_biases")
VISION = ("llava", "llava_next_video")  # names of transformers 4, and of both
ONE_LAYER = VARIANTS["llama_mha"] | {"num_hidden_layers": 1}
"""For tests of files and signals, whose time is that of writing tensors."""
FAST = ("mixtral_three_of_five", "llava_next_video")


def write(directory: Path, variant: str) -> Path:
    directory.mkdir()
    if variant in VISION:
        write_vision_checkpoint(directory, variant, vision_tensors(variant, 0))
    elif variant == "one layer":
        shapes = tensor_shapes(ONE_LAYER)
        save_file({name: random_tensor(name, name, shapes[name]) for name in shapes}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(ONE_LAYER))
    else:
        write_checkpoint(directory, variant, random_tensors(variant, 0))
    return directory


def leaves(directory: Path, **options) -> list[np.ndarray]:
    model = load_model(directory, read_spec(directory), **options)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def assert_same(one: Path, other: Path, **options) -> None:
    for first, second in zip(leaves(one, **options), leaves(other, **options), strict=True):
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)


def assert_same_tensors(one: Path, other: Path, kind: str = "auto") -> None:
    """The same checkpoint, without the model; `kind` says which one of the other directory."""
    with open_checkpoint(one) as first, open_checkpoint(other, kind=kind) as second:
        names = {name for name, _, _ in first.stored()}
        assert names == {name for name, _, _ in second.stored()}
        for name in names:
            numbers = first.read(name)
            assert numbers.dtype == second.read(name).dtype
            np.testing.assert_array_equal(numbers, second.read(name))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several chunks, and tensors of several files."""
    monkeypatch.setattr(orbax_writer, "PIECE_BYTES", 1024)
    monkeypatch.setattr(orbax_writer, "FILE_BYTES", 4096)


@pytest.mark.parametrize(
    "variant", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES + VISION]
)
@pytest.mark.usefixtures("small_chunks")
def test_every_family_is_the_same_model(tmp_path, variant):
    source = write(tmp_path / "source", variant)
    convert(source, tmp_path / "made", tp_size=2)
    assert_same(source, tmp_path / "made")


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_kernels_in_8_bits_are_the_same(tmp_path):
    source = write(tmp_path / "source", "llama_gqa_head_dim")
    convert(source, tmp_path / "made")
    assert_same(source, tmp_path / "made", quantization="int8")


def test_a_device_reads_whole_files_where_it_is_chunked_for_them(tmp_path):
    source = write(tmp_path / "source", "llama_gqa_head_dim")
    convert(source, tmp_path / "made", tp_size=2)
    shapes = {name: tensor.shape for name, tensor in load_file(source / "model.safetensors").items()}
    for name, axis in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        tensor = f"model.layers.0.{name}.weight"
        metadata = json.loads((tmp_path / "made/orbax" / tensor / "zarr.json").read_bytes())
        expected = list(shapes[tensor])
        expected[axis] //= 2
        assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == expected


@pytest.mark.parametrize(
    ("vocab_size", "tp_size"),
    [(32003, 1), *(pytest.param(2 * 16001, tp_size, marks=pytest.mark.slow) for tp_size in (1, 2))],
)
def test_a_vocabulary_that_nothing_divides(tmp_path, monkeypatch, vocab_size, tp_size):
    """Files of about 64 pieces; loaded on one device and on two, by orbax too, and converted once more."""
    monkeypatch.setattr(orbax_writer, "PIECE_BYTES", 252 * 64)
    monkeypatch.setattr(orbax_writer, "FILE_BYTES", 64 * 256 * 64)
    monkeypatch.setattr(orbax_checkpoint, "MAX_CHUNK_BYTES", 64 * 256)
    source = tmp_path / "source"
    source.mkdir()
    config = VARIANTS["llama_tied"] | {"vocab_size": vocab_size, "hidden_size": 32, "head_dim": 16}
    (source / "config.json").write_text(json.dumps(config))
    shapes = checkpoint_shapes(abstract_model(read_spec(source), np.float32))
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors")

    convert(source, tmp_path / "made", tp_size=tp_size)
    table = tmp_path / "made/orbax/model.embed_tokens.weight"
    files = [path.stat().st_size for path in table.glob("c/*/*")]
    assert len(files) == 2 and max(files) < 64 * 257 * 64
    assert sum(files) < 1.02 * vocab_size * 64
    assert_same(source, tmp_path / "made")
    restored = restore(tmp_path / "made/orbax", tensors)
    np.testing.assert_array_equal(restored["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    convert(tmp_path / "made", tmp_path / "again", tp_size=2 if vocab_size % 2 == 0 else 1)
    assert_same(source, tmp_path / "again")
    if vocab_size % 2 == 0:
        told = [{"directory": str(tmp_path / "made"), "count": 2, "options": {}}]
        [result] = said("tests.models.shared_out", told=told)
        assert result["differing"] == [] and result["numbers_read"] == result["numbers_held"]


def test_rows_that_could_not_be_read_again_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    source = write(tmp_path / "source", "one layer")
    monkeypatch.setattr(orbax_checkpoint, "MAX_CHUNK_BYTES", 100)
    monkeypatch.setattr(orbax_writer, "PIECE_BYTES", 100)
    monkeypatch.setattr(orbax_writer, "write", lambda *_: pytest.fail("it is written"))
    with pytest.raises(ModelError, match="weight must be cut into chunks of at most"):
        convert(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


def restore(checkpoint: Path, tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """By orbax's own API, on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=here) for name, each in tensors.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(checkpoint, shapes)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_types_stay_and_orbax_reads_them(tmp_path, stored):
    """By its own API, names and numbers as in the file, also where one device is fewer than it was chunked for."""
    source = write(tmp_path / "source", "llama_tied")
    tensors = {name: tensor.astype(stored) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "made", tp_size=2)
    restored = restore(tmp_path / "made/orbax", tensors)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert restored[name].dtype == stored
        np.testing.assert_array_equal(restored[name], tensor)


@pytest.mark.slow
def test_orbax_shares_it_out_as_it_was_chunked(tmp_path):
    """Without being told how, on as many devices."""
    convert(write(tmp_path / "source", "one layer"), tmp_path / "made", tp_size=2)
    specs = said("tests.models.restored", str(tmp_path / "made/orbax"))
    assert specs["model.layers.0.self_attn.q_proj.weight"] == ["tensor", None]
    assert specs["model.layers.0.mlp.down_proj.weight"] == [None, "tensor"]
    assert specs["model.norm.weight"] == [None]


def test_a_model_directory_comes_with_its_other_files(tmp_path):
    source = write(tmp_path / "source", "one layer")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer.model", "LICENSE"):
        (source / name).write_text("{}")
    for name in ("modeling.py", "pytorch_model.bin", "README.md"):
        (source / name).write_text("")
    convert(source, tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        *("orbax", "orbax.json", "config.json", "tokenizer.json", "generation_config.json"),
        *("chat_template.jinja", "tokenizer.model", "LICENSE"),
    }


def test_what_was_converted_converts_again(tmp_path):
    source = write(tmp_path / "source", "one layer")
    convert(source, tmp_path / "one", tp_size=1)
    convert(tmp_path / "one", tmp_path / "four", tp_size=4)
    assert_same_tensors(source, tmp_path / "four")


def test_tensors_that_no_model_needs_are_left_out(tmp_path):
    source = write(tmp_path / "source", "llama_tied")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, source / "model.safetensors")
    num_bytes = convert(source, tmp_path / "made")
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    with open_checkpoint(tmp_path / "made") as checkpoint:
        assert {stored for _, stored, _ in checkpoint.stored()} == tensors.keys()


def test_progress_ends_with_all_bytes(tmp_path):
    seen = []
    total = convert(
        write(tmp_path / "source", "one layer"), tmp_path / "made", progress=lambda *both: seen.append(both)
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total) and len(seen) > 10


def interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def fail(done: int, total: int) -> None:
    raise OSError(errno.ENOSPC, "full", "/secret/path")


def exhaust(done: int, total: int) -> None:
    raise ValueError('RESOURCE_EXHAUSTED: Error writing "/secret/path" [OS error 28: ENOSPC No space left on device]')


@pytest.mark.parametrize(
    ("progress", "error", "message"),
    [
        (interrupt, KeyboardInterrupt, None),
        (fail, ModelError, r"DST must be writable, .*\(ENOSPC\)"),
        (exhaust, ModelError, r"DST must be writable, .*\(RESOURCE_EXHAUSTED: no space\)"),
    ],
)
def test_nothing_is_left_of_what_failed(tmp_path, progress, error, message):
    source = write(tmp_path / "source", "one layer")
    with pytest.raises(error, match=message) as caught:
        convert(source, tmp_path / "made", progress=progress)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


class Ended(BaseException):
    """The exception of a test's signal handler."""


def end(number: int, frame: object) -> None:
    raise Ended(number)


SIGNALS = [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    *(pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP)),
]


@pytest.fixture(params=SIGNALS)
def ending(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that raises `Ended` wherever it arrives."""
    before = signal.signal(request.param, end)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize("moment", ["first", "middle", "last"])
def test_a_signal_waits_for_the_chunk_under_way(tmp_path, monkeypatch, ending, moment):
    """While tensorstore's threads write it: they would make its folder anew after it was removed."""
    source = write(tmp_path / "source", "one layer")
    chunks = []

    async def count(store: Any, slices: tuple[slice, ...], numbers: np.ndarray) -> None:
        chunks.append(numbers.nbytes)
        await store[slices].write(numbers)

    monkeypatch.setattr(orbax_writer, "_put", count)
    convert(source, tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    wanted = {"first": 1, "middle": len(chunks) // 2, "last": len(chunks)}[moment]
    chunks.clear()
    under_way = []

    async def put(store: Any, slices: tuple[slice, ...], numbers: np.ndarray) -> None:
        chunks.append(numbers.nbytes)
        future = store[slices].write(numbers)
        if len(chunks) == wanted:
            under_way.append(future)
            signal.raise_signal(ending)
        await future

    monkeypatch.setattr(orbax_writer, "_put", put)
    with pytest.raises(Ended) as ended:
        convert(source, tmp_path / "made")
    assert ended.value.args == (ending,)
    assert len(chunks) == wanted and under_way[0].done()
    assert list(tmp_path.iterdir()) == [source]
    assert signal.getsignal(ending) is end


@pytest.mark.parametrize("during", ["copyfile", "rmtree"])
def test_a_signal_waits_for_files_too(tmp_path, monkeypatch, ending, during):
    """While other files are copied, and once more while what was written is removed."""
    source = write(tmp_path / "source", "one layer")
    copy, remove = shutil.copyfileobj, shutil.rmtree

    def signalled(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **options: Any) -> Any:
            signal.raise_signal(ending)
            return call(*arguments, **options)

        return do

    monkeypatch.setattr(converting.shutil, "copyfileobj", signalled(copy))
    if during == "rmtree":
        monkeypatch.setattr(converting.shutil, "rmtree", signalled(remove))
    with pytest.raises(Ended):
        convert(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


def test_a_signal_that_is_ignored_ends_nothing(tmp_path):
    """As under `nohup`."""
    source = write(tmp_path / "source", "one layer")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        convert(source, tmp_path / "made", progress=lambda done, total: signal.raise_signal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert_same_tensors(source, tmp_path / "made")


def test_a_signal_that_somebody_handles_leaves_no_checkpoint(tmp_path):
    """Its handler returns, so whoever asked for the checkpoint must still hear that there is none."""
    source, came = write(tmp_path / "source", "one layer"), []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "made", progress=lambda done, total: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert list(tmp_path.iterdir()) == [source]


def test_another_thread_converts_too(tmp_path):
    source = write(tmp_path / "source", "one layer")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(convert, source, tmp_path / "made").result()
    assert_same_tensors(source, tmp_path / "made")


def test_a_full_disk_is_seen_before_it_is_written(tmp_path, monkeypatch):
    source = write(tmp_path / "source", "one layer")
    usage = collections.namedtuple("usage", "total used free")(1, 1, 1000)
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"DST must have 0\.0 GB free"):
        convert(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("destination", "tp_size", "error", "message"),
    [
        ("source", 1, ConfigError, "DST must not exist yet"),
        ("none/made", 1, ConfigError, "the directory that DST is made in must exist"),
        ("made", 0, ConfigError, "--tp-size must be at least 1, but got 0"),
        ("made", 3, ModelError, "--tp-size must divide num_attention_heads"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, destination, tp_size, error, message):
    source = write(tmp_path / "source", "one layer")
    with pytest.raises(error, match=message) as caught:
        convert(source, tmp_path / destination, tp_size=tp_size)
    assert str(tmp_path) not in str(caught.value) and list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("kind", [PermissionError(13, "no", "/secret"), OSError(errno.ENAMETOOLONG, "no", "/secret")])
def test_a_destination_that_cannot_be_looked_at_is_refused(tmp_path, monkeypatch, kind):
    source = write(tmp_path / "source", "one layer")

    def refused(path: Path, **options: bool) -> bool:
        raise kind

    monkeypatch.setattr(Path, "exists", refused)  # who runs tests may be allowed to see everything
    with pytest.raises(ConfigError, match=r"DST must be a path that can be made, .*\((EACCES|ENAMETOOLONG)\)") as error:
        convert(source, tmp_path / "made")
    assert "secret" not in str(error.value) and str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("length", [250, 256])
def test_a_name_that_is_too_long_is_refused(tmp_path, length):
    source = write(tmp_path / "source", "one layer")
    with pytest.raises((ConfigError, ModelError), match=r"^DST must be .*\(ENAMETOOLONG\); check its name") as error:
        convert(source, tmp_path / ("x" * length))
    assert str(tmp_path) not in str(error.value) and list(tmp_path.iterdir()) == [source]


def test_weights_are_not_written_into_those_of_another_model(tmp_path):
    source = write(tmp_path / "source", "one layer")
    with pytest.raises(ConfigError, match="DST must not be 'orbax' inside a model directory"):
        convert(source, source / "orbax")
    convert(source, tmp_path / "orbax")


def test_a_file_of_the_source_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    source = write(tmp_path / "source", "one layer")
    (source / "LICENSE").write_text("free")
    opened = Path.open

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == source / "LICENSE":
            raise PermissionError(13, "no", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ModelError, match=r"^SRC: LICENSE must be readable \(EACCES\); check its permissions$"):
        convert(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


def test_who_is_second_hears_that_it_exists(tmp_path):
    """Both began when there was none."""
    source = write(tmp_path / "source", "one layer")

    def race(done: int, total: int) -> None:
        if done == total and not (tmp_path / "made").exists():
            convert(source, tmp_path / "made", tp_size=2)

    with pytest.raises(ConfigError, match="DST must not exist yet, but there is 'made'"):
        convert(source, tmp_path / "made", progress=race)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "made"}
    assert_same_tensors(source, tmp_path / "made")


def test_others_may_read_it_as_the_umask_has_it(tmp_path):
    source = write(tmp_path / "source", "one layer")
    before = os.umask(0o027)
    try:
        convert(source, tmp_path / "made")
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o750


def test_which_of_two_checkpoints_is_converted_is_said(tmp_path):
    source = write(tmp_path / "source", "one layer")
    convert(source, tmp_path / "both")
    tensors = {name: tensor + 1 for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    with pytest.raises(ModelError, match="say which with --load-format"):
        convert(tmp_path / "both", tmp_path / "made")
    convert(tmp_path / "both", tmp_path / "made", load_format="orbax")
    assert_same_tensors(source, tmp_path / "made")
    convert(tmp_path / "both", tmp_path / "other", load_format="safetensors")
    assert_same_tensors(tmp_path / "other", tmp_path / "both", "safetensors")


def test_tensors_of_zeros_are_written_too(tmp_path):
    """Zarr leaves out what equals its fill value, and a chunk that is missing is refused."""
    source = write(tmp_path / "source", "llama_biases")
    tensors = load_file(source / "model.safetensors")
    zeros = {name: np.zeros_like(each) for name, each in tensors.items() if "bias" in name or "up_proj" in name}
    save_file(tensors | zeros, source / "model.safetensors")
    convert(source, tmp_path / "made", tp_size=2)
    assert_same_tensors(source, tmp_path / "made")


def test_a_source_that_does_not_fit_is_refused_by_the_tensor_name(tmp_path):
    source = write(tmp_path / "source", "one layer")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"must hold model\.norm\.weight"):
        convert(source, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.slow
def test_few_files_are_in_memory_at_a_time(tmp_path):
    """Of a model of 0.5 GiB whose vocabulary nothing divides; each of its two large tensors makes five files."""
    shape = LLAMA_SMALL | {"vocab_size": 65537, "hidden_size": 1024, "num_hidden_layers": 1}
    write_safetensors(tmp_path / "source", shape)
    code = """
        from pathlib import Path
        import jax
        from bench.load import AnonymousPeak
        from jsg.conversion.convert import convert, use_host
        use_host()
        jax.block_until_ready(jax.numpy.zeros(3) + 1)
        with AnonymousPeak() as peak:
            convert(Path({source!r}), Path({made!r}))
        print(peak.num_bytes)
    """
    code = textwrap.dedent(code).format(source=str(tmp_path / "source"), made=str(tmp_path / "made"))
    assert int(run_python(code)) <= 3 * orbax_writer.FILE_BYTES
    files = [path.stat().st_size for path in (tmp_path / "made" / orbax_checkpoint.FOLDER).rglob("*") if path.is_file()]
    assert sum(files) > 8 * max(files)


@pytest.mark.parametrize(
    "form", ["modelopt nvfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "w4a16 zeros", "awq"))]
)
@pytest.mark.usefixtures("small_chunks")
def test_kernels_in_few_bits_stay_as_they_are(tmp_path, form):
    """The parts have the same bytes, scalars an axis more, and what is read of them is the same."""
    source, made, config = tmp_path / "source", tmp_path / "made", {**ONE_LAYER, "intermediate_size": 96}
    tensors = {name: random_tensor(name, name, shape) for name, shape in tensor_shapes(config).items()}
    packers.write_packed(source, config, packers.FORMS[form], tensors)
    convert(source, made, tp_size=2)
    with open_checkpoint(source) as first, open_checkpoint(made) as second:
        here = {name: first.read(name) for name, _, _ in first.stored()}
        there = {name: second.read(name) for name, _, _ in second.stored()}
    assert {name for name in here if not name.endswith("input_scale")} == set(there)
    for name, tensor in there.items():
        assert tensor.dtype == here[name].dtype and tensor.tobytes() == here[name].tobytes(), name
    assert_same(source, made)
