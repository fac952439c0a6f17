"""Compares two ways to run a program of dependent calls: sent to a server as a whole, and interpreted over HTTP."""

import random
import tempfile
import time
from pathlib import Path

import jsg as sgl
from bench import settled
from bench.report import Report
from bench.served import served

TARGET = ">= 1.5"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16


@sgl.function
def chain(s, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9):
    """Ten calls, each behind the answer of the call before."""
    for index, prompt in enumerate((p0, p1, p2, p3, p4, p5, p6, p7, p8, p9)):
        s += prompt
        s += sgl.gen(f"answer_{index}", max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)


def prompts(seed: int) -> dict[str, str]:
    """Ten texts with no common prefix, because the embedded model's tokenizer makes every digit a token."""
    rng = random.Random(seed)
    return {f"p{index}": "".join(rng.choices("0123456789", k=PROMPT_TOKENS)) for index in range(10)}


def measure_round_trips(report: Report, *, rounds: int) -> None:
    """Measures the wall time of programs on a server of the embedded model. Both ways take turns with new texts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(["serve", "tiny", "--port", "0"], log=Path(folder) / "log") as server,
        sgl.RuntimeEndpoint(server.url) as backend,
    ):
        settled.wait_until_compiled(lambda: sgl.get_server_info(backend)["internal_states"][0])
        compiled = chain.compile()
        forms = {
            "interpreted over HTTP": lambda arguments: chain.run(**arguments, backend=backend),
            "sent whole": lambda arguments: compiled.run(**arguments, backend=backend),
        }
        samples: dict[str, list[float]] = {form: [] for form in forms}
        seed = 0
        for turn in range(rounds + 2):
            for form, run in forms.items():
                arguments = prompts(seed)
                seed += 1
                started = time.perf_counter()
                state = run(arguments)
                state.sync()
                seconds = time.perf_counter() - started
                check(state)
                if turn >= 2:
                    samples[form].append(1000 * seconds)
        figures = {form: report.add(f"10 dependent calls, {form}", "ms", values) for form, values in samples.items()}
        slow, fast = figures.values()
        report.add(
            "10 dependent calls, interpreted / sent whole",
            "x",
            [slow.median / fast.median],
            of_smallest=slow.smallest / fast.smallest,
            target=TARGET,
            model="tiny",
            new_prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )


def check(state) -> None:
    """Checks that the last call had all tokens from the cache except its own new ones, either way."""
    if (failure := state.error()) is not None:
        raise failure
    meta = state.get_meta_info("answer_9")
    expected = 10 * PROMPT_TOKENS + 9 * OUTPUT_TOKENS
    if meta["completion_tokens"] != OUTPUT_TOKENS or meta["prompt_tokens"] not in (expected, expected + 1):
        raise RuntimeError(f"the last call had {meta['prompt_tokens']} tokens in and {meta['completion_tokens']} out")
