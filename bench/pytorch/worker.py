"""The PyTorch half of `bench.device`: Hugging Face transformers and PyTorch with the same shape, on the same device.

An interpreter with torch and transformers 5 runs this file in a separate process, so that PyTorch and JAX never share a
device's memory. It imports nothing of jsg. One JSON object comes on standard input:

    part                one of `PARTS` below
    shape, dtype        config.json of a Llama, and the type of its weights, which are random
    context             tokens before the first new one
    alone_tokens        tokens that one request generates
    concurrent, shared  loads: num_requests, shared_len, own_len, output_len
    matmul_size         size of the matmul that is timed
    seconds             time after which no further measurement begins

Events go to standard output as lines of JSON, in the form that `bench.device.events` describes: figures, fields for the
header, and why something has no figure. Whatever libraries print goes to standard error. The parts measure:

    torch-ops         matmul, and attention of one layer over a decode batch
    torch-generate    `generate` with SDPA: one request, the concurrent load in one batch, the shared-prefix load
    torch-static      `generate` with a static cache and `torch.compile`: one request
    torch-continuous  continuous batching (`generate_batch`): both loads

The time of one request alone is from its first token to its last, so it does not include the prefill. The time of a
load is from the call to its return, with prefill.
"""

import json
import os
import sys
import time
import traceback

import torch  # pyright: ignore[reportMissingImports]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 10
BATCH = 64
"""The number of sequences in one call of `generate`, which has no queue. More would need too much memory for their
prefill."""
COMPILED_WARM_UPS = 3
"""The number of calls that are not timed, because the first ones compile and then record CUDA graphs."""


def main(output) -> None:
    task = json.loads(sys.stdin.readline())
    emit = Emitter(output, task["seconds"])
    try:
        PARTS[task["part"]](task, emit)
    except Exception as error:
        emit.failed(task["part"], error)
        raise SystemExit(1) from None


class Emitter:
    """Writes events, and knows when time is up."""

    def __init__(self, output, seconds: float):
        self._output = output
        self._end = time.monotonic() + seconds

    def figure(self, name: str, unit: str, samples: list[float], **facts) -> None:
        """Writes a figure."""
        self._write({"figure": {"name": name, "unit": unit, "samples": samples, "facts": facts}})

    def header(self, **fields) -> None:
        """Writes fields for the head of the report."""
        self._write({"header": fields})

    def failed(self, name: str, error: Exception) -> None:
        """Writes the reason why something has no figure."""
        traceback.print_exc()
        self._write({"failed": f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})

    def attempt(self, name: str, run) -> None:
        """Runs a measurement. If it fails or comes too late, the other measurements still run."""
        if time.monotonic() > self._end:
            self._write({"left_out": f"{name}: no time left"})
            return
        try:
            run()
        except Exception as error:
            self.failed(name, error)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def _write(self, event: dict) -> None:
        print(json.dumps(event), file=self._output, flush=True)


