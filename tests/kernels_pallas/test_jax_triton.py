"""The exit from Pallas' Triton lowering, in Triton's interpreter against attention by its definition."""

import os

import pytest

pytest.importorskip("jax_triton", reason="`make test-long` runs it in an environment that has jax-triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from bench import attention_cases as cases
from jsg.kernels_pallas.paged_decode import Sizes
from tests.kernels_pallas.definition import check, named
from tests.kernels_pallas.jax_triton_decode import paged_decode

pytestmark = pytest.mark.long


@pytest.mark.parametrize("case", [case for case in cases.DECODE if not case.has_sinks], ids=lambda case: case.name)
@pytest.mark.parametrize(("splits", "block_k"), [(1, 64), (3, 16)])
def test_equals_the_definition_in_the_whole_table(case: cases.Case, splits: int, block_k: int):
    check(paged_decode, case, Sizes(splits, block_k, num_warps=4, num_stages=3), has_room=False)


@pytest.mark.parametrize(
    ("model", "name", "dtype", "pool_dtype"),
    [
        ("llama-3-8b", "decode", "bfloat16", None),
        ("phi-3-mini", "decode-pages-of-64", "bfloat16", None),
        ("llama-3-8b", "decode-pages-of-16", "bfloat16", "float8_e4m3fn"),
        ("gemma-2b", "decode-softcap", "bfloat16", "float8_e5m2"),
    ],
)
def test_equals_the_definition_with_the_heads_of_real_models(model: str, name: str, dtype: str, pool_dtype: str | None):
    case = cases.for_model(named(name), model)
    check(paged_decode, case, Sizes(2, 32, num_warps=4, num_stages=3), dtype, pool_dtype, has_room=False)
