"""Thousands of different grammars one after another: none is kept for ever, on either side."""

import asyncio
import gc
import json
import resource
from pathlib import Path

import numpy as np
import pytest

from jsg.constrained.compiler import compile_grammar, compile_tables
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.types import FinishType, GrammarSpec, Request
from tests.constrained.vocabularies import bits, odd_vocabulary
from tests.engine import lettered, small
from tests.engine.front.background import idle_pids, note_compilations
from tests.engine.lettered import greedy

NUM_SCHEMAS = 3_000
NUM_GRAMMARS = 2_000
AT_ONCE = 50
IN_ENGINE = 4
ANSWER_S = 60.0
"""The most that any of them may take, all that are before it included, on a busy machine too."""
GROWTH_BYTES = 24 << 20
"""Above what a process had after the first fifth: room for the caches that were not yet full, and for the allocator."""

pytestmark = pytest.mark.slow


def schema(number: int) -> GrammarSpec:
    properties = {f"name{number}": {"type": "string", "maxLength": 1 + number % 50}, "kind": {"enum": [number, "b"]}}
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return GrammarSpec("json_schema", json.dumps(closed))


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_thousands_of_schemas_leave_the_memory_of_front_and_processes_flat():
    async def use() -> tuple[list[dict[int | str, int]], int]:
        compiler = GrammarCompiler(cache_bytes=4 << 20)
        compiled = note_compilations(compiler)
        compiler._queue._quick_s = 600.0  # however busy the machine is, two processes do all
        await compiler.warm()
        levels: list[dict[int | str, int]] = []
        try:
            for begin in range(0, NUM_SCHEMAS, AT_ONCE):
                schemas = map(schema, range(begin, begin + AT_ONCE))
                await asyncio.gather(*(asyncio.wait_for(compiler.tables(each), ANSWER_S) for each in schemas))
                if (begin + AT_ONCE) % (NUM_SCHEMAS // 5) == 0:
                    pids = sorted(idle_pids(compiler.workers))
                    levels.append({"self": resident_bytes()} | {pid: resident_bytes(pid) for pid in pids})
            assert compiler._cache.num_bytes <= 4 << 20
        finally:
            await compiler.close()
        return levels, len(compiled)

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
            assert masker.fill_mask(mask) and masker.accept(min(bits(mask) - eos_ids))
        if number == NUM_GRAMMARS // 5:
            gc.collect()
            after_some = resident_bytes()
    gc.collect()
    assert resident_bytes() - after_some <= GROWTH_BYTES


@pytest.mark.long  # it is a soak; the two before find what grammars leave behind in their own code
def test_thousands_of_schemas_leave_the_memory_of_an_engine_flat_and_a_stream_flowing(new_taught_core_of):
    core = new_taught_core_of(**small.DETERMINISTIC)
    keys: dict[str, str] = {}
    after_some, num_sent, num_streams, num_ended = 0, 0, 0, 0
    stream, begun = "", set[str]()
    while num_ended < NUM_SCHEMAS:
        if not stream:
            stream, num_streams = f"stream {num_streams}", num_streams + 1
            free = greedy(grammar=None, max_new_tokens=200, ignore_eos=True)
            core.add(Request(rid=stream, input_ids=(3, 4, 5), sampling=free))
        while num_sent < NUM_SCHEMAS and len(keys) < IN_ENGINE - 1:
            spec, rid = schema(num_sent), str(num_sent)
            core.grammars.add_grammar(spec.key, compile_tables(spec).to_bytes())
            prompt = (7, 8, 9 + num_sent % 80)
            core.add(Request(rid=rid, input_ids=prompt, sampling=greedy(grammar=spec, max_new_tokens=3)))
            keys[rid], num_sent = spec.key, num_sent + 1
        outputs = {output.rid: output for output in core.step()}
        begun.update(rid for rid in outputs if rid not in keys)
        assert stream not in begun or len(outputs[stream].token_ids) == 1, "the stream has no token in this step"
        for rid in [rid for rid, output in outputs.items() if output.finish is not None and rid in keys]:
            assert outputs[rid].finish.type is not FinishType.ERROR
            core.grammars.forget_grammars([keys.pop(rid)])
            num_ended += 1
            if num_ended == NUM_SCHEMAS // 5:
                gc.collect()
                after_some = resident_bytes()
        stream = "" if stream in outputs and outputs[stream].finish is not None else stream
    assert len(core.grammars._grammars) == len(lettered.GRAMMARS)
    gc.collect()
    assert resident_bytes() - after_some <= GROWTH_BYTES
