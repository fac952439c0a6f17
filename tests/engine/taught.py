"""Engines of the small model that know the grammars of `lettered.py`: how tests run requests and judge answers."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jsg.engine.core import EngineCore
from jsg.types import FinishType, JumpForward, Request
from tests.engine.integrity import check_store
from tests.engine.lettered import Outcome, greedy, matches, traffic, with_jump
from tests.engine.small import DETERMINISTIC, SMALL_POOL, check_core

Alone = Callable[[Request], Outcome]
BUSY = {**DETERMINISTIC, "speculative": "auto", **SMALL_POOL, "chunked_prefill_size": 23}


def request(rid: str = "a", prompt: int = 5, **fields: object) -> Request:
    reports = {name: fields.pop(name) for name in list(fields) if name in Request.__dataclass_fields__}
    return Request(rid=rid, input_ids=tuple(range(3, 3 + prompt)), sampling=greedy(**fields), **reports)  # pyright: ignore[reportArgumentType]


def run(
    core: EngineCore, arrivals: list[tuple[int, Request]], aborts: dict[str, int] | None = None
) -> dict[str, Outcome]:
    """As `small.run`, with what grammars report. What an engine has said of a request stays so."""
    outcomes = {each.rid: Outcome() for _, each in arrivals}
    waiting, step = sorted(arrivals, key=lambda arrival: arrival[0]), 0
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= step:
            core.add(waiting.pop(0)[1])
        for rid in [rid for rid, when in (aborts or {}).items() if when == step]:
            core.abort(rid)
        for output in core.step():
            outcomes[output.rid].add(output)
        for running in core.scheduler.running:
            said = running.tokens[running.num_prompt : running.num_known].tolist()
            assert said == outcomes[running.request.rid].token_ids, "a token that was given out has changed"
        check_core(core)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert core.scheduler.table.num_uncached_pages == 0, "a finished request still holds pages"
    assert not core.grammars._live, "a finished request still has a masker"
    check_store(core.grammars._grammars)
    return outcomes


def outcome_of(core: EngineCore, each: Request) -> Outcome:
    assert core.flush_cache()
    return run(core, [(0, each)])[each.rid]


def text_of(core: EngineCore, outcome: Outcome) -> bytes:
    vocabulary = core.grammars._grammars.lexicon.vocabulary
    return b"".join(vocabulary.text_of(token) for token in outcome.token_ids)


def check_matches(core: EngineCore, each: Request, outcome: Outcome) -> None:
    """Checks that answers which ended by themselves match the grammar."""
    if each.sampling.grammar is None or outcome.finish is None or each.sampling.stop_token_ids:
        return
    assert outcome.finish.type is not FinishType.ERROR
    if outcome.finish.type is FinishType.STOP:
        assert matches(each, text_of(core, outcome))
        assert outcome.is_complete or not each.sampling.return_constraint


def random_aborts(seed: int, arrivals: list[tuple[int, Request]]) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    return {each.rid: when + int(rng.integers(0, 30)) for when, each in arrivals if rng.random() < 0.2}


def check_bitwise(busy: EngineCore, alone: Alone, seed: int, jump: JumpForward = "draft") -> None:
    """Compares the answers of traffic with those of each request alone, without drafts."""
    arrivals = traffic(seed, count=12, jump=jump)
    outcomes = run(busy, arrivals, random_aborts(seed, arrivals))
    for _, each in arrivals:
        outcome, expected = outcomes[each.rid], dataclasses.replace(alone(with_jump(each, "off")))
        assert outcome.finish is not None
        if outcome.finish.type is FinishType.ABORT:
            count = len(outcome.token_ids)
            assert outcome.token_ids == expected.token_ids[:count]
            continue
        check_matches(busy, each, outcome)
        assert expected.num_forced == 0 and (jump == "draft" or outcome.num_forced == 0)
        expected.num_forced, expected.cached_tokens = outcome.num_forced, outcome.cached_tokens
        assert outcome == expected
