"""The list of mutations fits the code: each can be made, and the tests that it names exist."""

import pathlib

from tests.mutants.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parents[1]


def test_each_mutation_can_be_made():
    for mutation in MUTATIONS:
        text = (ROOT / mutation.path).read_text()
        assert mutation.applied(text) != text, mutation.name
        assert all((ROOT / path).exists() for path in mutation.tests.split()), mutation.name


def test_names_differ():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
