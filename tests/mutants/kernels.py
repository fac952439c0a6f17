"""What `python -m tests.mutants` breaks of the kernels."""

from tests.mutants.mutation import Mutation

KERNELS = (
    Mutation(
        "kernels: a query of a prompt does not see its own token",
        "jsg/kernels_pallas/attention_block.py",
        "is_visible = key <= query",
        "is_visible = key < query",
        "tests/kernels_pallas/test_ragged_paged_attention.py",
    ),
    Mutation(
        "kernels: a window is a token too long",
        "jsg/kernels_pallas/attention_block.py",
        "(key > query - window)",
        "(key >= query - window)",
        "tests/kernels_pallas/test_ragged_paged_attention.py",
    ),
    Mutation(
        "kernels: what lies behind the last key counts",
        "jsg/kernels_pallas/attention_block.py",
        "scores_MS = jnp.where(seen_MS, scores_MS, -jnp.inf)",
        "pass",
        "tests/kernels_pallas/test_paged_decode.py",
    ),
    Mutation(
        "kernels: a soft cap is not scaled",
        "jsg/kernels_pallas/attention_block.py",
        "jnp.tanh(scores_MS * (scoring.scale / scoring.softcap))",
        "jnp.tanh(scores_MS * scoring.scale)",
        "tests/kernels_pallas/test_paged_decode.py tests/kernels_pallas/test_ragged_paged_attention.py",
    ),
    Mutation(
        "kernels: a shared prefix has no weight in the sum",
        "jsg/kernels_pallas/attention_block.py",
        "total=state.total * shrink + weight,\n",
        "total=state.total * shrink,\n",
        "tests/kernels_pallas/test_cascade.py",
    ),
    Mutation(
        "kernels: splits are averaged without their weights",
        "jsg/kernels_pallas/combine.py",
        "weights = jnp.exp(lses - largest)",
        "weights = jnp.where(is_used, 1.0, 0.0)",
        "tests/kernels_pallas/test_paged_decode.py",
    ),
    Mutation(
        "kernels: rows of a group are multiplied with the kernel of the next",
        "jsg/kernels_pallas/grouped_matmul.py",
        "(ends <= tile)",
        "(ends < tile)",
        "tests/kernels_pallas/test_grouped_matmul.py",
    ),
    Mutation(
        "kernels: a device's own experts are not in front",
        "jsg/kernels_pallas/expert_routes.py",
        "starts = before - others + jnp.where(own < 0, totals.sum(), 0)",
        "starts = before",
        "tests/kernels_pallas/test_expert_routes.py",
    ),
    Mutation(
        "kernels: of equal experts the last is chosen",
        "jsg/kernels_pallas/expert_routes.py",
        "expert[None, :], padded).min(1)",
        "expert[None, :], -1).max(1)",
        "tests/kernels_pallas/test_expert_routes.py",
    ),
    Mutation(
        "kernels: the second half of a head turns the other way",
        "jsg/kernels_pallas/rotate_and_write.py",
        "(second * c + first * s)",
        "(second * c - first * s)",
        "tests/kernels_pallas/test_rotate_and_write.py",
    ),
    Mutation(
        "kernels: a value that is not finite is written",
        "jsg/kernels_pallas/rotate_and_write.py",
        "jnp.where(is_kept & is_finite, value, 0)",
        "jnp.where(is_kept, value, 0)",
        "tests/kernels_pallas/test_rotate_and_write.py",
    ),
    Mutation(
        "kernels: the largest logits are one too many",
        "jsg/kernels_pallas/token_threshold.py",
        "(places <= count)",
        "(places < count)",
        "tests/kernels_pallas/test_token_threshold.py",
    ),
    Mutation(
        "kernels: a step with tiles is sent to the decode kernel",
        "jsg/kernels_pallas/ops.py",
        "attend = ragged_paged_attention if inputs.tile_rows.shape[0] else without_tiles",
        "attend = without_tiles",
        "tests/kernels_pallas/test_ops.py",
    ),
)
