"""The bench of many grammars: that all schemas differ, and that it finds the plateau, or growth where there is none."""

import json

from bench.grammar_memory import MIN_SETTLED, Sample, kib_per_grammar, on_plateau, problems_of, schema
from jsg.constrained.compiler import compile_tables
from jsg.types import GrammarSpec

MOST = 2000


def samples_of(*, after: float, known: int = MOST) -> list[Sample]:
    """The engine grows by 50 KiB a grammar until it knows `known` of them, and by `after` from then on."""
    made = []
    for sent in range(0, 6000, 500):
        grown = 50 * min(sent, MOST) + after * max(sent - MOST, 0)
        made.append(Sample(sent, min(sent, known), 0.0, {"front": 60.0, "engine": 400 + grown / 1024}))
    return made


def test_schemas_differ_and_compile():
    schemas = [json.dumps(schema(0, number)) for number in range(200)]
    assert len(set(schemas)) == 200 and schemas[7] == json.dumps(schema(0, 7)) != json.dumps(schema(1, 7))
    assert compile_tables(GrammarSpec("json_schema", schemas[0])).num_bytes > 1000


def test_the_plateau_begins_when_the_engine_has_all_that_it_keeps():
    samples = samples_of(after=0)
    assert on_plateau(samples)[0].num_sent == MOST
    assert kib_per_grammar(samples[:MIN_SETTLED], "engine") == 50
    assert problems_of(samples) == []


def test_growth_on_the_plateau_is_a_problem():
    [problem] = problems_of(samples_of(after=2))
    assert problem.startswith("engine: anonymous memory grows by 2.0 KiB")


def test_a_run_without_a_plateau_is_a_problem():
    [problem] = problems_of(samples_of(after=0, known=10**9))
    assert "send more" in problem
