"""Holds in a real engine: later requests find the held prefix, and it never keeps them from running."""

from collections.abc import Callable

from jsg.engine.core import EngineCore
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams
from tests.engine import small
from tests.engine.small import check_core

PROMPT = tuple(2 + i * 7 % (small.VOCAB - 2) for i in range(40))


def hold(rid: str, tokens: tuple[int, ...] = PROMPT) -> Request:
    return Request(rid=rid, input_ids=tokens, sampling=SamplingParams(max_new_tokens=0), hold=True)


def generate(rid: str, tokens: tuple[int, ...], max_new: int = 8) -> Request:
    return Request(rid=rid, input_ids=tokens, sampling=SamplingParams(max_new_tokens=max_new, ignore_eos=True))


def steps(core: EngineCore) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while core.has_work:
        outputs += core.step()
        check_core(core)
    return outputs


def test_a_held_prompt_is_found_by_its_branches(core_of: Callable[..., EngineCore]):
    core = core_of(**small.DETERMINISTIC)
    core.add(hold("held"))
    (kept,) = steps(core)
    assert kept.finish is None and not kept.token_ids
    assert (kept.prompt_tokens, kept.cached_tokens) == (40, 0)
    assert core.stats()["num_holds"] == 1 and core.stats()["num_protected_tokens"] == 40
    for branch in range(3):
        core.add(generate(f"branch {branch}", (*PROMPT, 50 + branch)))
    assert {output.cached_tokens for output in steps(core)} == {40}
    core.abort("held")
    (ended,) = steps(core)
    assert ended.finish == FinishReason(FinishType.ABORT, message="aborted")
    assert core.stats()["num_holds"] == 0 == core.stats()["num_protected_tokens"]


def test_a_hold_changes_no_answer_and_gives_way(core_of: Callable[..., EngineCore]):
    core = core_of(**small.DETERMINISTIC, max_total_tokens=128)
    request = generate("long", tuple(range(2, 62)), max_new=50)
    expected = small.alone(core, request).token_ids
    before = core.stats()["num_holds_broken"]
    core.add(hold("held"))
    steps(core)
    core.add(request)
    outputs = steps(core)
    assert [token for output in outputs if output.rid == "long" for token in output.token_ids] == expected
    assert [output.finish for output in outputs if output.rid == "held"] == [FinishReason(FinishType.STOP)]
    assert core.stats()["num_holds_broken"] == before + 1


def test_flushing_the_cache_ends_holds(core_of: Callable[..., EngineCore]):
    core = core_of(**small.DETERMINISTIC)
    core.add(hold("held"))
    steps(core)
    assert core.flush_cache() and core.stats()["num_cached_tokens"] == 0
    assert [output.finish for output in steps(core)] == [FinishReason(FinishType.STOP)]
