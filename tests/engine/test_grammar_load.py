"""Thousands of different grammars one after another: none is kept for ever, on either side."""

import asyncio
import gc
import json
import resource
from pathlib import Path

import numpy as np
import pytest

from jsg.constrained.compiler import compile_grammar
from jsg.engine.grammars import GrammarCompiler
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import bits, odd_vocabulary

NUM_SCHEMAS = 10_000
NUM_GRAMMARS = 2_000
AT_ONCE = 50
GROWTH_BYTES = 24 << 20
"""Above what a process had after the first fifth: room for the caches that were not yet full, and for the allocator."""

pytestmark = pytest.mark.slow


def schema(number: int) -> GrammarSpec:
    properties = {f"name{number}": {"type": "string", "maxLength": 1 + number % 50}, "kind": {"enum": [number, "b"]}}
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return GrammarSpec("json_schema", json.dumps(closed))


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_schemas_leave_the_memory_of_front_and_processes_flat():
    async def use() -> tuple[list[dict[int | str, int]], int]:
        compiler = GrammarCompiler(cache_bytes=4 << 20)
        compiler._queue._quick_s = 600.0  # however busy the machine is, two processes do all
        await compiler.warm()
        levels: list[dict[int | str, int]] = []
        try:
            for begin in range(0, NUM_SCHEMAS, AT_ONCE):
                await asyncio.gather(*(compiler.tables(schema(i)) for i in range(begin, begin + AT_ONCE)))
                if (begin + AT_ONCE) % (NUM_SCHEMAS // 5) == 0:
                    pids = sorted(compiler.workers.pids)
                    levels.append({"self": resident_bytes()} | {pid: resident_bytes(pid) for pid in pids})
            assert compiler._cached_bytes <= 4 << 20
        finally:
            await compiler.close()
        return levels, compiler.num_compiled

    levels, num_compiled = asyncio.run(use())
    assert num_compiled == NUM_SCHEMAS
    assert len(levels) == 5 and len(levels[0]) == 3, "no process may have ended"
    assert levels[-1].keys() == levels[0].keys()
    growth = {who: size - levels[0][who] for who, size in levels[-1].items()}
    assert max(growth.values()) <= GROWTH_BYTES, growth


def test_grammars_that_were_dropped_leave_nothing_in_the_vocabulary_they_shared():
    vocabulary = odd_vocabulary()
    eos_ids = set(vocabulary.eos_ids)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    after_some = 0
    for number in range(NUM_GRAMMARS):
        masker = compile_grammar(schema(number), vocabulary).new_masker()
        for _ in range(5):
            assert masker.fill_mask(mask)
            assert masker.accept(min(bits(mask) - eos_ids))
        if number == NUM_GRAMMARS // 5:
            gc.collect()
            after_some = resident_bytes()
    gc.collect()
    assert resident_bytes() - after_some <= GROWTH_BYTES
