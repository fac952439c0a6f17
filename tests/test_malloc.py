"""The settings of `malloc` during the loading of a model, and that they end with it, in a separate process.

Faults of pages would tell the same only where the heap is warm, and differently for each kind of huge pages.
"""

import json
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, sys
from jsg.malloc import freed_at_once

MIB = 2**20
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def mappings_of_blocks(num_bytes):
    '''Of three blocks, one after the other: whether it is a mapping of its own, and so given back when it is freed.'''
    found = []
    for _ in range(3):
        before = libc.mallinfo2().hblks
        block = libc.malloc(num_bytes)
        found.append(libc.mallinfo2().hblks - before)
        libc.free(block)
        assert libc.mallinfo2().hblks == before
    return found

def kept_mib():
    '''What the heap keeps of 24 MiB in small blocks.'''
    blocks = [libc.malloc(MIB // 2) for _ in range(48)]
    for block in reversed(blocks):
        libc.free(block)
    return libc.mallinfo2().keepcost / MIB

def seen():
    return mappings_of_blocks(8 * MIB), mappings_of_blocks(MIB // 2), kept_mib()

with freed_at_once():
    inside = seen()
json.dump([inside, seen()], sys.stdout)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.33"), reason="only glibc from 2.33 on says what malloc holds")
def test_large_blocks_are_given_back_inside_and_kept_afterwards():
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=plain)
    (*inside, kept_inside), (*afterwards, kept_afterwards) = json.loads(done.stdout)
    assert inside == [[1, 1, 1], [0, 0, 0]]
    assert afterwards == [[0, 0, 0], [0, 0, 0]]
    assert kept_inside < 9
    assert kept_afterwards > 23
