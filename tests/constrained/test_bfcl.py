"""The tools of the Berkeley Function Calling Leaderboard: all compile but those that are named here."""

import json

import pytest

from tests.constrained import bfcl

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def all_tools() -> list[bfcl.Tool]:
    folder = bfcl.data()
    if folder is None:
        pytest.skip("`make test-long` runs it in an environment that has bfcl-eval")
    return bfcl.tools(folder)


@pytest.mark.parametrize("dialect", bfcl.styles(), ids=lambda dialect: dialect.name)
def test_tools_that_compile(all_tools: list[bfcl.Tool], dialect: bfcl.Dialect) -> None:
    committed = json.loads(bfcl.BOARD.read_text())
    assert len(all_tools) == committed["tools"]
    assert bfcl.counts(all_tools, dialect) == committed[dialect.name]
