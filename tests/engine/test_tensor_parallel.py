"""One model on two and on four devices answers as on one (design §1.1), in every family."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jsg.errors import ConfigError, ModelError
from jsg.models.config import read_spec
from tests.engine import small
from tests.engine.shared_out import MAX_DIFFERENCE, SharedOut, answers
from tests.golden.variants import VARIANTS, WIDE, random_tensors, write_checkpoint
from tests.models.packers import FORMS, write_packed
from tests.models.specs import changed
from tests.own_process import said

NUM_NEW = 24
FAMILIES = {
    "llama_gqa_head_dim": (2, 4),  # two key-value heads: on four devices each is there twice
    "llama_tied": (4,),  # one
    "deepseek_v3": (2,),  # each device has all latent rows
    "gpt_oss": (2,),  # a sink for each head, and biases of experts
    "mistral_window": (4,),
    "mixtral": (2,),
    "qwen2": (2,),
    "qwen2_moe": (2,),
    "granitemoe": (2,),  # experts in one tensor
    "glm4_moe": (2,),
    "minimax_m2": (2,),  # norms of all heads together, of which a part is turned
    "ernie4_5_moe": (2,),
    "gemma2": (2,),
    "gemma3": (2,),
    "olmo2": (2,),  # norms of all heads together
    "phi3": (2,),  # fused projections
    "glm4": (2,),  # the same, and neighbours are turned together
    "cohere2": (2,),  # two blocks side by side
    "qwen3_biases": (4,),
}
IN_ALL_SHAPES = ("llama_gqa_head_dim", "mixtral")
"""The others are compared in deterministic mode, which has fewer programs."""


IN_CI = ("llama_gqa_head_dim",)
"""The other families are long: experts and one head of keys have other tests on several devices, biases of heads are
compared in `test_family_devices.py`, and to a window it is all the same where heads are."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in sorted(FAMILIES)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str):
    """Answers by number of devices, of a small random model of one family."""
    variant = request.param
    directory = tmp_path_factory.mktemp(variant)
    write_checkpoint(directory, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(directory), "cache_dir": compile_cache_dir, "num_new": NUM_NEW}
    common["knobs"] = {} if variant in IN_ALL_SHAPES else small.DETERMINISTIC
    counts = (1, *FAMILIES[variant])
    return variant, dict(zip(counts, answers([{**common, "tp_size": n} for n in counts]), strict=True))


def test_two_devices_answer_as_one(shared_out: SharedOut):
    """The tokens and their scores, in a step that adds up twice a layer and once for the embedding."""
    alone, two = shared_out.by_count[1], shared_out.by_count[2]
    assert two["tokens"] == alone["tokens"]
    for scores in ("logprobs", "prompt_logprobs"):
        assert len(two[scores]) == len(alone[scores]) > 0
        assert 0 < np.abs(np.subtract(two[scores], alone[scores])).max() < MAX_DIFFERENCE
    assert two["collectives"]["forward"] == [2 * VARIANTS[shared_out.run["variant"]]["num_hidden_layers"] + 1, 0, 0]
    assert two["plan"].endswith(" MiB, on each of 2 devices")


@pytest.mark.slow
def test_the_tokens_are_those_of_one_device(family):
    variant, by_count = family
    alone = by_count[1]
    for count in FAMILIES[variant]:
        several = by_count[count]
        assert several["tokens"] == alone["tokens"], count
        for scores in ("logprobs", "prompt_logprobs"):
            assert len(several[scores]) == len(alone[scores]) > 0
            assert np.abs(np.subtract(several[scores], alone[scores])).max() < MAX_DIFFERENCE


@pytest.mark.slow
def test_the_memory_plan_is_that_of_each_device(family):
    variant, by_count = family
    assert "devices" not in by_count[1]["plan"]
    for count in FAMILIES[variant]:
        assert by_count[count]["plan"].endswith(f" MiB, on each of {count} devices")


