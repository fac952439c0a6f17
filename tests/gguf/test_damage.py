"""What is wrong with a file is refused by name, with a remedy, and without reading on for ever."""

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsg.errors import ModelError
from jsg.gguf.container import read_container
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.sources import resolve_model
from tests.gguf.models import made
from tests.gguf.writer import Model, container

HEAD = {"general.architecture": "llama", "a": [1, 2]}
TENSORS = {"t": ("Q8_0", (2, 32), bytes(68))}
WHOLE = container(HEAD, TENSORS)


def changed(old: bytes, new: bytes) -> bytes:
    assert WHOLE.count(old) == 1
    return WHOLE.replace(old, new)


A_LIST = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 5, 2)
PLACE = b"t" + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
CONTAINERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "must be a GGUF file, but is empty; download it again"),
    "wrong magic": (b"GGML" + WHOLE[4:], "must begin with GGUF, but does not; is it another kind of file?"),
    "version 1": (container(HEAD, TENSORS, version=1), "version 2 or 3, but is of 1; convert the model with a newer"),
    "version 4": (container(HEAD, TENSORS, version=4), "version 2 or 3, but is of 4"),
    "big-endian": (container(HEAD, TENSORS, order=">"), "must be little-endian, but is big-endian; take one for x86"),
    "cut in the head": (WHOLE[:60], "but ends before; download it again"),
    "cut in the data": (WHOLE[:-40], "must have t up to byte .* but has .*; download it again"),
    "offset": (changed(PLACE, PLACE[:-8] + struct.pack("<Q", 2**50)), "must have t up to byte .* but has"),
    "type": (changed(PLACE, PLACE[:-12] + struct.pack("<IQ", 10, 0)), "but t is of Q2_K; take a file of another"),
    "unknown type": (changed(PLACE, PLACE[:-12] + struct.pack("<IQ", 99, 0)), "but t is of type 99"),
    "block": (changed(PLACE, PLACE.replace(struct.pack("<Q", 32), struct.pack("<Q", 31))), "whole blocks of 32 in t"),
    "axes": (changed(PLACE, b"t" + struct.pack("<I", 5) + PLACE[5:]), "at most 4 axes, but 't' has 5"),
    "long list": (changed(A_LIST, A_LIST[:-8] + struct.pack("<Q", 2**60)), "must have .* bytes from byte"),
    "list of texts": (changed(A_LIST, A_LIST[:-12] + struct.pack("<IQ", 8, 2**60)), "must have .* bytes from byte"),
    "value": (
        changed(A_LIST, A_LIST[:9] + struct.pack("<IIQ", 77, 5, 2)),
        "values of known types, but byte .* says 77",
    ),
    "tensors": (WHOLE[:8] + struct.pack("<Q", 2**40) + WHOLE[16:], "at most 65536 tensors, but says 1099511627776"),
    "entries": (WHOLE[:16] + struct.pack("<Q", 2**40) + WHOLE[24:], "must have .* bytes from byte|known types|UTF-8"),
    "text": (changed(b"general.arch", b"general.arc\xff"), "must have UTF-8 before byte"),
    "twice": (
        changed(b"\x01\0\0\0\0\0\0\0a", b"\x14\0\0\0\0\0\0\0general.architecture"),
        "has 'general.architecture' again",
    ),
    "alignment": (
        container(HEAD | {"general.alignment": 3}, TENSORS),
        "a power of two as general.alignment, but has 3",
    ),
}


def test_a_damaged_container_is_refused(tmp_path: Path):
    for kind, (data, message) in CONTAINERS.items():
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(ModelError, match="must ") as caught:
            read_container(tmp_path / "m.gguf")
        assert re.search(message, str(caught.value)), (kind, str(caught.value))
        assert str(tmp_path) not in str(caught.value) and ";" in str(caught.value)


def test_version_2_and_other_alignments_are_read(tmp_path: Path):
    for options in ({"version": 2}, {"alignment": 64}, {"alignment": 8}):
        (tmp_path / "m.gguf").write_bytes(container(HEAD, TENSORS, **options))
        place = read_container(tmp_path / "m.gguf").tensors["t"]
        assert place.start % options.get("alignment", 32) == 0 and place.shape == (2, 32) and place.nbytes == 68


def without(name: str) -> Callable[[Model], Any]:
    return lambda model: model.entries.pop(name)


def entry(name: str, value: Any) -> Callable[[Model], Any]:
    return lambda model: model.entries.update({name: value})


