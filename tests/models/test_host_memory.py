"""What loading a model asks of `malloc`, and that it is over afterwards; in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from jsg.models.host_memory import freed_at_once

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(2**20)  # 8 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with freed_at_once():
    inside = faults()
print(inside, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_blocks_are_given_back_inside_and_kept_afterwards():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    inside, afterwards = map(int, done.stdout.split())
    assert afterwards < inside / 4
