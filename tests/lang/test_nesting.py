"""The rules of turns and scopes are the same for a program that is interpreted, traced, or sent as a graph."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jsg as sgl
from jsg.errors import GraphError, ProgramError, TraceError
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.words.ir import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from tests.lang.scripted import ScriptedBackend

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.sampled_from(["user", "assistant"]), st.booleans()),
        st.tuples(st.just("scope"), st.sampled_from(["a", "b"]), st.booleans()),
    ),
    max_size=4,
)
MODES = st.sampled_from(["gather_variable", "concate_and_append"])
BEGIN, END = True, False
EXPRESSIONS = {
    ("turn", BEGIN): RoleBegin,
    ("turn", END): RoleEnd,
    ("scope", BEGIN): VarScopeBegin,
    ("scope", END): VarScopeEnd,
}


def carry_out(s, ops):
    for kind, name, is_begin in ops:
        s += EXPRESSIONS[kind, is_begin](name)


@sgl.function
def program(s, before, branch, mode):
    carry_out(s, before)
    forks = s.fork(2)
    forks += "text"
    carry_out(forks[1], branch)
    forks.join(mode)


def sent(before, branch, mode):
    """The same as a client may write it."""
    ops = [("open", 0, {"program": "p"})]
    keys = {"turn": "role", "scope": "name"}
    ops += [(kind, 0, {keys[kind]: name, "is_begin": is_begin}) for kind, name, is_begin in before]
    ops += [("fork", 0, {"branches": [1, 2]})]
    ops += [(kind, 2, {keys[kind]: name, "is_begin": is_begin}) for kind, name, is_begin in branch]
    ops += [("join", 0, {"branches": [1, 2], "mode": mode})]
    nodes = [
        {"kind": kind, "id": number, "stream": stream, "line": "a.py:1", **fields}
        for number, (kind, stream, fields) in enumerate(ops)
    ]
    return {"jsg_graph": 1, "name": "p", "arguments": [], "nodes": nodes, "outputs": {}, "returns": {"constant": None}}


def fault(error, run):
    """The error, or None."""
    try:
        run()
    except error as caught:
        return str(caught)
    return None


@settings(max_examples=100, deadline=None)
@example([("scope", "a", BEGIN), ("scope", "a", BEGIN)], [], "gather_variable")
@example(
    [("scope", "a", BEGIN), ("scope", "b", BEGIN), ("scope", "a", END), ("scope", "b", END)], [], "gather_variable"
)
@example([("scope", "a", BEGIN)], [("scope", "a", END)], "gather_variable")
@example([], [("scope", "a", BEGIN)], "gather_variable")
@example([("turn", "user", BEGIN)], [("turn", "user", END)], "gather_variable")
@example([("turn", "user", BEGIN)], [("turn", "user", END)], "concate_and_append")
@given(OPS, OPS, MODES)
def test_a_rule_holds_interpreted_compiled_and_sent(before, branch, mode):
    plan = {"before": before, "branch": branch, "mode": mode}
    interpreted = fault(ProgramError, lambda: program.run(**plan, backend=ScriptedBackend()).sync())
    traced = fault(TraceError, lambda: program.trace(**plan))
    read = fault(GraphError, lambda: graph_from_json(sent(**plan)))
    if interpreted is None:
        assert (traced, read) == (None, None)
        return
    assert traced is not None and traced.startswith(f"{interpreted}, at test_nesting.py:")
    assert read is not None and read.endswith(f": {interpreted}")


def test_branches_are_joined_in_one_of_two_ways():
    message = "join takes 'gather_variable' or 'concate_and_append', but got 'by_side'"
    with pytest.raises(ProgramError, match=message):
        program.run(before=[], branch=[], mode="by_side", backend=ScriptedBackend())
    with pytest.raises(TraceError, match=message):
        program.trace(before=[], branch=[], mode="by_side")


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        ([("turn", "user", BEGIN)], "must close the turns and scopes that it opens"),
        ([("scope", "a", BEGIN)], "must close the turns and scopes that it opens"),
        ([("turn", "user", END)], "user ends, but no turn is open"),
    ],
)
def test_a_body_closes_what_it_opens(opened, message):
    @sgl.function
    def branching(s, q):
        sgl.cond(s, sgl.equals(q, "a"), lambda s: carry_out(s, opened))

    with pytest.raises(TraceError, match=message):
        branching.trace()
    kind, name, is_begin = opened[0]
    inner = {"kind": kind, "id": 2, "stream": 0, "line": "a.py:1", "is_begin": is_begin}
    block = {"nodes": [inner | {{"turn": "role", "scope": "name"}[kind]: name}], "outputs": {}}
    graph = sent([], [], "gather_variable")
    loop = {"kind": "loop", "id": 1, "stream": 0, "line": "a.py:1", "max_rounds": 2, "body": block}
    with pytest.raises(GraphError, match=message):
        graph_from_json(graph | {"nodes": [graph["nodes"][0], loop]})
