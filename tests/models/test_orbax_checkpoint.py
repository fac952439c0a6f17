"""An orbax checkpoint that is not as it was written is refused before it is served, by the name of what is wrong."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jsg.conversion import orbax_writer
from jsg.conversion.convert import convert
from jsg.conversion.orbax_writer import Layout, grid
from jsg.errors import ModelError
from jsg.models.checkpoint import open_checkpoint
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.models.orbax_checkpoint import FOLDER, MANIFEST, OrbaxTensor, files_of, manifest_text, open_tensors
from tests.golden.variants import random_tensors, write_checkpoint
from tests.test_imports import run_python

CHUNK = "model.layers.1.mlp.up_proj.weight/c/1/0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a checkpoint for two devices."""
    directory = tmp_path_factory.mktemp("orbax")
    write_checkpoint(directory, "llama_tied", random_tensors("llama_tied", 0))
    convert(directory, directory / "made", tp_size=2)
    return directory / "made"


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "made"))


def load(directory: Path, **options) -> None:
    load_model(directory, read_spec(directory), **options)


def read_all(directory: Path) -> None:
    """Reads all tensors as a load does, without a model."""
    with open_checkpoint(directory) as checkpoint:
        for name, _, _ in checkpoint.stored():
            checkpoint.read(name)


def test_any_spelling_of_a_path_is_read_and_written(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tensorstore takes no dots in a path, and a link must not be cut out of one."""
    (made.parent / "deep" / "er").mkdir(parents=True)
    (made.parent / "link").symlink_to("deep/er")
    monkeypatch.chdir(made.parent / "deep")
    for path in ("er/../../made", "../link/../../made"):
        load(Path(path))
        convert(Path(path), Path(path).parent / "again")
        load(made.parent / "again")
        shutil.rmtree(made.parent / "again")


def sign(directory: Path, **files: bytes) -> None:
    """Writes metadata and a manifest that has its digest, as somebody would who means it."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    for name, content in files.items():
        (directory / FOLDER / name).write_bytes(content)
        manifest["files"][name] = len(content)
        if name in manifest["digests"]:
            manifest["digests"][name] = orbax_writer.hashlib.sha256(content).hexdigest()
    (directory / MANIFEST).write_text(manifest_text(manifest["files"], manifest["digests"]))


def test_any_changed_byte_of_any_file_is_found(made):
    rng = random.Random(0)
    paths = [MANIFEST, *(f"{FOLDER}/{path}" for path in files_of(made / FOLDER))]
    assert len(paths) > 50
    for path in paths:
        content = (made / path).read_bytes()
        for position in {0, len(content) - 1, rng.randrange(max(1, len(content)))} if content else ():
            changed = bytearray(content)
            changed[position] ^= 1 << rng.randrange(8)
            (made / path).write_bytes(changed)
            named = path.removeprefix(f"{FOLDER}/").split("/")[0]
            with pytest.raises(ModelError, match=named.replace(".", r"\.")) as error:
                read_all(made)
            assert str(made) not in str(error.value)
        (made / path).write_bytes(content)
    read_all(made)


def test_a_changed_byte_of_a_chunk_is_found_when_it_is_loaded(made):
    content = bytearray((made / FOLDER / CHUNK).read_bytes())
    content[len(content) // 2] ^= 1
    (made / FOLDER / CHUNK).write_bytes(content)
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight must be as jsg convert wrote it"):
        load(made)


def test_any_file_that_is_cut_off_or_missing_is_found_before_a_tensor_is_read(made):
    for path in files_of(made / FOLDER):
        file = made / FOLDER / path
        content = file.read_bytes()
        if content:
            file.write_bytes(content[:-1])
            with pytest.raises(ModelError, match=f"{path} must have {len(content)} bytes, but has {len(content) - 1}"):
                open_tensors(made)
        file.unlink()
        with pytest.raises(ModelError, match=f"must have the file {FOLDER}/{path}, but it is missing"):
            open_tensors(made)
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.extra.weight/c/0", "notes.txt"])
def test_a_superfluous_file_is_refused(made, name):
    path = made / FOLDER / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=f"holds {FOLDER}/{name}, which jsg convert did not write"):
        load(made)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 128, "head_dim": 16}, r"must have the shape \[512, 128\] by config.json, but has \[512, 64\]"),
        ({"num_hidden_layers": 3}, r"must hold model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"holds 'model\.layers\.1\..*which this architecture does not have"),
        ({"tie_word_embeddings": False}, r"must hold lm_head\.weight"),
    ],
)
def test_another_config_is_refused_by_the_tensor_name(made, change, named):
    config = json.loads((made / "config.json").read_text()) | change
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named):
        load(made)


def test_what_cannot_be_read_is_said_without_its_path(made, monkeypatch):
    name = "model.norm.weight"
    link = made / FOLDER / name / "link"
    link.symlink_to("/nowhere/secret")
    with pytest.raises(
        ModelError, match=rf"{FOLDER}/{name}/link must be a readable file \(FileNotFoundError\)"
    ) as error:
        load(made)
    assert "secret" not in str(error.value) and str(made) not in str(error.value)
    link.unlink()

    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patched:  # who runs tests may be allowed to read everything
        patched.setattr(Path, "read_bytes", refused)
        with pytest.raises(
            ModelError, match=rf"{name}/zarr\.json must be a readable file \(PermissionError\)"
        ) as error:
            load(made)
    assert str(made) not in str(error.value)


