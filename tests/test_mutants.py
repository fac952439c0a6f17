"""The list of mutations fits the code: each can be made, and the tests that it names exist."""

from tests.mutants import ROOT, mutations


def test_each_mutation_can_be_made_and_has_a_name_of_its_own():
    for mutation in mutations():
        text = (ROOT / mutation.path).read_text()
        assert mutation.applied(text) != text, mutation.name
        assert all((ROOT / path).exists() for path in mutation.tests.split()), mutation.name
    assert len({mutation.name for mutation in mutations()}) == len(mutations()) > 100
