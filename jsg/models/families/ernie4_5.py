"""ERNIE 4.5, dense (0.3B): Llama in which neighbours are turned together. `use_bias` means all projections."""

from jsg.models.family import PLAIN, usual

FAMILY = PLAIN.variant(
    model_type="ernie4_5",
    defaults=usual(vocab=103424, width=1024, inner=3072, layers=18, heads=16, kv_heads=2, head_dim=128, context=131072)
    | usual(eps=1e-5, theta=500_000.0, tied=True)
    | {
        "use_bias": False,
    },
    attention={"bias": "use_bias", "is_interleaved": True},
    mlp={"bias": "use_bias"},
)
