"""`bench.drafts`: its loads, its wide model, and that a run says what drafts did."""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.drafts import __main__ as drafts
from bench.drafts.beside import ask
from bench.drafts.models import wide_model
from bench.drafts.workloads import NUM_TURNS, WORKLOADS, Draw, schema_of
from bench.peers.engines import Engine
from bench.report import ROOT, Report
from tests.server.conftest import ServerMaker


def test_a_load_is_the_same_for_both_sides_and_another_in_each_round():
    for name, workload in WORKLOADS.items():
        for size in (1, 3):
            first, again, other = (workload.waves(Draw(seed, is_embedded=False), size, 4) for seed in ("1", "1", "2"))
            assert first == again != other
            assert {len(wave) for wave in first} <= {size, 4 % size} and sum(map(len, first)) >= 4, name


def test_an_edit_goes_on_behind_the_new_word():
    for copied, rest in itertools.batched(WORKLOADS["edits"].waves(Draw("1", is_embedded=False), 1, 4), 2):
        assert copied[0].answer is not None and rest[0].answer is not None
        assert rest[0].prompt.startswith(copied[0].prompt + copied[0].answer)
        replaced = rest[0].prompt.removeprefix(copied[0].prompt + copied[0].answer).split()[0].strip(".")
        (old,) = copied[0].params["stop"]
        assert copied[0].prompt.endswith(f"Replace {old} with {replaced}.<|end|><|assistant|>")
        assert copied[0].answer + old in copied[0].prompt and rest[0].answer.replace(replaced, old) in copied[0].prompt


def test_a_turn_of_a_tool_loop_has_all_turns_before_it():
    waves = WORKLOADS["tools"].waves(Draw("1", is_embedded=False), 2, 1)
    assert len(waves) == NUM_TURNS
    for before, after in itertools.pairwise(waves):
        for one, other in zip(before, after, strict=True):
            assert one.answer is not None and other.prompt.startswith(one.prompt + one.answer)


def test_answers_copy_and_schemas_have_their_fields():
    for name in ("extraction", "tools"):
        for wave in WORKLOADS[name].waves(Draw("1", is_embedded=False), 1, 4):
            assert wave[0].answer is not None
            assert all(value in wave[0].prompt for value in json.loads(wave[0].answer).values())
    assert json.loads(schema_of({"b": "x", "a": 3})) == {
        "type": "object",
        "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
        "required": ["b", "a"],
        "additionalProperties": False,
    }


def test_a_wide_model_answers_as_the_small_one(tmp_path: Path):
    """Its numbers are those of the small model to the last bits of float32."""
    pytest.importorskip("optax")
    sys.path.insert(0, str(ROOT / "examples" / "tiny_model"))
    try:
        from model import forward, load_model, logits  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    tokens = np.random.default_rng(0).integers(6, 1400, (1, 24))
    found = []
    for path in (drafts.EMBEDDED, wide_model(drafts.EMBEDDED, tmp_path / "wide")):
        params, config = load_model(path)
        found.append(np.asarray(logits(params, forward(params, config, tokens))))
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


class Fake:
    """An engine that answers each request with four tokens, in so many steps for all requests of a call together."""

    def __init__(self, steps: int):
        self.steps = steps
        self.counts = {"num_steps": 0, "num_gate_open": 0, "num_gate_shut": 0}
        self.counts |= {f"num_drafts{which}_{source}": 0 for which in ("", "_taken") for source in drafts.SOURCES}
        self.asked: list[Any] = []

    def generate(self, prompts: list[str], params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked += zip(prompts, params, strict=True)
        self.counts["num_steps"] += self.steps
        self.counts["num_drafts_tree"] += 4 - self.steps
        return [{"text": "{}", "meta_info": {"completion_tokens": 4}} for _ in prompts]

    def get_server_info(self) -> dict[str, int]:
        return dict(self.counts)

    def flush_cache(self) -> None:
        pass


@pytest.mark.parametrize(("name", "size", "sides"), [("json", 1, 2), ("repeats", 2, 1)])
def test_a_run_counts_the_steps_of_timed_rounds_only(tmp_path: Path, name: str, size: int, sides: int):
    engines: Any = {drafts.AUTO: Fake(1), drafts.OFF: Fake(4)}
    report = Report("bench.drafts", [], tmp_path / "out.json")
    options = argparse.Namespace(rounds=2, requests=4)
    drafts.measure(report, "copying", engines, name, size, options)
    figures = {figure.name.partition(": ")[2]: figure for figure in report.figures}
    steps = figures["steps per token"]
    # A call of `size` requests has 4 * size tokens.
    assert steps.samples == (0.25,) and steps.facts["without_off"] == 1.0 and steps.facts["right"] == 0
    assert steps.facts["tree"] == f"0/{3 * 2 * 4 // size}" and steps.facts["tokens"] == 32
    assert len(figures) == 1 + 2 * sides and all(len(figure.samples) in (1, 2) for figure in figures.values())
    asked = {side: engine.asked for side, engine in engines.items()}
    if name == "json":
        plain = [(prompt, params) for prompt, params in asked[drafts.OFF] if "jump_forward" in params]
        assert len(plain) == len(asked[drafts.AUTO]) == 12 and 2 * len(plain) == len(asked[drafts.OFF])
    else:
        assert asked[drafts.AUTO] == asked[drafts.OFF] and len(asked[drafts.AUTO]) == 24


def test_other_engines_are_asked_for_the_same_tokens(make_server: ServerMaker):
    with make_server() as server:
        url = str(server.http.base_url)
        no_client: Any = None  # which only bench.peers needs
        engine = Engine(name="x", pid=1, client=no_client, weight_itemsize=4, head_itemsize=4, kv_itemsize=4, url=url)
        seconds, num_tokens = ask(engine, [([1, 2, 3], {"max_new_tokens": 4}), ([5, 6], {"max_new_tokens": 3})])
    assert seconds > 0 and num_tokens == 7