@pytest.mark.slow
def test_a_step_adds_up_twice_a_layer_and_once_for_the_embedding(family):
    """And once more a layer for norms of all heads together; XLA adds up two blocks side by side at once."""
    variant, by_count = family
    each = {"olmo2": 3, "minimax_m2": 3, "cohere2": 1}.get(variant, 2)
    num_layers = VARIANTS[variant]["num_hidden_layers"]
    assert by_count[1]["collectives"]["forward"] == [0, 0, 0]
    for count in FAMILIES[variant]:
        assert by_count[count]["collectives"]["forward"] == [each * num_layers + 1, 0, 0]
        assert by_count[count]["collectives"]["write_rows"] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "quantization", "count"),
    [
        pytest.param("llama_biases", "int8", 2, marks=pytest.mark.long),
        ("mixtral", "fp8", 2),
        pytest.param("wide", "int4", 2, marks=pytest.mark.long),
    ],
)
def test_pages_and_few_bits(tmp_path: Path, compile_cache_dir: str, variant: str, quantization: str, count: int):
    """Quantised kernels have scales that are shared out too; pages of several tokens are copied on every device.

    Integers are long: in 8 bits on two hosts, as experts, and in published 4 bits they are not.
    """
    with mock.patch.dict(VARIANTS, WIDE):
        write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 12}
    knobs = {"quantization": quantization, "page_size": 4, "kv_cache_dtype": "fp8_e4m3", **small.DETERMINISTIC}
    alone, several = answers([{**common, "tp_size": n, "knobs": knobs} for n in (1, count)])
    assert several["tokens"] == alone["tokens"] and several["collectives"]["copy_slots"] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("awq", marks=pytest.mark.long), "gptq order"])
def test_published_few_bits(tmp_path: Path, compile_cache_dir: str, form: str):
    """They are shared out in whole groups. Kernels whose inputs are in another order are restored if inputs are.

    That has kernels of both kinds, so AWQ is long.
    """
    with mock.patch.dict(VARIANTS, WIDE):
        write_packed(tmp_path, VARIANTS["wide"], FORMS[form], random_tensors("wide", 0))
    common = {"variant": "wide", "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 12}
    alone, several = answers([{**common, "tp_size": n, "knobs": small.DETERMINISTIC} for n in (1, 2)])
    assert several["tokens"] == alone["tokens"]


@pytest.fixture(scope="module")
def by_experts(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> dict[tuple[int, int], dict]:
    """Answers of a small Mixtral by numbers of devices and of groups that have experts of their own."""
    directory = tmp_path_factory.mktemp("by_experts")
    write_checkpoint(directory, "mixtral", random_tensors("mixtral", 0))
    common = {"variant": "mixtral", "directory": str(directory), "cache_dir": compile_cache_dir, "num_new": NUM_NEW}
    common["num_requests"] = 5
    counts = ((1, 1), (4, 4), (4, 2))
    runs = [{**common, "tp_size": count, "knobs": {"ep_size": groups}} for count, groups in counts]
    return dict(zip(counts, answers(runs), strict=True))


@pytest.mark.slow
def test_devices_with_experts_of_their_own_answer_as_one(by_experts):
    alone = by_experts[1, 1]
    for count, several in by_experts.items():
        assert several["tokens"] == alone["tokens"], count
        for scores in ("logprobs", "prompt_logprobs"):
            assert np.abs(np.subtract(several[scores], alone[scores])).max() < MAX_DIFFERENCE


@pytest.mark.slow
def test_they_add_up_as_often_and_say_what_they_share(by_experts):
    num_sums = 2 * VARIANTS["mixtral"]["num_hidden_layers"] + 1
    for (count, groups), several in by_experts.items():
        assert several["collectives"]["forward"] == [num_sums if count > 1 else 0, 0, 0]
        assert (f"experts in {groups} groups" in several["plan"]) == (groups > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("mixtral", 4),
        *(
            pytest.param(variant, 2, marks=pytest.mark.long)
            for variant in (
                "glm4_moe",  # with experts that every token uses
                "even experts",  # of Granite, in one tensor
                "gpt_oss",  # with biases
            )
        ),
    ],
)
def test_experts_of_their_own_in_8_bits_and_bit_for_bit(
    tmp_path: Path, compile_cache_dir: str, variant: str, count: int
):
    """Deterministically an answer has the same bits alone, and from other chunks, as beside others.

    All engines are deterministic, because such ones run a third of the programs. Other experts are long:
    `test_family_devices.py` has them in float32.
    """
    with mock.patch.dict(VARIANTS, WIDE):
        write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 12}
    knobs = {"quantization": "int8", **small.DETERMINISTIC}
    counts = ((1, 1), (count, 2))
    runs = [{**common, "tp_size": devices, "knobs": knobs | {"ep_size": groups}} for devices, groups in counts]
    alone, several = answers(runs)
    assert several["tokens"] == alone["tokens"]
    assert several["scored_alone"] == several["prompt_logprobs"] + several["logprobs"]


