"""Each family on two devices computes what Hugging Face computes, by columns and by experts."""

import pytest

from tests.golden.compare import MAX_DIFFERENCE
from tests.golden.families import covering, one_of_each
from tests.golden.variants import VARIANTS
from tests.own_process import said

ODD = {"GraniteMoeForCausalLM", "MiniMaxM2ForCausalLM"}
"""Families all of whose variants have an odd number of experts."""


def test_every_family_has_a_variant_that_stands_for_it():
    assert {VARIANTS[variant]["architectures"][0] for variant in one_of_each()} == (
        {config["architectures"][0] for config in VARIANTS.values()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("are", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_two_devices_compute_what_hugging_face_computes(are: str):
    """A few families have all parts between them."""
    dense, sparse = one_of_each(), one_of_each(is_sparse=True)
    with_experts = {VARIANTS[name]["architectures"][0] for name, spec in dense.items() if spec.has_experts}
    shared = {VARIANTS[name]["architectures"][0] for name in sparse}
    assert with_experts - shared <= ODD, "a variant of each family with experts has an even number of them"
    chosen = covering if are == "few" else list
    cases = [(variant, 1) for variant in chosen(dense)] + [(variant, 2) for variant in chosen(sparse)]
    cases += [("nemotron_h_latent", 1), ("nemotron_h_latent", 2)]  # what no other family has
    found = said("tests.models.family_devices", told=cases)
    assert {case: far for case, far in zip(cases, found, strict=True) if not 0 < far <= MAX_DIFFERENCE} == {}