def ops(task: dict, emit: Emitter) -> None:
    """Measures the rates that PyTorch reaches on the device, to compare with those of JAX."""
    emit.header(torch=f"{torch.__version__} on {_device_name()}")
    dtype, size = getattr(torch, task["dtype"]), task["matmul_size"]
    a, b = (torch.randn(size, size, dtype=dtype, device=DEVICE) for _ in range(2))
    rates = [2 * size**3 / 1e12 / s for s in _seconds(lambda: a @ b)]
    emit.figure(f"torch: matmul {size}^3 {task['dtype']}", "TFLOP/s", rates, kind="torch-matmul")

    shape = task["shape"]
    rows, heads, kv_heads = max(task["batches"]), shape["num_attention_heads"], shape["num_key_value_heads"]
    context, head_dim = task["context"], shape["head_dim"]
    query = torch.randn(rows, heads, 1, head_dim, dtype=dtype, device=DEVICE)
    keys, values = (torch.randn(rows, kv_heads, context, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(lambda: attend(query, keys, values, enable_gqa=True))
    emit.figure(
        f"torch: SDPA of one layer, B={rows} ctx {context}",
        "ms",
        [s * 1e3 for s in seconds],
        kind="torch-attention",
        GB_per_s=2 * keys.numel() * keys.element_size() / 1e9 / min(seconds),
    )


def generate(task: dict, emit: Emitter) -> None:
    """Measures `generate` with its defaults: SDPA, a growing cache, nothing compiled."""
    model = _model(task, emit)
    emit.attempt("torch generate, alone", lambda: _alone(model, task, emit, "generate", warm_ups=1))
    for load in ("concurrent", "shared"):
        emit.attempt(f"torch generate, {load}", lambda load=load: _load_in_batches(model, task, emit, load))


def static(task: dict, emit: Emitter) -> None:
    """Measures `generate` with the static cache, for which transformers compiles the forward pass on accelerators."""
    model = _model(task, emit)
    if DEVICE == "cpu":
        emit.header(torch_static="traced, but not compiled: on a CPU this shows only that it works")
        model.forward = torch.compile(model.forward, backend="eager")
    how, options = "static cache and compile", {"warm_ups": COMPILED_WARM_UPS, "cache_implementation": "static"}
    emit.attempt(f"torch {how}, alone", lambda: _alone(model, task, emit, how, **options))


def continuous(task: dict, emit: Emitter) -> None:
    """Measures `generate_batch`: a paged cache, continuous batching, and shared blocks that are read from the cache."""
    model = _model(task, emit)
    emit.header(torch_continuous=f"attention {model.config._attn_implementation}, its own defaults otherwise")
    for load in ("concurrent", "shared"):
        emit.attempt(f"torch continuous batching, {load}", lambda load=load: _continuous_load(model, task, emit, load))


PARTS = {"torch-ops": ops, "torch-generate": generate, "torch-static": static, "torch-continuous": continuous}


class Clock:
    """A streamer that records the time of each token. `generate` passes the prompt to it first."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def _alone(model, task: dict, emit: Emitter, how: str, *, warm_ups: int, **options) -> None:
    """Measures milliseconds between two tokens of one request with an average context of `context` tokens."""
    count = task["alone_tokens"]
    prompt = torch.tensor(_prompts(task, 1, 0, task["context"] - count // 2, seed=0), device=DEVICE)
    settings = _settings(count, **options)

    def run() -> float:
        clock = Clock()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, streamer=clock)
        _, first, *_, last = clock.times
        assert len(clock.times) == 1 + count
        return (last - first) / (count - 1) * 1e3

    for _ in range(warm_ups):
        run()
    samples = [run() for _ in range(3)]
    emit.figure(
        f"torch: {how}, B=1 ctx {task['context']}",
        "ms/token",
        samples,
        kind="torch-alone",
        tokens_per_s=1e3 / min(samples),
    )


@torch.inference_mode()
def _load_in_batches(model, task: dict, emit: Emitter, load: str) -> None:
    settings = _settings(task[load]["output_len"])

    def run(seed: int) -> None:
        prompts = _load_prompts(task, load, seed)
        for start in range(0, len(prompts), BATCH):
            batch = torch.tensor(prompts[start : start + BATCH], device=DEVICE)
            out = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
            assert out.shape[1] == batch.shape[1] + settings.max_new_tokens
        _wait()

    _time_load(task, emit, load, f"generate, batches of {BATCH}", run)


def _continuous_load(model, task: dict, emit: Emitter, load: str) -> None:
    from transformers import ContinuousBatchingConfig

    settings = _settings(task[load]["output_len"])
    settings.eos_token_id = -1  # means none; None would be replaced by a token of the model
    if DEVICE == "cuda":
        config = ContinuousBatchingConfig()
    else:
        config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)

    def run(seed: int) -> None:
        prompts = _load_prompts(task, load, seed)
        results = model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=config, persistent_manager=True
        )
        lengths = sorted(len(result.generated_tokens) for result in results.values())
        if lengths != [settings.max_new_tokens] * len(prompts):
            raise RuntimeError(f"{len(lengths)} of {len(prompts)} requests were answered, with {set(lengths)} tokens")
        _wait()

    try:
        _time_load(task, emit, load, "continuous batching", run)
    finally:
        model.destroy_cached_continuous_batching_manager()


def _time_load(task: dict, emit: Emitter, load: str, how: str, run) -> None:
    """Measures seconds of a load. A load of other prompts runs first, to compile, record graphs and allocate memory."""
    begin = time.perf_counter()
    run(1)
    print(f"{how}, {load} load: {time.perf_counter() - begin:.1f} s the first time", file=sys.stderr)
    samples = []
    for seed in (2, 3):
        begin = time.perf_counter()
        run(seed)
        samples.append(time.perf_counter() - begin)
        if samples[0] > 10:  # one sample must suffice
            break
    tokens = task[load]["num_requests"] * task[load]["output_len"]
    emit.figure(
        f"torch: {how}, {load} load",
        "s",
        samples,
        kind="torch-load",
        load=load,
        tokens_per_s=tokens / min(samples),
        **task[load],
    )


def _model(task: dict, emit: Emitter):
    """A model with random weights, which are made on the device."""
    import transformers

    fields = {k: v for k, v in task["shape"].items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    begin = time.monotonic()
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**fields), dtype=getattr(torch, task["dtype"]), attn_implementation="sdpa"
        ).eval()
    _wait()
    emit.header(
        transformers=f"{transformers.__version__}, torch {torch.__version__} on {_device_name()}",
        torch_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    print(f"model after {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return model


def _settings(num_new: int, **options):
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, max_new_tokens=num_new, eos_token_id=None, pad_token_id=0, **options)


def _load_prompts(task: dict, load: str, seed: int) -> list[list[int]]:
    fields = task[load]
    return _prompts(task, fields["num_requests"], fields["shared_len"], fields["own_len"], seed)


def _prompts(task: dict, count: int, shared_len: int, own_len: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    vocab = task["shape"]["vocab_size"]
    shared = torch.randint(vocab, (shared_len,), generator=generator).tolist()
    return [shared + torch.randint(vocab, (own_len,), generator=generator).tolist() for _ in range(count)]


def _seconds(run) -> list[float]:
    found = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        run()
        _wait()
        found.append(time.perf_counter() - start)
    return found[3:]


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the events
    main(private)
