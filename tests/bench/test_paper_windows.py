"""The paper's programs on models with a window: hits are the optimum, although pages behind the window are freed."""

import contextlib
import json
import pathlib
import shutil
from typing import Any, cast

import pytest
from safetensors.numpy import load_file, save_file

import jsg
from bench.paper.measure import timed
from bench.paper.programs import WORKLOADS
from bench.paper.recorded import NotedModel, RecordedBackend, Ways
from bench.paper.sequences import Sequences
from bench.paper.texts import Texts
from jsg.lang.tokens.model import Hold
from jsg.lang.tokens.session import TokenSession
from jsg.processing.parts import Part
from tests.engine.late import late_programs

TINY = pathlib.Path(jsg.__file__).parent / "assets" / "tiny"
WINDOW, POOL_TOKENS = 64, 8192
MODELS = {
    "some layers": {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "aligned": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": WINDOW,
        "no_rope_layer_interval": 2,
        "intermediate_size_mlp": 448,
        "moe_layers": [],
    },
    "all layers": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
}
PROGRAMS = ("mmlu", "judge", "tips", "chains", "chat-short", "gsm8k", "tree-wide")


class CountingModel(NotedModel):
    """Counts the prompts that are held."""

    num_holds = 0

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        self.num_holds += 1
        return await super().hold(prompt)


class Noted:
    """An engine as a backend, whose prompts `sequences` gets."""

    def __init__(self, engine: jsg.Engine, sequences: Sequences):
        self._model = CountingModel(lambda: engine.as_backend()._model, sequences)

    @property
    def num_holds(self) -> int:
        return self._model.num_holds

    def open(self, *, num_api_spec_tokens: int | None = None) -> TokenSession:
        return TokenSession(self._model)


def counts_of(engine: jsg.Engine) -> dict[str, int]:
    return engine.get_server_info()["internal_states"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_is_the_least(tmp_path: pathlib.Path, name: str):
    """In a pool whose layers with a window have room for a part of the tokens, so that parts are evicted.

    A prompt that is held runs its last token, and so does each of its branches.
    """
    directory = tmp_path / "model"
    shutil.copytree(TINY, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | MODELS[name]))
    if name == "aligned":
        tensors = load_file(directory / "model.safetensors")
        renamed = {tensor.replace(".mlp.", ".feed_forward."): value for tensor, value in tensors.items()}
        save_file(renamed, directory / "model.safetensors")
    with late_programs():
        engine = jsg.Engine(str(directory), max_total_tokens=POOL_TOKENS, max_running_requests=8)
    num_gone = 0
    with contextlib.closing(engine):
        texts = Texts("0", lambda text: len(text) // 3)
        (group,) = engine._driver._core.scheduler.table.windows
        assert group.num_total < POOL_TOKENS // 2
        for program in PROGRAMS:
            assert engine.flush_cache()
            sequences, workload, before = Sequences(), WORKLOADS[program], counts_of(engine)
            noted = Noted(engine, sequences)
            backend = RecordedBackend(cast(Any, noted), Ways())
            timed(workload, workload.runs(texts, 2 / workload.count), backend)
            grown = {key: counts_of(engine)[key] - before[key] for key in ("prompt_tokens", "cached_tokens")}
            least = sequences.least()
            assert least is not None
            num_computed, num_again = grown["prompt_tokens"] - grown["cached_tokens"], 0
            if program == "tree-wide":  # nothing stands between a fork and the answers of its branches
                num_again = noted.num_holds
                assert num_again == 2 * (1 + 3 + 9)
            assert least <= num_computed <= least + num_again, program
            num_gone += counts_of(engine)["num_cached_tokens"] - group.num_evictable
    assert num_gone > 1000, "no part was evicted, so nothing was tried"