def test_a_chunk_that_may_not_be_read_is_not_called_damaged():
    class Refused:
        shape, dtype = (4,), SimpleNamespace(name="float32")
        chunk_layout = SimpleNamespace(read_chunk=SimpleNamespace(shape=(4,)))

        def __getitem__(self, slices: object) -> "Refused":
            return self

        def read(self, order: str) -> "Refused":
            return self

        def result(self) -> None:
            raise ValueError('PERMISSION_DENIED: Error opening "/secret/c/0" [OS error 13: EACCES Permission denied]')

    with pytest.raises(ModelError, match=r"^w must be readable, but a chunk is not; check its permissions$"):
        OrbaxTensor("w", Refused(), False).read((slice(None),))


def test_other_codecs_are_refused(made):
    """Chunks without a checksum, or any that are packed, even where the manifest is right."""
    name = "model.norm.weight/zarr.json"
    metadata = json.loads((made / FOLDER / name).read_bytes())
    inner = metadata["codecs"][0]["configuration"]
    inner["codecs"] = [codec for codec in inner["codecs"] if codec["name"] != "crc32c"]
    sign(made, **{name: json.dumps(metadata).encode()})
    with pytest.raises(ModelError, match=r"model\.norm\.weight must have the chunks and checksums"):
        load(made)


def test_integers_are_refused(made):
    name = "model.norm.weight/zarr.json"
    metadata = json.loads((made / FOLDER / name).read_bytes())
    sign(made, **{name: json.dumps(metadata | {"data_type": "int32", "fill_value": 0}).encode()})
    with pytest.raises(ModelError, match=r"model\.norm\.weight must be one of F32, F16, BF16, but is I32"):
        load(made)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": "jsg-orbax-9"}'])
def test_a_manifest_of_another_kind_is_refused(made, content):
    (made / MANIFEST).write_bytes(content)
    with pytest.raises(ModelError, match=MANIFEST):
        load(made)


def test_a_checkpoint_of_somebody_else_is_refused(made):
    (made / MANIFEST).unlink()
    with pytest.raises(ModelError, match=r"must have orbax\.json beside it, which jsg convert writes"):
        load(made)


def test_which_checkpoint_is_said_where_there_are_two(made):
    write_checkpoint(made, "llama_tied", random_tensors("llama_tied", 0))
    with pytest.raises(ModelError, match="say which with --load-format"):
        load(made)
    load(made, load_format="orbax")
    load(made, load_format="safetensors")
    shutil.rmtree(made / FOLDER)
    (made / MANIFEST).unlink()
    load(made)
    with pytest.raises(ModelError, match=r"must have orbax\.json, but"):
        load(made, load_format="orbax")


def test_loading_imports_no_orbax_and_safetensors_no_tensorstore(made, tmp_path):
    """Orbax takes a quarter of a second to import, and what reads a checkpoint is smaller without it."""
    write_checkpoint(tmp_path, "llama_tied", random_tensors("llama_tied", 0))
    code = (
        "import pathlib, sys\n"
        "from jsg.models.config import read_spec\n"
        "from jsg.models.loading import load_model\n"
        "for directory in sys.argv[1:]: pass\n"
        "for name in {names!r}:\n"
        "    directory = pathlib.Path(name)\n"
        "    load_model(directory, read_spec(directory))\n"
        "    print(*[each in sys.modules for each in ('orbax', 'tensorstore')])"
    )
    said = run_python(code.format(names=[str(tmp_path), str(made)]))
    assert said.split("\n") == ["False False", "False True"]


@pytest.mark.parametrize(
    ("shape", "layout", "large", "small"),
    [
        ((4096, 4096), Layout(0, 1, 128, True, 1), (4096, 4096), (32, 4096)),  # below a unit: a part of one
        ((4096, 4096), Layout(1, 4, 128, True, 4), (4096, 1024), (4096, 32)),
        ((128256, 8192), Layout(0, 8, 1, False, 8), (2004, 8192), (12, 8192)),  # 64 MiB are a file at most
        ((1280, 3456), Layout(0, 2, 320, True, 2), (640, 3456), (64, 3456)),
        ((7,), Layout(0, 1, 1, False, 1), (7,), (7,)),
    ],
)
def test_chunks_divide_what_a_device_needs(shape, layout, large, small):
    assert grid(shape, 4, layout) == (large, small)


@pytest.mark.parametrize(
    ("shape", "layout", "large", "small"),
    [
        ((50257, 8), Layout(0, 1, 1, False, 1), (50258, 8), (25129, 8)),
        ((131071, 1024), Layout(0, 1, 1, False, 1), (14616, 1024), (252, 1024)),  # a prime
        ((32002, 2048), Layout(0, 2, 1, False, 2), (8064, 2048), (126, 2048)),  # twice a prime
        ((32002, 2048), Layout(0, 1, 1, False, 1), (8064, 2048), (126, 2048)),  # its divisors are 2 and very many
        ((32 * 16001, 2048), Layout(0, 1, 1, False, 1), (8128, 2048), (32, 2048)),  # small ones may divide
        ((127 * 331, 1024), Layout(0, 1, 127, False, 1), (14097, 1024), (127, 1024)),  # whole units, as files too
        ((509 * 331, 1024), Layout(0, 1, 509, False, 1), (15372, 1024), (252, 1024)),  # cut through units
    ],
)
def test_chunks_stick_out_where_nothing_divides(shape, layout, large, small):
    assert grid(shape, 4, layout) == (large, small)
    length, file, piece = shape[0], large[0], small[0]
    assert file % piece == 0
    assert piece * shape[1] * 4 <= orbax_writer.PIECE_BYTES and file * shape[1] * 4 <= orbax_writer.FILE_BYTES
    assert -(-length // piece) * piece - length < length / 50  # little is written beyond the tensor
