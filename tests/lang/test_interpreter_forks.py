"""Forks and joins of programs that are interpreted."""

import threading

import pytest

import jsg as sgl
from bench.lang.null_backend import ANSWER, NullBackend
from jsg.errors import AbortedError, ProgramError, RequestError
from tests.lang.scripted import Gate, ScriptedBackend, numbered


def test_forks_begin_as_the_parent_is_and_gather_into_lists():
    @sgl.function
    def program(s):
        s += "p"
        s["known"] = 1
        s += sgl.gen("before")
        forks = s.fork(3)
        forks += lambda i: f"b{i}"
        forks += sgl.gen("x")
        for i, text in enumerate("uvw"):
            forks[i] += text
        with pytest.raises(ProgramError, match="cannot be replaced"):
            forks[0] = s
        with pytest.raises(ProgramError, match="one value each: 3, but got 2"):
            forks += ["a", "b"]
        forks += [""] * 3
        assert len(forks) == 3 and [fork["known"] for fork in forks] == [1, 1, 1]
        assert forks[1].text() == "pAb1Av" and forks[1]["before"] == "A"
        forks.join()
        assert s["x"] == ["A", "A", "A"]
        assert s["known"] == 1 and s["before"] == "A"  # no branch set these
        s += "end"

    backend = ScriptedBackend("A")
    state = program.run(backend=backend)
    backend.wait_closed()
    assert state.text() == "pAend"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("x")["branches"]] == [1, 1, 1]


def test_copy_is_one_branch_joined_at_the_end():
    @sgl.function
    def program(s):
        s += "p"
        with s.copy() as branch:
            branch += "q" + sgl.gen("x")

    state = program.run(backend=ScriptedBackend("A"))
    assert state["x"] == ["A"] and state.text() == "p"


def test_branches_that_lack_a_name_give_none_in_its_place():
    @sgl.function
    def program(s):
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += sgl.gen("all")
            if i == 1:
                fork["some"] = "here"
        forks.join()

    state = program.run(backend=ScriptedBackend("A"))
    assert state["some"] == [None, "here", None] and state["all"] == ["A"] * 3


def test_concate_and_append_puts_branches_behind_one_another():
    @sgl.function
    def program(s):
        s += sgl.user_begin() + "p"
        forks = s.fork(2, position_ids_offset=[0, 100])
        forks += lambda i: f"doc {i};"
        forks.join("concate_and_append")
        s += "question" + sgl.user_end()
        s += sgl.assistant(sgl.gen("x"))

    backend = ScriptedBackend("A")
    state = program.run(backend=backend)
    assert state.text() == "[user]pdoc 0;doc 1;question[/user][assistant]A[/assistant]"
    assert state.messages()[0] == {"role": "user", "content": "pdoc 0;doc 1;question"}
    assert [call.what for call in backend.calls if call.kind == "join"] == [("doc 0;", "doc 1;")]
    backend.wait_closed()


def test_a_scope_around_concate_and_append_captures_what_was_joined():
    @sgl.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"doc {i};"
        with s.var_scope("docs"):
            forks.join("concate_and_append")
        return s["docs"]

    assert program.run(backend=ScriptedBackend()).ret_value == "doc 0;doc 1;"


def test_f5_position_ids_offset_reaches_the_session():
    @sgl.function
    def program(s):
        s.fork(2, position_ids_offset=[0, 1000])
        with pytest.raises(ProgramError, match="one number per branch, 3"):
            s.fork(3, position_ids_offset=[0])
        with pytest.raises(ProgramError, match="at least 1"):
            s.fork(0)

    backend = ScriptedBackend()
    program.run(backend=backend).sync()
    assert [call.what for call in backend.calls] == [(2, (0, 1000))]


def test_joined_branches_have_ended():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join()
        with pytest.raises(ProgramError, match="was joined"):
            forks[0].extend("more")
        with pytest.raises(ProgramError, match="was joined"):
            forks.join()
        with pytest.raises(ProgramError, match="gather_variable"):
            s.fork(1).join("sideways")
        other = s.fork(1)
        s += "more"
        with pytest.raises(ProgramError, match="extended after the fork"):
            other.join("concate_and_append")
        assert forks[0]["x"] == "A"

    state = program.run(backend=ScriptedBackend("A"))
    with pytest.raises(ProgramError, match="has ended"):
        state += "more"


def test_f2_second_fork_round_keeps_results():
    @sgl.function
    def react(s):
        for _ in range(3):
            forks = s.fork(2)
            forks += sgl.gen("thought")
            forks.join()
            s += "|" + ",".join(s["thought"])

    state = react.run(backend=numbered())
    rounds = [set(part.split(",")) for part in state.text().split("|")[1:]]
    assert rounds == [{"1", "2"}, {"3", "4"}, {"5", "6"}]
    assert set(state["thought"]) == {"5", "6"}


