"""The list of mutations fits the code: each can be made, and the tests that it names exist."""

import pathlib

import pytest

from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_can_be_made(mutation: Mutation):
    text = (ROOT / mutation.path).read_text()
    assert mutation.applied(text) != text
    assert all((ROOT / path).exists() for path in mutation.tests.split())


def test_names_differ():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
