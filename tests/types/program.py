"""A user's program, which `make lint` gives to basedpyright and mypy.

A line with `# type: ignore` is wrong, and both must say so: they refuse a comment that ignores nothing.
"""

import jsg as sgl


@sgl.function
def capital(s: sgl.ProgramState, country: str, hint: str = "") -> None:
    with s.user():
        s += f"The capital of {country} is"
    s.assistant(sgl.gen("city", max_tokens=8, stop=".", temperature=0))
    sgl.gen(max_tokens="3")  # type: ignore
    sgl.gen("x", max_token=3)  # type: ignore
    sgl.select("x", 3)  # type: ignore
    with s.user("text"):  # type: ignore
        pass
    for branch in s.fork(2):
        branch += sgl.gen("tip", regex=sgl.REGEX_INT)
        branch.nothing()  # type: ignore
    s += 3  # type: ignore


@sgl.function(num_api_spec_tokens=64)
def plain(s, topic):
    s += sgl.system("Be brief.") + sgl.user(topic) + sgl.assistant(sgl.select("kind", ["a", "b"]))


@sgl.function
async def later(s: sgl.ProgramState, topic: str) -> None:
    s += topic
    await s.aget("x")


def main() -> None:
    state = capital.run("France", hint="It has a tower.")
    text: str = state.text()
    print(text, state["city"], state.get_meta_info("city"))
    capital.run(3)  # type: ignore
    capital.run("France", cuontry="Spain")  # type: ignore
    capital.run()  # type: ignore
    capital("France", 3)  # type: ignore
    state["city"].upper()
    state[0]  # type: ignore
    with sgl.Engine() as engine:
        capital.run("France", backend=engine, temperature=0.5)
        capital.run(country="France", max_new_tokens=4, stream=True)
        capital.run("France", temperature="hot")  # type: ignore
        sgl.set_default_backend(engine)
        sgl.set_default_backend(3)  # type: ignore
    for each in capital.run_batch([{"country": "France"}, ("Spain",)], num_threads=4, temperature=0):
        print(each.text())
        each.nothing()  # type: ignore
    capital.run_batch([{"country": "France"}], num_thread=4)  # type: ignore
    compiled = capital.compile(hint="")
    print(compiled.run(country="France", backend=None).text())
    compiled.nothing()  # type: ignore
    plain.run("bees")
    plain.run(1, 2, 3)  # type: ignore
    sgl.nothing()  # type: ignore


async def alone() -> None:
    state = await later.arun("bees", temperature=1)
    print(await state.atext())
    await later.arun(1)  # type: ignore
    for each in await later.arun_batch([{"topic": "ants"}], num_threads=2):
        print(await each.aget("x"))
    async for each in await later.arun_batch([("ants",)], generator_style=True):
        each.nothing()  # type: ignore


def others(s: sgl.ProgramState) -> None:
    s += sgl.image("photo.jpg") + sgl.gen_int("n", max_tokens=4) + sgl.gen("d", dtype=float)
    s += sgl.gen_string("n", stop=3)  # type: ignore
    with s.var_scope("all"), s.copy() as branch:
        branch += sgl.unordered()
    sgl.SamplingParams(temperature=0.5, max_new_tokens=3)
    sgl.SamplingParams(temprature=0.5)  # type: ignore
    backends: list[object] = [
        sgl.RuntimeEndpoint("http://127.0.0.1:30000"),
        sgl.OpenAI("gpt-6"),
        sgl.Anthropic("claude"),
    ]
    sgl.RuntimeEndpoint(3)  # type: ignore
    is_done: bool = sgl.flush_cache()
    print(backends, is_done, sgl.get_server_info()["model"], sgl.greedy_token_selection, sgl.__version__.upper())
