"""`Engine.encode`, with a model as Qwen3-Embedding is published, beside what transformers computes for it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jsg
from jsg.engine.embedder import read_embedder
from jsg.errors import ModelError, RequestError
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.processing.vectors import check_dimensions
from tests.engine.late import late_programs
from tests.golden.embedding import CONFIG, TEXTS, write_embedding_model, write_pooling
from tests.golden.record import DATA, EMBEDDING

MAX_DIFFERENCE = 1e-5
KNOBS: dict[str, Any] = {"max_running_requests": 4, "max_total_tokens": 2048, "deterministic": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def engine(directory: Path, compile_cache_dir: str) -> Iterator[jsg.Engine]:
    with late_programs(), jsg.Engine(str(directory), compilation_cache_dir=compile_cache_dir, **KNOBS) as made:
        yield made


def vectors(engine: jsg.Engine, texts: Any, **fields: Any) -> np.ndarray:
    return np.array([result["embedding"] for result in engine.encode(list(texts), **fields)], np.float32)


def test_vectors_are_those_of_transformers(engine: jsg.Engine) -> None:
    with np.load(DATA / f"{EMBEDDING}.npz") as file:
        golden = dict(file)
    assert json.loads(str(golden["note"]))["config"] == CONFIG
    ids = [id for text in TEXTS for id in engine.tokenizer.encode(text)]
    assert ids == golden["ids"].tolist()
    differences = [
        np.abs(vectors(engine, TEXTS) - golden["whole"]).max(),
        np.abs(vectors(engine, TEXTS, dimensions=24) - golden["cut"]).max(),
    ]
    assert max(differences) < MAX_DIFFERENCE


def test_neither_the_batch_nor_the_cache_changes_a_bit(engine: jsg.Engine) -> None:
    engine.flush_cache()
    alone = np.concatenate([vectors(engine, [text]) for text in TEXTS])
    engine.flush_cache()
    assert (vectors(engine, TEXTS) == alone).all()
    again = engine.encode(list(reversed(TEXTS)))
    assert [result["embedding"] for result in reversed(again)] == alone.tolist()
    lens = [result["meta_info"]["prompt_tokens"] for result in again]
    assert [result["meta_info"]["cached_tokens"] for result in again] == [length - 1 for length in lens]


def test_a_text_may_fill_the_context(engine: jsg.Engine) -> None:
    """The last token counts, so its position is there; in a pool that is no larger, too."""
    ids = [token % 250 for token in range(512)]
    whole = np.array(engine.encode(input_ids=ids)["embedding"])
    assert (np.array(engine.encode(input_ids=ids)["embedding"]) == whole).all()
    assert np.abs(np.array(engine.encode(input_ids=ids[:-1])["embedding"]) - whole).max() > 0.01
    with pytest.raises(RequestError, match="at most 512, but got 513"):
        engine.encode(input_ids=[*ids, 1])


def test_what_sentence_transformers_saves(directory: Path, tmp_path: Path, compile_cache_dir: str) -> None:
    """Version 6 names the class without a head, other modules, and the pooling in one word."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = CONFIG | {
        "architectures": ["Qwen3Model"],
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(file | {"tie_word_embeddings": False}))
    parts = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    modules = [{"type": f"sentence_transformers.{part}", "path": ("", "1_Pooling")[i]} for i, part in enumerate(parts)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "embedding_dimension": 64}')
    with late_programs(), jsg.Engine(str(tmp_path), compilation_cache_dir=compile_cache_dir, **KNOBS) as made:
        vector = vectors(made, TEXTS[:1])[0]
    with np.load(DATA / f"{EMBEDDING}.npz") as golden:
        assert np.abs(vector / np.linalg.norm(vector) - golden["whole"][0]).max() < MAX_DIFFERENCE
    with pytest.raises(ModelError, match="can embed"):
        load_model(tmp_path, read_spec(tmp_path))


def test_each_kind_of_model_refuses_the_other_task(engine: jsg.Engine) -> None:
    with pytest.raises(RequestError, match="embeds texts and generates none"):
        engine.generate("a", {"max_new_tokens": 1})
    with pytest.raises(RequestError, match="dimensions must be from 1 to 64"):
        engine.encode("a", dimensions=65)


@pytest.mark.parametrize(
    ("changes", "task", "said"),
    [
        ({"is_causal": False}, "auto", "is_causal must be true"),
        ({"matryoshka_dimensions": [32, 65]}, "auto", "from 1 to 64"),
        ({"modules": ["Transformer", "Pooling", "Dense"]}, "auto", "'Dense'"),
        ({"pooling": "mean_tokens"}, "auto", "lasttoken, but is ['mean_tokens']"),
    ],
)
def test_models_that_embed_in_another_way_are_refused(
    directory: Path, tmp_path: Path, changes: dict[str, Any], task: str, said: str
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    if "modules" in changes:
        modules = [{"type": f"a.{kind}", "path": "1_Pooling"} for kind in changes["modules"]]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    elif "pooling" in changes:
        write_pooling(tmp_path, changes["pooling"])
    else:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ModelError) as caught:
        read_embedder(tmp_path, task, read_spec(tmp_path))
    assert said in str(caught.value)


def test_what_the_directory_and_the_task_say(directory: Path, tmp_path: Path) -> None:
    model = read_spec(directory)
    assert read_embedder(directory, "generate", model) is None
    published = read_embedder(directory, "auto", model)
    assert published is not None
    assert (published.width, published.is_normed, published.dimensions) == (64, True, None)
    write_embedding_model(tmp_path, normalize=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"matryoshka_dimensions": [32, 16]}))
    named = read_embedder(tmp_path, "auto", model)
    assert named is not None and (named.is_normed, named.dimensions) == (False, (16, 32))
    for length in (None, 16, 64):
        check_dimensions(named, length)
    with pytest.raises(RequestError, match="16 or 32 or 64"):
        check_dimensions(named, 24)
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_embedder(tmp_path, "auto", model) is None
    other = read_embedder(tmp_path, "embed", model)
    assert other is not None and (other.is_normed, other.dimensions) == (True, ())