@pytest.mark.slow
def test_retracts_and_prefixes(tmp_path: Path, compile_cache_dir: str):
    """In a pool that is too small the scheduler does as with one device, and so do the answers."""
    variant = "llama_gqa_head_dim"
    write_checkpoint(tmp_path, variant, random_tensors(variant, 0))
    common = {"variant": variant, "directory": str(tmp_path), "cache_dir": compile_cache_dir, "num_new": 40}
    knobs = {"max_total_tokens": 152, "schedule_conservativeness": 0.01, "schedule_policy": "lpm"}
    knobs |= small.DETERMINISTIC
    alone, several = answers([{**common, "tp_size": n, "knobs": knobs} for n in (1, 2)])
    assert several["tokens"] == alone["tokens"] and several["stats"] == alone["stats"]
    assert all(several["stats"].values()), "there were retracts, hits and evictions"


@pytest.mark.parametrize(
    ("changes", "count", "what"),
    [
        ({}, 3, "num_attention_heads"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12, "head_dim": 16}, 4, "num_key_value_heads"),
        ({"intermediate_size": 66}, 4, "intermediate_size"),
        ({"vocab_size": 97}, 2, "vocab_size"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path, changes, count, what):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["llama_mha"] | changes))
    with pytest.raises(ModelError, match=rf"--tp-size must divide {what} of the model"):
        read_spec(tmp_path).over_devices(count)


@pytest.mark.parametrize(
    ("variant", "count", "groups", "error", "message"),
    [
        (
            "llama_mha",
            2,
            2,
            ConfigError,
            "--ep-size above 1 needs a model with experts, which Llama.* has not, but got 2",
        ),
        ("mixtral_three_of_five", 2, 2, ConfigError, "--ep-size must divide the number of experts .* is 5, but got 2"),
        ("mixtral", 8, 2, ModelError, "--tp-size must divide num_attention_heads of the model, which is 4, but got 8"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(tmp_path: Path, variant, count, groups, error, message):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[variant]))
    with pytest.raises(error, match=message):
        read_spec(tmp_path).over_devices(count, groups)


def test_whole_experts_need_no_width_that_devices_divide(tmp_path: Path):
    """Only those of a group share an expert's columns."""
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["mixtral"] | {"intermediate_size": 98}))
    config = read_spec(tmp_path)
    assert config.over_devices(4, 4) == config.over_devices(4, 2)
    with pytest.raises(ModelError, match=r"--tp-size must divide the width of its experts .* is 98, but got 4"):
        config.over_devices(4)
    odd = changed(config, mlp={"inner": 97})
    with pytest.raises(ModelError, match=r"--tp-size / --ep-size = 4 / 2 must divide the width of its .* got 2"):
        odd.over_devices(4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("deterministic",), pytest.param((), marks=pytest.mark.long, id="usual")])
def test_grammars_and_pictures(compile_cache_dir: str, mode: tuple[str, ...]):
    """The embedded models, with masks, drafts and the encoder, through `jsg.Engine`.

    Deterministic engines have a third of the programs; others are long.
    """
    answers, several = (said("tests.engine.parallel_embedded", count, compile_cache_dir, *mode) for count in ("1", "2"))
    assert several == answers
    for text in answers[:6]:
        assert json.loads(text).keys() == {"name", "size"}
    assert answers[6:9] == [" Rome.", " Paris.", " Red."]
