"""How programs fail and how they are cancelled."""

import inspect
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import jsg as sgl
from jsg.errors import AbortedError, ConfigError, JsgError, ProgramError, UnknownVariableError
from tests.lang.scripted import Gate, ScriptedBackend


class BrokenError(JsgError):
    pass


def fail_at(*names: str) -> ScriptedBackend:
    def answer(prompt, gen):
        if gen.name in names:
            raise BrokenError(f"no {gen.name}")
        return f"{gen.name}!"

    return ScriptedBackend(answer)


def line_of(function: sgl.SglFunction, text: str) -> str:
    """The place of the line of a program that holds a text, as errors name it."""
    lines, start = inspect.getsourcelines(function.func)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"in the program: {__file__}:{start + offset}"


def test_f1_the_real_error_is_raised_at_the_read_with_the_line_of_the_program():
    @sgl.function
    def program(s):
        s += sgl.gen("good")
        s += "text" + sgl.gen("bad")  # HERE
        s += sgl.gen("after")

    backend = fail_at("bad")
    state = program.run(backend=backend)
    assert state["good"] == "good!"
    for name in ("bad", "after"):
        with pytest.raises(BrokenError, match="no bad") as caught:
            state[name]
        assert caught.value.__notes__ == [line_of(program, "HERE")]
    texts = (lambda: list(state.text_iter()), lambda: list(state.text_iter("after")))
    for read in (state.text, state.messages, state.sync, *texts):
        with pytest.raises(BrokenError):
            read()
    assert isinstance(state.error(), BrokenError)
    backend.wait_closed()
    assert [call.what.name for call in backend.calls] == ["good", "bad"]


def test_f1_reading_a_name_that_is_never_set_says_so():
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        with pytest.raises(UnknownVariableError, match=r"has not set a variable 'y'; it has 'x'"):
            s["y"]

    state = program.run(backend=ScriptedBackend())
    with pytest.raises(KeyError, match="ended without 'y'") as caught:
        state["y"]
    assert isinstance(caught.value, ProgramError)
    with pytest.raises(UnknownVariableError):
        list(state.text_iter("y"))


def test_the_traceback_of_an_error_does_not_grow_with_every_read():
    @sgl.function
    def program(s):
        s += sgl.gen("bad")

    state = program.run(backend=fail_at("bad"))
    lengths = set()
    for _ in range(5):
        with pytest.raises(BrokenError) as caught:
            state["bad"]
        trace, length = caught.value.__traceback__, 0
        while trace is not None:
            trace, length = trace.tb_next, length + 1
        lengths.add(length)
    assert len(lengths) == 1


def test_a_failed_branch_neither_hangs_nor_fails_its_siblings():
    @sgl.function
    def program(s):
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += sgl.gen("bad" if i == 1 else "x")
            fork["y"] = i
        forks.join()
        assert s["x"] == ["x!", None, "x!"] and s["y"] == [0, 1, 2]
        with pytest.raises(BrokenError) as caught:
            s["bad"]
        assert "test_interpreter_errors.py" in caught.value.__notes__[0]
        assert [type(fork.error()) for fork in forks] == [type(None), BrokenError, type(None)]
        s += "goes on"

    state = program.run(backend=fail_at("bad"))
    assert state.text() == "goes on" and state.error() is None


def test_forks_of_a_failed_prompt_fail_with_it():
    @sgl.function
    def program(s):
        s += sgl.gen("bad")
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join()

    backend = fail_at("bad")
    state = program.run(backend=backend)
    with pytest.raises(BrokenError):
        state["x"]
    backend.wait_closed()


def test_concate_and_append_needs_every_branch():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += lambda i: sgl.gen("bad" if i else "x")
        forks.join("concate_and_append")
        s += sgl.gen("y")

    backend = fail_at("bad")
    state = program.run(backend=backend)
    with pytest.raises(BrokenError):
        state["y"]
    backend.wait_closed()


def test_an_error_of_the_body_leaves_run_and_aborts_what_runs():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "never"

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        states.append(s)
        gate.wait_reached()
        raise ValueError("mine")

    states = []
    backend = ScriptedBackend(answer)
    with pytest.raises(ValueError, match="mine"):
        program.run(backend=backend)
    with pytest.raises(ValueError, match="mine"):
        states[0]["x"]
    assert isinstance(states[0].error(), ValueError)
    backend.wait_closed()
    assert [gen.name for gen in backend.aborted] == ["x"]


def test_opening_a_session_may_fail():
    class Closed(ScriptedBackend):
        def open(self, *, num_api_spec_tokens=None):
            raise BrokenError("cannot open")

    @sgl.function
    def program(s):
        s += sgl.gen("x")

    with pytest.raises(BrokenError, match="cannot open"):
        program.run(backend=Closed())["x"]


