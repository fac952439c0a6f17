"""Compares `select` in one call with the published way of three: the prefix, the choices, and the choices alone."""

import time

import jsg
from bench import settled
from bench.lang.workloads import passage
from bench.report import Report

TARGET = "<= 0.5"
CONTEXT_WORDS, QUESTION_WORDS = 200, 30
CHOICES = ["the right study", "a small company", "some other program", "no government at all"]


@jsg.function
def choose(s, context, question):
    s += context + question + "\nAnswer: " + jsg.select("choice", choices=CHOICES)


def one_call(engine: jsg.Engine, context: str, question: str) -> str:
    """The way of jsg: one call that gives the exact probability of each choice."""
    state = choose.run(context, question, backend=engine)
    state.sync()
    if sum(state.get_meta_info("choice")["probabilities"]) < 0.999:
        raise RuntimeError("the probabilities do not sum to 1")
    return state["choice"]


def three_calls(engine: jsg.Engine, context: str, question: str) -> str:
    """The published `unconditional_likelihood_normalized`, with the calls that its client makes."""
    prompt = context + question + "\nAnswer: "
    nothing = {"max_new_tokens": 0, "temperature": 0}
    prefix = engine.generate(prompt, nothing)
    start = max(prefix["meta_info"]["prompt_tokens"] - 2, 0)
    scored = engine.generate(
        [prompt + choice for choice in CHOICES], nothing, return_logprob=True, logprob_start_len=start
    )
    given = [[token for token in answer["meta_info"]["input_token_logprobs"] if token[0]] for answer in scored]
    ids = [[token[1] for token in tokens] for tokens in given]
    alone = engine.generate(None, nothing, input_ids=ids, return_logprob=True, logprob_start_len=0)
    gains = []
    for tokens, answer in zip(given, alone, strict=True):
        unconditional = [token[0] or 0.0 for token in answer["meta_info"]["input_token_logprobs"]]
        gains.append(sum(one[0] - two for one, two in zip(tokens, unconditional, strict=True)) / len(tokens))
    return CHOICES[gains.index(max(gains))]


def count_calls(engine: jsg.Engine) -> list[int]:
    """How many prompts each call of a program brings to the engine, from now on."""
    model = engine.as_backend()._model
    submit, sizes = model._answer, []

    def answer(prompts):
        sizes.append(len(prompts))
        return submit(prompts)

    model._answer = answer
    return sizes


FORMS = {"one call": one_call, "three calls": three_calls}


def measure_select(report: Report, model: str, *, rounds: int, **knobs: int) -> None:
    """Measures the wall time of one choice behind a new question about a cached text. Both ways take turns."""
    context = passage(-1, CONTEXT_WORDS) + "\n"
    with settled.compiled_engine(model, **knobs) as engine:
        samples: dict[str, list[float]] = {form: [] for form in FORMS}
        calls = count_calls(engine)
        for turn in range(rounds + 2):
            for number, (form, run) in enumerate(FORMS.items()):
                question = passage(len(FORMS) * turn + number, QUESTION_WORDS)
                started = time.perf_counter()
                run(engine, context, question)
                seconds = time.perf_counter() - started
                if turn >= 2:  # in the first turns programs are not compiled and the text is not cached
                    samples[form].append(1000 * seconds)
    if len(calls) != rounds + 2:
        raise RuntimeError(f"{rounds + 2} choices should be as many calls, but were {len(calls)}")
    figures = {form: report.add(f"select of {len(CHOICES)}: {form}", "ms", values) for form, values in samples.items()}
    ours, theirs = figures.values()
    report.add(
        f"select of {len(CHOICES)}: one call / three calls",
        "x",
        [ours.median / theirs.median],
        of_smallest=ours.smallest / theirs.smallest,
        target=TARGET,
    )
