"""What is measured on which kind of device: shapes, loads and targets. No JAX: the coordinator imports it."""

import dataclasses
from typing import Any

from bench.device.shapes import CLIP_L_336, MISTRAL_7B, MIXTRAL_8X7B
from bench.shapes import CLIP_B, CLIP_SMALL, LLAMA_8B, LLAMA_100M, LLAMA_SMALL, llava_next_video

FIT_FRACTION = 0.6
"""Weights and pool together, of the device's memory: JAX reserves three quarters of it, and needs temporaries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent all at once; their prompts begin with the same `shared_len` tokens."""

    num_requests: int
    shared_len: int
    own_len: int
    output_len: int

    @property
    def prompt_len(self) -> int:
        """Tokens of one prompt."""
        return self.shared_len + self.own_len

    @property
    def total_len(self) -> int:
        """Tokens of one request at its end."""
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on this kind of device. All lengths are in tokens.

    Attributes:
        name: Of the plan.
        shape: The model's config.json.
        dtype: Of weights, activations and KV pool.
        batches: Rows of the decode steps that are measured.
        context: Tokens that each of those rows has cached.
        shared_context: How many of them all rows share where prefixes are read together.
        prefills: Lengths of the prompts that are measured.
        attention_batches: Rows of `paged_decode` alone.
        attention_contexts: Its cached tokens.
        attention_calls: How many times it runs in one program; twice as many programs wait in a queue; at most.
        page_sizes: Of the pool, for `paged_decode` alone; after the first only with the extremes of the others.
        copy_bytes: Array that is copied for the bandwidth.
        matmul_size: Rows, columns and depth of the matmul for the rate.
        checks: Cases of `bench.attention_cases` whose results are checked; empty for all.
        check_models: Those of its models that are checked in addition, with heads of their own.
        sampling_rows: Rows of logits.
        concurrent: Independent requests.
        shared: Requests with one prefix.
        alone_tokens: Tokens that one request alone generates.
        steps: Decode steps of the engine that are timed together.
        chunk: Most prompt tokens in one step of the engine.
        ab_layers: Layers of the model that compiler options, and types of kernels, are compared on.
        experts: The config.json of a model with experts, for the parts of one layer.
        expert_tokens: Tokens that choose among them.
        product_rows: Rows that are multiplied with kernels in 8 bits, and in longer types.
        images: The config.json of a model that sees, for its encoder.
        is_for_accelerators: A CPU would take hours; and the targets of the project are meant for this shape.
    """

    name: str
    shape: dict[str, Any]
    dtype: str
    batches: tuple[int, ...]
    context: int
    shared_context: int
    prefills: tuple[int, ...]
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
    is_for_accelerators: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def pool_tokens(self) -> int:
        """KV slots for the largest batch and the longest prefill."""
        return max(max(self.batches) * (self.context + 1), *self.prefills)

    @property
    def max_running(self) -> int:
        """Requests in one step of the engine, at most."""
        return max(*self.batches, self.concurrent.num_requests, self.shared.num_requests)

    @property
    def engine_context(self) -> int:
        """Tokens of one request in the engine, at most."""
        return max(self.context + 16 * self.steps, self.concurrent.total_len, self.shared.total_len) + 1

    @property
    def engine_pool_tokens(self) -> int:
        """KV slots for the most demanding load of the engine, and some to spare."""
        decoding = max(self.batches) * (self.context + 16 * self.steps)
        loads = [load.num_requests * load.total_len for load in (self.concurrent, self.shared)]
        return max(decoding, *loads) + self.engine_context

    def with_layers(self, count: int) -> "Plan":
        """The same with another number of layers."""
        return dataclasses.replace(self, shape=self.shape | {"num_hidden_layers": count})

    def fit(self, limit_bytes: int | None) -> "Plan":
        """The plan with as many layers as fit into the memory of the device; `limit_bytes` None is no limit."""
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
        """What `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Plan":
        """The plan that `as_json` described."""
        changed: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        changed |= {name: Load(**fields[name]) for name in ("concurrent", "shared")}
        return cls(**(fields | changed))


SHORT_TEXT = {"num_hidden_layers": 1, "vocab_size": 1024}
"""What is left of the text model where an encoder is measured: the width of its rows."""

ACCELERATOR = Plan(
    name="8b",
    shape=LLAMA_8B,
    dtype="bfloat16",
    batches=(1, 32, 256),
    context=1024,
    shared_context=1008,
    prefills=(8192, 4096, 2048, 1024),
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
    is_for_accelerators=True,
)
CPU = Plan(
    name="100m",
    shape=LLAMA_100M,
    dtype="float32",
    batches=(1, 32),
    context=256,
    shared_context=240,
    prefills=(256, 1024),
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
)
TRIAL = Plan(
    name="trial",
    shape=LLAMA_SMALL | {"num_hidden_layers": 1},
    dtype="float32",
    batches=(1, 4),
    context=264,
    shared_context=256,
    prefills=(64,),
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
)
PLANS = {plan.name: plan for plan in (ACCELERATOR, CPU, TRIAL)}