def test_a_program_needs_a_backend():
    @sgl.function
    def program(s):
        s += "x"

    with pytest.raises(ConfigError, match="set_default_backend"):
        program.run()
    with pytest.raises(ConfigError, match="but got str"):
        program.run(backend="engine")
    backend = ScriptedBackend()
    sgl.set_default_backend(backend)
    try:
        assert program.run().text() == "x"
        assert sgl.flush_cache() and sgl.get_server_info()["model_path"] == "scripted" and backend.num_flushes == 1
    finally:
        sgl.set_default_backend(None)


def waiting_backend() -> tuple[ScriptedBackend, Gate]:
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return "late"

    return ScriptedBackend(answer), gate


def test_cancelling_a_program_aborts_its_requests_and_those_of_its_forks():
    backend, gate = waiting_backend()
    states = []

    @sgl.function
    def inner(s):
        s += sgl.gen("inner")

    @sgl.function
    def program(s):
        s += "p"
        s["known"] = 1
        forks = s.fork(2)
        forks += sgl.gen("x")
        s += sgl.gen("y")
        states.extend([*forks, inner()])
        inner()  # what nobody can read any more is aborted as well
        s.fork(1)[0].extend(sgl.gen("z"))
        gate.wait_reached(5)
        return forks

    state = program.run(backend=backend)
    state.cancel()
    for one, name in ((state, "y"), (states[0], "x"), (states[1], "x"), (states[2], "inner")):
        with pytest.raises(AbortedError, match="cancelled"):
            one[name]
        with pytest.raises(AbortedError, match="cancelled"):
            one.sync()
    assert state["known"] == 1
    backend.wait_closed()
    assert sorted(gen.name for gen in backend.aborted) == ["inner", "inner", "x", "x", "y"]
    assert "z" not in [call.what.name for call in backend.calls if call.kind == "generate"]


def test_cancelling_one_branch_leaves_the_others():
    backend, gate = waiting_backend()

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += sgl.gen("x")
        gate.wait_reached(2)
        forks[0].cancel()
        with pytest.raises(AbortedError):
            forks[0]["x"]
        gate.open()
        assert forks[1]["x"] == "late"
        with pytest.raises(AbortedError):
            forks[0].extend("more")

    program.run(backend=backend).sync()
    assert len(backend.aborted) == 1