def test_f4_a_thousand_forks_live_at_once_in_few_threads():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return prompt[-4:]

    @sgl.function
    def program(s):
        s += "p"
        before = threading.active_count()
        forks = s.fork(1000)  # the model answers nothing yet: no barrier here
        forks += lambda i: f"{i:04}"
        forks += sgl.gen("x")
        gate.wait_reached()
        assert threading.active_count() <= before + 1
        gate.open()
        forks.join()

    backend = ScriptedBackend(answer)
    state = program.run(backend=backend)
    assert state["x"] == [f"{i:04}" for i in range(1000)]
    backend.wait_closed()
    assert backend.max_open == 1001


def test_a_fork_takes_the_state_of_its_place_in_the_program():
    gate = Gate()

    async def answer(prompt, gen):
        await gate.passed()
        return gen.name

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        early = s.fork(1)  # nothing is computed yet
        s += "b" + sgl.gen("y")
        late = s.fork(1)
        assert "y" not in early[0] and "y" in late[0]
        gate.open()
        assert (early[0].text(), late[0].text()) == ("ax", "axby")
        assert late[0]["y"] == "y" and early[0]["x"] == "x"

    program.run(backend=ScriptedBackend(answer)).sync()


def test_a_branch_that_nobody_has_any_more_gives_its_session_back():
    @sgl.function
    def program(s):
        for _ in range(20):
            branch = s.fork(1)[0]
            branch += sgl.gen("x")
            assert branch["x"] == "A"
            del branch
            s.sync()
        s.sync()
        assert backend.num_open <= 2  # the program's own, and at most the last one on its way

    backend = ScriptedBackend("A")
    program.run(backend=backend).sync()
    backend.wait_closed()


def test_a_branch_outlives_the_one_that_it_was_forked_from():
    @sgl.function
    def program(s):
        frontier = [s]
        for depth in range(4):
            frontier = [branch for state in frontier for branch in state.fork(2)][:3]  # the others, and all parents, go
            for branch in frontier:
                branch += str(depth) + sgl.gen("x")
        return [branch["x"] for branch in frontier]

    backend = ScriptedBackend("A")
    state = program.run(backend=backend)
    assert state.ret_value == ["A"] * 3
    state.sync()
    assert backend.prompts()[-1] == "0A1A2A3"


def test_a_program_that_ends_ends_its_forks_of_forks():
    branches = []

    @sgl.function
    def program(s):
        branches.append(s.fork(1)[0].fork(1)[0])
        branches[0] += sgl.gen("x")

    backend = ScriptedBackend("A")
    program.run(backend=backend).sync()
    branches[0].sync()
    backend.wait_closed()
    assert branches[0]["x"] == "A"
    with pytest.raises(ProgramError, match="has ended"):
        branches[0].extend("more")


DEEP = 1200
"""More than Python's calls may be nested in each other."""


def deep(s: sgl.ProgramState, text: str = "") -> list[sgl.ProgramStateGroup]:
    """Forks inside of each other, each of which appends the text and sets a variable."""
    groups: list[sgl.ProgramStateGroup] = []
    for number in range(DEEP):
        groups.append((groups[-1][0] if groups else s).fork())
        groups[-1][0]["depth"] = number
        groups[-1][0].extend(text)
    return groups


class TestDeepForks:
    def test_joined_into_each_other(self):
        @sgl.function
        def program(s):
            s["before"] = 1
            groups = deep(s)
            last = groups[-1][0]
            last += sgl.gen("x")
            assert last["before"] == 1 and last["depth"] == DEEP - 1 and last.keys() == ["before", "depth", "x"]
            for group in reversed(groups):
                group.join()
            s += "end"

        backend = ScriptedBackend("A")
        state = program.run(backend=backend)
        state.sync()
        value = state["x"]
        for _ in range(DEEP):
            (value,) = value
        assert value == "A" and state.text() == "end"
        backend.wait_closed()

    def test_joined_side_by_side(self):
        @sgl.function
        def program(s):
            for group in reversed(deep(s, "t")):
                group.join("concate_and_append")
            s += sgl.gen("x")

        state = program.run(backend=NullBackend())
        assert state["x"] == ANSWER and state.text() == "t" * DEEP + ANSWER

    @pytest.mark.parametrize("ends_by", ["end", "cancel", "error"])
    def test_left_open(self, ends_by: str):
        kept = []

        @sgl.function
        def program(s):
            kept.append(deep(s, "t")[-1][0])
            kept[0] += sgl.gen("x")
            if ends_by == "cancel":
                s.cancel()
            elif ends_by == "error":
                raise ValueError("the body failed")

        backend = ScriptedBackend("A")
        if ends_by == "error":
            with pytest.raises(ValueError, match="the body failed"):
                program.run(backend=backend)
        else:
            error = program.run(backend=backend).error()
            assert isinstance(error, AbortedError) if ends_by == "cancel" else error is None
        backend.wait_closed()
        if ends_by == "end":
            assert kept[0].text() == "t" * DEEP + "A"

    def test_an_error_at_the_bottom_comes_to_the_top(self):
        @sgl.function
        def program(s):
            groups = deep(s)
            groups[-1][0].extend(sgl.gen("x"))
            for group in reversed(groups):
                group.join()

        def fails(prompt, gen):
            raise RequestError("no answer")

        state = program.run(backend=ScriptedBackend(fails))
        with pytest.raises(RequestError, match="no answer"):
            state["x"]
