"""Keeps programs in flight and prints what that costs as JSON: `python -m bench.lang.in_flight async|sync COUNT`."""

import asyncio
import json
import os
import sys
import time

import jsg as sgl
from bench.lang.null_backend import ANSWER, NullBackend
from bench.lang.workloads import passage
from bench.served import usage_of

PROMPT_WORDS = 200
NUM_EXTENDS = 10
LIMIT_S = 120


def write(s, seed):
    """Appends what both forms ask for: a prompt of some pieces, and a gen."""
    for index in range(NUM_EXTENDS):
        s += passage(seed * NUM_EXTENDS + index, PROMPT_WORDS // NUM_EXTENDS)
    s += sgl.gen("answer", max_tokens=8)


@sgl.function
def sync_program(s, seed):
    write(s, seed)
    return s["answer"]


@sgl.function
async def async_program(s, seed):
    write(s, seed)
    return await s.aget("answer")


def wait_for(backend: NullBackend, count: int) -> None:
    """Waits until this number of gens wait."""
    end = time.monotonic() + LIMIT_S
    while backend.num_waiting < count:
        if time.monotonic() > end:
            raise TimeoutError(f"only {backend.num_waiting} of {count} programs came to their gen")
        time.sleep(0.01)


def main(form: str, count: int) -> None:
    from jsg.lang.streams.loop import shared_loop

    backend = NullBackend(is_gated=True)
    before = usage_of(os.getpid())
    batch = [{"seed": seed} for seed in range(count)]
    found = {}

    def look() -> None:
        wait_for(backend, count)
        usage = usage_of(os.getpid())
        found.update(rss=usage.rss, num_threads=usage.num_threads)
        shared_loop().submit(backend.release()).result()

    async def look_beside() -> list[sgl.ProgramState]:
        programs = asyncio.ensure_future(async_program.arun_batch(batch, num_threads=count, backend=backend))
        await asyncio.to_thread(look)
        return await programs

    if form == "async":
        states = asyncio.run(look_beside())
    else:
        import threading

        looking = threading.Thread(target=look)
        looking.start()
        states = sync_program.run_batch(batch, num_threads=count, backend=backend)
        looking.join()
    answers = [state.ret_value for state in states]
    if answers != [ANSWER] * count:
        raise RuntimeError("some programs have no answer")
    print(json.dumps(found | {"rss_before": before.rss}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
