"""The plans: which shapes, loads and targets belong to which kind of device. No JAX: the coordinator imports this."""

import dataclasses
from typing import Any

from bench.device.shapes import CLIP_L_336, MISTRAL_7B, MIXTRAL_8X7B
from bench.shapes import CLIP_B, CLIP_SMALL, LLAMA_8B, LLAMA_100M, LLAMA_SMALL, llava_next_video

FIT_FRACTION = 0.6
"""The fraction of the device's memory for weights and pool together. JAX reserves three quarters of the memory, and
needs temporaries too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests that are all sent at once. Their prompts begin with the same `shared_len` tokens."""

    num_requests: int
    shared_len: int
    own_len: int
    output_len: int

    @property
    def prompt_len(self) -> int:
        """The number of tokens of one prompt."""
        return self.shared_len + self.own_len

    @property
    def total_len(self) -> int:
        """The number of tokens of one request at its end."""
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on this kind of device. All lengths are in tokens.

    Attributes:
        name: Name of the plan.
        shape: The model's config.json.
        dtype: Type of weights, activations and KV pool.
        batches: Numbers of rows of the decode steps.
        context: Cached tokens of each of these rows.
        shared_context: Cached tokens that all rows share, where prefixes are read together.
        prefills: Lengths of the prompts.
        chunks: Lengths of chunks for their attention alone.
        cached: Numbers of cached tokens before such a chunk.
        attention_batches: Numbers of rows for `paged_decode` alone.
        attention_contexts: Numbers of cached tokens for `paged_decode` alone.
        attention_calls: The most calls of it in one program. At most twice as many programs wait in a queue.
        page_sizes: Page sizes for `paged_decode` alone. Those after the first are measured only with the smallest and
            largest batch and context.
        copy_bytes: Size of the array that is copied for the bandwidth.
        matmul_size: Rows, columns and depth of the matmul for the rate.
        checks: Cases of `bench.attention_cases` whose results are checked; empty for all.
        check_models: Models of `bench.attention_cases` whose heads are checked too.
        sampling_rows: Numbers of rows of logits.
        concurrent: A load of independent requests.
        shared: A load of requests with one prefix.
        alone_tokens: Tokens that one request alone generates.
        steps: Decode steps of the engine that are timed together.
        chunk: Most prompt tokens in one step of the engine.
        ab_layers: Layers of the model with which compiler options and types of kernels are compared.
        experts: The config.json of a model with experts, for the parts of one layer.
        expert_tokens: Numbers of tokens that choose among the experts.
        product_rows: Numbers of rows that are multiplied with 8-bit kernels and with longer ones.
        images: The config.json of a vision model, for its encoder.
        states: By model, the sizes of a layer that keeps a state of each request: see `bench.device.states.Layer`.
        state_prompts: Lengths of the prompts of such a layer.
        is_for_accelerators: Whether the project's targets are for this shape, for which a CPU would take hours.
    """

    name: str
    shape: dict[str, Any]
    dtype: str
    batches: tuple[int, ...]
    context: int
    shared_context: int
    prefills: tuple[int, ...]
    chunks: tuple[int, ...]
    cached: tuple[int, ...]
    attention_batches: tuple[int, ...]
    attention_contexts: tuple[int, ...]
    attention_calls: int
    page_sizes: tuple[int, ...]
    copy_bytes: int
    matmul_size: int
    checks: tuple[str, ...]
    check_models: tuple[str, ...]
    sampling_rows: tuple[int, ...]
    concurrent: Load
    shared: Load
    alone_tokens: int
    steps: int
    chunk: int
    ab_layers: int
    experts: dict[str, Any]
    expert_tokens: tuple[int, ...]
    product_rows: tuple[int, ...]
    images: dict[str, Any]
    states: dict[str, dict[str, Any]]
    state_prompts: tuple[int, ...]
    is_for_accelerators: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of one number."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def pool_tokens(self) -> int:
        """The KV slots for the largest batch and the longest prefill."""
        return max(max(self.batches) * (self.context + 1), *self.prefills)

    @property
    def max_running(self) -> int:
        """The most requests in one step of the engine."""
        return max(*self.batches, self.concurrent.num_requests, self.shared.num_requests)

    @property
    def engine_context(self) -> int:
        """The most tokens of one request in the engine."""
        return max(self.context + 16 * self.steps, self.concurrent.total_len, self.shared.total_len) + 1

    @property
    def engine_pool_tokens(self) -> int:
        """The KV slots for the most demanding load of the engine, and a reserve."""
        decoding = max(self.batches) * (self.context + 16 * self.steps)
        loads = [load.num_requests * load.total_len for load in (self.concurrent, self.shared)]
        return max(decoding, *loads) + self.engine_context

    def with_layers(self, count: int) -> "Plan":
        """The same plan with another number of layers."""
        return dataclasses.replace(self, shape=self.shape | {"num_hidden_layers": count})

    def fit(self, limit_bytes: int | None) -> "Plan":
        """The plan with as many layers as fit in the device's memory of `limit_bytes`; None means no limit."""
        if limit_bytes is None:
            return self
        shape, itemsize = self.shape, self.itemsize
        width, head_dim, kv_heads = shape["hidden_size"], shape["head_dim"], shape["num_key_value_heads"]
        attention = 2 * head_dim * (shape["num_attention_heads"] + kv_heads)
        weights_of_layer = itemsize * width * (attention + 3 * shape["intermediate_size"])
        tokens = max(self.pool_tokens, self.engine_pool_tokens)
        pool_of_layer = itemsize * tokens * 2 * kv_heads * head_dim
        left = FIT_FRACTION * limit_bytes - 2 * itemsize * width * shape["vocab_size"]
        layers = min(shape["num_hidden_layers"], max(1, int(left / (weights_of_layer + pool_of_layer))))
        return self if layers == shape["num_hidden_layers"] else self.with_layers(layers)

    def as_json(self) -> dict[str, Any]:
        """The plan in the form that `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Plan":
        """The plan from the result of `as_json`."""
        changed: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        changed |= {name: Load(**fields[name]) for name in ("concurrent", "shared")}
        return cls(**(fields | changed))


SHORT_TEXT = {"num_hidden_layers": 1, "vocab_size": 1024}
"""Changes to the text model where only an encoder is measured, for which just the width of its rows matters."""

PUBLISHED_STATES: dict[str, dict[str, Any]] = {
    "Qwen3.5-9B": {"key_heads": 16, "heads": 32, "keys": 128, "values": 128, "rule": "delta"},
    "Nemotron-3-Nano": {"key_heads": 8, "heads": 64, "keys": 128, "values": 64, "rule": "scan"},
    "Kimi-Linear": {"key_heads": 32, "heads": 32, "keys": 128, "values": 128, "rule": "channels"},
}
SMALL = {"key_heads": 1, "heads": 2, "keys": 16, "values": 16}

ACCELERATOR = Plan(
    name="8b",
    shape=LLAMA_8B,
    dtype="bfloat16",
    batches=(1, 32, 256),
    context=1024,
    shared_context=1008,
    prefills=(8192, 4096, 2048, 1024),
    chunks=(8192, 2048, 512),
    cached=(0, 8192),
    attention_batches=(32, 64, 128, 256),
    attention_contexts=(1024, 8192, 32_768),
    attention_calls=8,
    page_sizes=(1, 16),
    copy_bytes=2**32,
    matmul_size=8192,
    checks=(),
    check_models=("llama-3.2-1b", "qwen2.5-7b", "phi-3-mini", "phi-2", "gemma-2b"),
    sampling_rows=(1, 32, 256),
    concurrent=Load(num_requests=64, shared_len=0, own_len=1024, output_len=128),
    shared=Load(num_requests=256, shared_len=1024, own_len=64, output_len=128),
    alone_tokens=64,
    steps=16,
    chunk=2048,
    ab_layers=8,
    experts=MIXTRAL_8X7B,
    expert_tokens=(8, 32, 256, 8192),
    product_rows=(8, 32, 256, 2048),
    images=llava_next_video(MISTRAL_7B | SHORT_TEXT, CLIP_L_336),
    states=PUBLISHED_STATES,
    state_prompts=(512, 4096),
    is_for_accelerators=True,
)
TPU = dataclasses.replace(
    ACCELERATOR,
    name="8b-tpu",
    shared_context=896,
    attention_contexts=(1024, 8192),
    page_sizes=(64, 128),
)
"""The same with pages that a TPU's kernel takes, and with contexts for which chips of 16 GB have room."""
CPU = Plan(
    name="100m",
    shape=LLAMA_100M,
    dtype="float32",
    batches=(1, 32),
    context=256,
    shared_context=240,
    prefills=(256, 1024),
    chunks=(256, 1024),
    cached=(0, 256),
    attention_batches=(32,),
    attention_contexts=(256, 1024),
    attention_calls=2,
    page_sizes=(1, 16),
    copy_bytes=2**28,
    matmul_size=2048,
    checks=(),
    check_models=(),
    sampling_rows=(1, 32),
    concurrent=Load(num_requests=8, shared_len=0, own_len=128, output_len=32),
    shared=Load(num_requests=32, shared_len=256, own_len=16, output_len=16),
    alone_tokens=32,
    steps=8,
    chunk=512,
    ab_layers=4,
    experts=MIXTRAL_8X7B | {"hidden_size": 768, "intermediate_size": 2048},
    expert_tokens=(1, 32, 256),
    product_rows=(1, 32, 256),
    images=llava_next_video(LLAMA_100M | SHORT_TEXT, CLIP_B),
    states={"delta": PUBLISHED_STATES["Qwen3.5-9B"]},
    state_prompts=(256,),
)
TRIAL = Plan(
    name="trial",
    shape=LLAMA_SMALL | {"num_hidden_layers": 1},
    dtype="float32",
    batches=(1, 4),
    context=264,
    shared_context=256,
    prefills=(64,),
    chunks=(64,),
    cached=(0, 16),
    attention_batches=(4,),
    attention_contexts=(64,),
    attention_calls=2,
    page_sizes=(1, 16),
    copy_bytes=2**20,
    matmul_size=128,
    checks=("decode", "pages-of-16"),
    check_models=("phi-2",),
    sampling_rows=(4,),
    concurrent=Load(num_requests=4, shared_len=0, own_len=40, output_len=4),
    shared=Load(num_requests=4, shared_len=256, own_len=8, output_len=4),
    alone_tokens=8,
    steps=2,
    chunk=64,
    ab_layers=1,
    experts=MIXTRAL_8X7B | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4},
    expert_tokens=(24,),
    product_rows=(4,),
    images=llava_next_video(LLAMA_SMALL | SHORT_TEXT, CLIP_SMALL),
    states={each["rule"]: each | SMALL for each in PUBLISHED_STATES.values()},
    state_prompts=(70,),
)
PLANS = {plan.name: plan for plan in (ACCELERATOR, TPU, CPU, TRIAL)}
