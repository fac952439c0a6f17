"""What a request had is freed when it has ended: nothing waits for the collection of garbage."""

import gc

from jsg.sched.request import RunningRequest
from jsg.types import Request, SamplingParams
from tests.engine import small

SCORED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
KINDS = {"first": SCORED, "plain": {}, "scored": SCORED, "whole": {"is_streamed": False}}


def test_without_a_collection_nothing_of_an_ended_request_is_left(core_of):
    core = core_of()
    for kind, fields in KINDS.items():
        sampling = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
        ids = tuple(range(3, 60))
        gc.collect()  # in the first run programs are traced, which leaves frames
        gc.disable()
        try:
            for number in range(3):
                core.add(Request(rid=f"{kind}{number}", input_ids=ids, sampling=sampling, **fields))
            while core.has_work:
                core.step()
            left = [each.request.rid for each in gc.get_objects() if type(each) is RunningRequest]
            assert kind == "first" or not any(rid.startswith(kind) for rid in left), left
        finally:
            gc.enable()
    small.check_core(core)