def test_cancelling_what_has_not_begun_keeps_it_from_beginning():
    backend, gate = waiting_backend()

    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.gen("y")
        fork = s.fork(1)[0]
        fork += sgl.gen("z")
        gate.wait_reached()
        s.cancel()
        for state, name in ((s, "x"), (s, "y"), (fork, "z")):
            with pytest.raises(AbortedError):
                state[name]
            with pytest.raises(AbortedError):
                state.sync()

    program.run(backend=backend)
    backend.wait_closed()
    assert len(backend.calls) == 1


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, though a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("reads_inside", [True, False])
def test_an_interrupt_while_reading_aborts(reads_inside):
    backend, gate = waiting_backend()

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        variables.append(s._stream.variables["x"])
        if reads_inside:
            s["x"]

    variables = []  # what is read, from inside the program or behind it

    def interrupt() -> None:
        gate.wait_reached()
        while not (variables and variables[0].is_wanted):  # between two statements it would interrupt no read
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- it comes in one of the two
        state = program.run(backend=backend)
        state["x"]
    thread.join()
    backend.wait_closed()
    assert [gen.name for gen in backend.aborted] == ["x"]


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_a_batch_cancels_all_of_it():
    backend, gate = waiting_backend()
    started = []

    @sgl.function
    def program(s, i):
        started.append(i)
        s += sgl.gen("x")
        s["x"]

    def interrupt() -> None:
        gate.wait_reached(3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([(i,) for i in range(10)], num_threads=3, backend=backend)
    thread.join()
    backend.wait_closed()
    assert len(started) == len(backend.aborted) == 3


def test_an_interrupt_while_a_batch_starts_cancels_all_of_it(monkeypatch: pytest.MonkeyPatch):
    backend, gate = waiting_backend()

    @sgl.function
    def program(s, i):
        s += sgl.gen("x")

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            if self.name == "jsg-batch":
                gate.wait_reached(3)
                raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([(i,) for i in range(10)], num_threads=3, backend=backend)
    backend.wait_closed()
    assert len(backend.aborted) == 3


def test_reading_on_the_loop_itself_is_refused_instead_of_hanging():
    backend, gate = waiting_backend()

    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        for read in (lambda: s["x"], s.text, s.sync, lambda: next(s.text_iter("x"))):
            with pytest.raises(ProgramError, match=r"await s\.aget"):
                read()
        gate.open()
        assert await s.aget("x") == "late"
        return s["x"]  # it is there: nothing waits

    assert program.run(backend=backend).ret_value == "late"


def test_a_cancelled_program_starts_no_other():
    backend, gate = waiting_backend()
    is_cancelled = threading.Event()
    errors = []

    @sgl.function
    def inner(s):
        s += sgl.gen("inner")

    @sgl.function
    def program(s):
        assert is_cancelled.wait(30)
        for _ in range(3):
            errors.append(inner.run().error())
        state = inner.run_batch([{}])[0]
        errors.append(state.error())

    state = program.run(stream=True, backend=backend)
    state.cancel()
    is_cancelled.set()
    state._run.ended.wait(30)
    gate.open()
    assert len(errors) == 4 and all(isinstance(error, AbortedError) for error in errors)
    backend.wait_closed()
    assert backend.calls == []


def test_a_program_that_is_being_started_while_its_caller_is_cancelled_is_cancelled():
    backend, _ = waiting_backend()

    @sgl.function
    def inner(s):
        s += sgl.gen("inner")

    class Cancelling(set):
        """Between the look at the mark and the entry the caller is cancelled, and that finds no entry yet."""

        def add(self, run):
            outer[0]._run.cancel()
            super().add(run)

    outer = []

    @sgl.function
    def program(s):
        outer.append(s)
        s._run._called = Cancelling()
        assert isinstance(inner.run(backend=backend).error(), AbortedError)

    program.run(backend=backend)
    backend.wait_closed()
    assert backend.calls == []


def test_a_cancelled_branch_is_joined_like_a_failed_one():
    backend, gate = waiting_backend()

    @sgl.function
    def program(s):
        for _ in range(30):  # the cancel is heard of at any time
            forks = s.fork(2)
            forks += sgl.gen("x")
            forks[0]["y"] = forks[1]["y"] = 1
            forks[1].cancel()
            with pytest.raises(AbortedError, match="was cancelled"):
                forks[1].extend("more")
            with pytest.raises(AbortedError, match="was cancelled"):
                forks[1].fork(1)
            forks.join()
            with pytest.raises(ProgramError, match="was joined"):
                forks.join()
            assert s["y"] == [1, 1]
            states.append(s._stream.variables["x"])
        gate.open()
        for variable in states:
            with pytest.raises(AbortedError, match="was cancelled"):
                variable.wait(30)
        s += "goes on"

    states = []
    state = program.run(backend=backend)
    assert state.text() == "goes on" and state.error() is None


def test_a_cancelled_branch_fails_concate_and_append_at_the_read():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "text"
        forks[1].cancel()
        forks.join("concate_and_append")
        s += sgl.gen("x")
        with pytest.raises(AbortedError, match="was cancelled") as caught:
            s["x"]
        assert "test_interpreter_errors.py" in caught.value.__notes__[0]

    for _ in range(20):
        backend = ScriptedBackend()
        program.run(backend=backend)
        backend.wait_closed()
        assert [call.kind for call in backend.calls] in ([], ["fork"])


def test_what_people_write_who_know_other_languages_gets_an_error_that_helps():
    @sgl.function
    def called(s):
        s += "text"

    def write_in_f_string(s):
        s += f"Q: {sgl.gen('a')}"

    def write_format(s):
        s += "Q: {}".format(sgl.gen("a"))

    def make_another(s):
        s = s + "text"

    def append_a_turn_that_was_appended(s):
        s += s.user("text")

    def append_a_number(s):
        s += 3

    def append_a_called_program(s):
        s += called()

    def append_what_is_not_called(s):
        s += sgl.user

    cases = [
        (write_in_f_string, r"put into text by an f-string or format.*join them by \+"),
        (write_format, r"put into text by an f-string or format.*join them by \+"),
        (make_another, "a state changes in place: write s \\+= .*fork"),
        (append_a_turn_that_was_appended, r"got NoneType, which s\.user\(\.\.\.\) and its like give"),
        (append_a_number, r"got int; write str\(\.\.\.\)"),
        (append_a_called_program, r"got ProgramState; append one of its variables.*plain function"),
        (append_what_is_not_called, "got function; call it"),
    ]
    for body, message in cases:
        with pytest.raises((ProgramError, TypeError), match=message):
            sgl.function(lambda s, body=body: body(s)).run(backend=ScriptedBackend("x"))
    assert "Gen(name='a'" in repr(sgl.gen("a"))  # as debuggers and errors show it
