"""A checkpoint with a weight that is not a number: every request is told so, and no process ends."""

from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.server.battery import GENERATING, VALID
from tests.server.real_model import write_real_model
from tests.server.running import ServerProcess, check_discreet, events_of, serving

pytestmark = pytest.mark.slow

NOT_FINITE = "the model's logits were not finite"


@pytest.fixture(scope="module", params=["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
def broken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str
) -> Iterator[ServerProcess]:
    """A server of a model in which one number of one tensor is NaN."""
    directory = write_real_model(tmp_path_factory.mktemp("nan") / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors[request.param] = tensors[request.param].copy()
    tensors[request.param].flat[7] = np.nan
    save_file(tensors, directory / "model.safetensors")
    with serving(directory, compile_cache_dir) as server:
        server.http.timeout = 120
        yield server


def test_every_request_is_told(broken: ServerProcess):
    for path in GENERATING * 2:  # the second time nothing wrong is found in the cache
        response = broken.http.post(path, json=VALID[path])
        assert response.status_code == 500, response.text
        assert NOT_FINITE in response.text
        check_discreet(response.text)


def test_streams_and_whole_batches_too(broken: ServerProcess):
    with broken.http.stream("POST", "/generate", json={"text": "ab", "stream": True}) as stream:
        said = stream.read().decode() if stream.status_code == 500 else str(events_of(stream))
    assert NOT_FINITE in said
    several = broken.http.post(
        "/generate", json={"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 3, "n": 2}}
    )
    assert several.status_code == 500


def test_the_probe_that_generates_fails_and_the_process_lives(broken: ServerProcess):
    """So a load balancer sends nothing there, and `jsg serve` is not ended for what a restart would not mend."""
    response = broken.http.get("/health_generate")
    assert response.status_code == 503
    assert NOT_FINITE in response.json()["error"]["message"]
    assert broken.http.get("/health").status_code == 200
    stats = broken.stats()
    assert stats["num_failed"] >= 1
    broken.wait_for_stats(num_running=0, num_waiting=0, num_protected_tokens=0, num_uncached_tokens=0)
    assert broken.http.post("/flush_cache").status_code == 200 and broken.process.poll() is None