MODELS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "architecture": (
        entry("general.architecture", "mamba"),
        "one of the architectures llama, .* but is of 'mamba'; take",
    ),
    "no architecture": (without("general.architecture"), "architectures .* but is of None"),
    "metadata": (
        without("qwen2.block_count"),
        "must have qwen2.block_count, but this has not; convert the model again",
    ),
    "eps": (without("qwen2.attention.layer_norm_rms_epsilon"), "must have qwen2.attention.layer_norm_rms_epsilon"),
    "wrong number": (entry("qwen2.embedding_length", 0), "hidden_size must be an integer in .* but is 0"),
    "layers differ": (entry("qwen2.attention.head_count_kv", [2, 1]), "num_key_value_heads must be an integer"),
    "values": (entry("qwen2.attention.value_length", 8), "key_length and attention.value_length differ; take"),
    "unknown entry": (entry("qwen2.logit_scale", 2.0), "qwen2.logit_scale .* changes the answers, but it is 2.0; take"),
    "scaling": (
        lambda model: model.entries.update({"qwen2.rope.scaling.type": "new", "qwen2.rope.scaling.factor": 2.0}),
        "rope_type must be one of .* but is 'new'",
    ),
    "tokenizer": (
        entry("tokenizer.ggml.model", "bert"),
        "model of a GGUF file must be gpt2 or llama, but is 'bert'; take",
    ),
    "no tokenizer": (without("tokenizer.ggml.model"), "must be gpt2 or llama, but is None"),
    "words": (
        entry("tokenizer.ggml.pre", "default"),
        "tokenizer.ggml.pre .* must be one of .* but is 'default'; convert",
    ),
    "tokens": (without("tokenizer.ggml.tokens"), "must have the list tokenizer.ggml.tokens; download it again"),
    "same tokens": (entry("tokenizer.ggml.tokens", ["a", "a"]), "each token once"),
    "kinds": (entry("tokenizer.ggml.token_type", [1]), "tokenizer.ggml.token_type a number for each; download"),
    "merges": (entry("tokenizer.ggml.merges", ["a q"]), "pairs of tokens that make a token, but has 'a q'; download"),
    "no merges": (without("tokenizer.ggml.merges"), "must have the list tokenizer.ggml.merges"),
    "scores": (entry("tokenizer.ggml.model", "llama"), "must have the list tokenizer.ggml.scores"),
}


def test_metadata_that_jsg_does_not_read_is_refused(tmp_path: Path):
    for kind, (change, message) in MODELS.items():
        model = made("qwen2")
        change(model)
        with pytest.raises(ModelError) as caught:
            read_spec(resolve_model(str(model.write(tmp_path / "m.gguf"))))
        assert re.search(message, str(caught.value)), (kind, str(caught.value))


def test_a_vocabulary_of_sentencepiece_has_one_unknown_token_and_all_bytes(tmp_path: Path):
    model = made("qwen2")
    tokens = model.entries["tokenizer.ggml.tokens"]
    model.entries |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * len(tokens)}
    with pytest.raises(ModelError, match="must mark one unknown token and 256 bytes, but marks 0 and 0"):
        resolve_model(str(model.write(tmp_path / "m.gguf")))


def test_tensors_too_many_too_few_or_of_another_shape_are_refused(tmp_path: Path):
    def fault(name: str, change: Callable[[Model], Any]) -> str:
        model = made("qwen2")
        change(model)
        directory = resolve_model(str(model.write(tmp_path / f"{name}.gguf")))
        with pytest.raises(ModelError) as caught:
            load_model(directory, read_spec(directory))
        return str(caught.value)

    assert re.search(
        "must hold model.layers.1.self_attn.q_proj.weight", fault("a", lambda m: m.tensors.pop("blk.1.attn_q.weight"))
    )
    assert re.search(
        "holds 'blk.0.attn_sub_norm.weight'", fault("b", lambda m: m.add("blk.0.attn_sub_norm.weight", [1.0]))
    )
    assert re.search(
        "input_layernorm.weight must have the shape", fault("c", lambda m: m.add("blk.0.attn_norm.weight", [1.0]))
    )


def test_load_formats_of_others_do_not_read_it(tmp_path: Path):
    path = made("qwen2").write(tmp_path / "m.gguf")
    for load_format in ("safetensors", "orbax"):
        with pytest.raises(ModelError, match="must be a directory, but 'm"):
            resolve_model(str(path), load_format=load_format)


def test_files_with_random_bytes_are_read_or_refused(tmp_path: Path):
    """3 250 of them were read or refused when this was written; these are a few."""
    chance = random.Random(0)
    path = made("llama_biases").write(tmp_path / "m.gguf")
    data = path.read_bytes()
    end = data.index(b"tokenizer.ggml.tokens")
    refused = 0
    for _ in range(40):
        changed = bytearray(data)
        at = chance.randrange(4, end)
        changed[at : at + chance.choice([0, 1, 8])] = chance.choice(
            [b"\0", b"\xff" * 8, bytes([chance.randrange(256)])]
        )
        path.write_bytes(changed)
        try:
            read_spec(resolve_model(str(path)))
        except ModelError:
            refused += 1
    assert 10 < refused <= 40
