"""What a grammar process does before it reads the first grammar."""

import subprocess
import sys

import pytest

GIB = 2**30


@pytest.mark.parametrize(("allowed", "expected"), [(3 * GIB, 3 * GIB), (8 * GIB, 4 * GIB)])
def test_it_starts_where_its_user_may_have_less_memory_than_it_would_take(allowed: int, expected: int):
    """A hard limit cannot be raised, not even by asking for more than it."""
    code = (
        "import resource as r; from jsg.engine.child import grammar_process\n"
        f"r.setrlimit(r.RLIMIT_AS, ({allowed}, {allowed})); grammar_process.limit_memory()\n"
        "print(r.getrlimit(r.RLIMIT_AS)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == expected
