"""Each optimisation changes what is computed, and when, but nothing that a program says."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jsg as sgl
from jsg.errors import ConfigError
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.graphs.optimise import (
    ALL_OFF,
    ALL_ON,
    MIN_SHARED,
    common_prefix,
    prefix_size,
    reorder,
    static_prefix,
    varying_arguments,
)
from jsg.lang.ir import Image, RoleBegin, Text
from tests.lang.graph_programs import PNG, CachingBackend, backend

LONG = "This is a long instruction, of the kind that stands before every question that a program asks. " * 3


def cost(program, optimisations, items=None, **arguments):
    """What a run, or a batch, costs, and what it said."""
    where = CachingBackend()
    compiled = program if isinstance(program, CompiledFunction) else program.compile()
    if items is None:
        states = [compiled.run(backend=where, optimisations=optimisations, **arguments)]
    else:
        states = compiled.run_batch(items, backend=where, optimisations=optimisations)
    texts = [state.text() for state in states]
    assert [state.error() for state in states] == [None] * len(states)
    assert where.cost.held == [], "no prefix is kept when all has ended"
    return where, texts


def only(**on):
    return dataclasses.replace(ALL_OFF, **on)


@sgl.function
def judge(s, essay):
    s += "Judge this essay: " + essay + "\n"
    forks = s.fork(4)
    for i in range(4):
        forks[i] += LONG + f"Dimension {i}: " + sgl.gen("verdict")
    forks.join()
    s += " ".join(f"{verdict}" for verdict in s["verdict"]) + sgl.gen("summary")


@sgl.function
def tip(s, topic):
    s += LONG + f"Expand {topic}: " + sgl.gen("more")
    return s["more"]


@sgl.function
def tips(s, topics):
    s += topics + sgl.gen("first")
    texts = [tip(f"{s['first']} {i}").ret_value for i in range(5)]
    s += "\n".join(f"{text}" for text in texts)


def test_branches_run_side_by_side():
    parallel, texts = cost(judge, only(parallel=True), essay="short")
    one_by_one, same = cost(judge, ALL_OFF, essay="short")
    assert texts == same
    assert (parallel.max_running, one_by_one.max_running) == (4, 1)


def test_a_node_runs_as_soon_as_its_sources_are_there():
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("slow") + sgl.gen("slower")
        other = tip("independent")
        s += f"{other.ret_value}"

    where, _ = cost(program, only(parallel=True), x="x")
    assert where.max_running == 2
    assert where.calls[:2] in (
        ["x", LONG + "Expand independent: "],
        [LONG + "Expand independent: ", "x"],
    ), "the called program does not wait for what stands before its call"


def test_what_all_branches_begin_with_is_computed_once():
    shared, texts = cost(judge, only(parallel=True, share_prefixes=True), essay="short")
    apart, same = cost(judge, only(parallel=True), essay="short")
    assert texts == same
    assert sorted(shared.calls) == sorted(apart.calls), "the prompts are the same"
    saved = apart.cost.computed - shared.cost.computed
    assert saved >= 3 * len(LONG)
    hints = [prompt for kind, prompt in shared.cost.log if kind == "hint"]
    assert hints == ["Judge this essay: short\n" + LONG + "Dimension "]


def test_what_all_calls_of_a_program_begin_with_is_computed_once():
    shared, texts = cost(tips, only(parallel=True, share_prefixes=True), topics="Topics: ")
    apart, same = cost(tips, only(parallel=True), topics="Topics: ")
    assert texts == same
    assert sorted(shared.calls) == sorted(apart.calls)
    assert apart.cost.computed - shared.cost.computed >= 4 * len(LONG)
    assert [prompt for kind, prompt in shared.cost.log if kind == "hint"] == [LONG + "Expand "]


def test_a_shared_prefix_is_kept_until_its_last_use():
    where, _ = cost(judge, ALL_ON, essay="short")
    log = where.cost.log
    hint = next(i for i, (kind, _) in enumerate(log) if kind == "hint")
    release = next(i for i, (kind, _) in enumerate(log) if kind == "release")
    calls = [i for i, (kind, prompt) in enumerate(log) if kind == "call" and "Dimension" in prompt]
    assert hint < min(calls) and max(calls) < release
    assert release < len(log) - 1


def test_a_shared_prefix_is_kept_while_a_branch_may_still_go_on():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        for fork in forks:
            fork += LONG + sgl.gen("first")
            sgl.cond(fork, sgl.contains(fork["first"], "<"), lambda s: s.extend(" more " + sgl.gen("second")))

    where, _ = cost(program, only(parallel=True, share_prefixes=True, release_early=True))
    log = where.cost.log
    calls = [i for i, (kind, prompt) in enumerate(log) if kind == "call" and " more " in prompt]
    assert len(calls) == 2
    assert max(calls) < next(i for i, (kind, _) in enumerate(log) if kind == "release")


def test_what_is_hinted_for_all_is_not_hinted_for_each():
    where, _ = cost(tips, ALL_ON, topics="Topics: ")
    assert [prompt for kind, prompt in where.cost.log if kind == "hint"] == [LONG + "Expand "]


def test_release_early_gives_prefixes_back_before_the_program_ends():
    def releases_before_the_last_call(options):
        where, _ = cost(judge, options, essay="short")
        log = where.cost.log
        last_call = max(i for i, (kind, _) in enumerate(log) if kind == "call")
        return sum(kind == "close" for kind, _ in log[:last_call])

    on = dataclasses.replace(ALL_ON, prefetch=False)
    early = releases_before_the_last_call(on)
    late = releases_before_the_last_call(dataclasses.replace(on, release_early=False))
    assert late == 0
    assert early >= 4, "the branches' sessions are closed while the summary still has to be written"


def test_a_prefix_is_fetched_while_a_value_is_computed():
    @sgl.function
    def program(s, x):
        first = tip(x)
        s += LONG + LONG + f"{first.ret_value}" + sgl.gen("end")

    fetched, texts = cost(program, only(parallel=True, prefetch=True), x="x")
    plain, same = cost(program, only(parallel=True), x="x")
    assert texts == same
    kinds = [kind for kind, _ in fetched.cost.log if kind in ("hint", "call")]
    assert sorted(kinds[:2]) == ["call", "hint"] and kinds[2] == "call"
    assert fetched.max_running == 2, "the hint runs beside the call that it waits for"
    assert plain.max_running == 1
    assert fetched.cost.cached - plain.cost.cached >= len(LONG)


def test_nothing_is_fetched_for_a_value_that_is_there():
    @sgl.function
    def program(s, x):
        s += LONG + sgl.gen("a")
        s["c"] = "constant"
        s += LONG + f"{s['c']}" + sgl.gen("b")

    where, _ = cost(program, only(parallel=True, prefetch=True), x="x")
    assert [kind for kind, _ in where.cost.log if kind == "hint"] == []


def test_what_a_batch_begins_with_is_computed_once():
    items = [{"topic": f"topic {i}"} for i in range(8)]
    shared, texts = cost(tip, only(parallel=True, batch_prefix=True), items)
    apart, same = cost(tip, only(parallel=True), items)
    assert texts == same
    assert sorted(shared.calls) == sorted(apart.calls)
    assert apart.cost.computed - shared.cost.computed >= 6 * len(LONG)
    assert shared.cost.log[0] == ("hint", LONG + "Expand topic ")
    assert shared.cost.log[-1][0] in ("release", "close")


def test_a_batch_shares_what_its_called_programs_begin_with():
    items = [{"topics": f"Topics {i}: "} for i in range(3)]
    shared, texts = cost(tips, ALL_ON, items)
    apart, same = cost(tips, dataclasses.replace(ALL_ON, batch_prefix=False, share_prefixes=False), items)
    assert texts == same
    hints = [prompt for kind, prompt in shared.cost.log if kind == "hint" and prompt.startswith(LONG)]
    assert hints == [LONG + "Expand "], "once for all runs, not once in each"
    assert apart.cost.computed - shared.cost.computed >= 5 * len(LONG)


@sgl.function
def template(s, question, style):
    s += sgl.unordered(f"Question: {question}\n", f"Style: {style}\n", LONG + "\n", sgl.image(PNG) + "a picture\n")
    s += "Answer: " + sgl.gen("answer")


def test_only_parts_that_the_program_calls_unordered_are_moved():
    plain, _ = cost(template, ALL_OFF, question="why?", style="short")
    moved, texts = cost(template, only(reorder=True), question="why?", style="short")
    picture = f"<image {len(PNG)}>a picture\n"
    assert plain.calls == [f"Question: why?\nStyle: short\n{LONG}\n{picture}Answer: "]
    assert moved.calls == [f"{LONG}\n{picture}Question: why?\nStyle: short\nAnswer: "]
    assert texts[0].startswith(moved.calls[0])
    interpreted = template.run(question="why?", style="short", backend=backend())
    assert interpreted.text().startswith(plain.calls[0]), "an interpreter does not know what will be constant"


def test_in_a_batch_arguments_that_are_the_same_come_before_those_that_differ():
    items = [{"question": f"why {i}?", "style": "short and to the point"} for i in range(4)]
    moved, _ = cost(template, ALL_ON, items)
    assert all(
        f"a picture\nStyle: short and to the point\nQuestion: why {i}" in call for i, call in enumerate(moved.calls)
    )
    plain, _ = cost(template, dataclasses.replace(ALL_ON, reorder=False), items)
    assert plain.cost.computed - moved.cost.computed >= 3 * len(LONG)


def test_parts_that_read_variables_come_last():
    @sgl.function
    def program(s, x):
        s += sgl.gen("v")
        s += sgl.unordered(f"{s['v']};", f"{x};", "constant;", "another;")

    graph = program.trace()
    order = [
        str(node).partition("pieces=")[2][:12] for node in reorder(graph).nodes() if type(node).__name__ == "Append"
    ]
    assert [text[2:5] for text in order] == ["con", "ano", "rgu", "alu"]
    assert reorder(reorder(graph)) == reorder(graph)
    ids = [node.id for node in reorder(graph).nodes()]
    assert ids == sorted(ids)


def test_parts_of_more_than_one_node_stay_together():
    @sgl.function
    def program(s, x):
        s += sgl.unordered(f"{x}" + sgl.image(PNG) + " mine", sgl.image(PNG) + "constant")

    where = backend()
    picture = f"<image {len(PNG)}>"
    assert program.compile().run("X", backend=where).text() == f"{picture}constantX{picture} mine"


def test_hints_ask_nothing_of_a_backend_that_keeps_no_prefixes():
    where = backend()
    state = judge.compile().run(essay="short", backend=where)
    assert state.error() is None
    assert [call.kind for call in where.calls if call.kind != "generate"].count("fork") == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from("ab"), max_size=90).map("".join), min_size=1, max_size=4))
def test_a_common_prefix_is_what_all_begin_with(texts):
    prompts = [(RoleBegin("user"), Text(text)) if text else (RoleBegin("user"),) for text in texts]
    length = 0
    while all(len(text) > length and text[length] == texts[0][length] for text in texts):
        length += 1
    expected = (RoleBegin("user"), Text(texts[0][:length])) if length >= MIN_SHARED else ()
    assert common_prefix(prompts) == expected


def test_a_picture_is_worth_a_hint_by_itself():
    picture = Image(PNG)
    assert common_prefix([(picture, Text("a")), (picture, Text("b"))]) == (picture,)
    assert prefix_size((picture,)) >= MIN_SHARED
    assert common_prefix([(picture,), (Image(b"other"),)]) == ()


def test_a_static_prefix_ends_before_what_has_to_be_computed():
    @sgl.function
    def program(s, x):
        with s.user():
            s += "a " + x
        s += "b" + sgl.gen("y") + "c"

    nodes = program.trace().block.nodes
    known = static_prefix(nodes, {"x": "X"})
    assert [type(item).__name__ for item in known] == ["RoleBegin", "Text", "RoleEnd", "Text"]
    assert static_prefix(nodes, None) == (*known[:1], Text("a "))


def test_varying_arguments_are_those_that_differ():
    graph = template.trace()
    runs = [{"question": "a", "style": "s"}, {"question": "b", "style": "s"}]
    assert varying_arguments(graph.arguments, runs) == {"question"}


def test_cache_computes_the_constant_beginning_and_runs_nothing():
    where = CachingBackend()
    tip.cache(where)
    assert [kind for kind, _ in where.cost.log] == ["hint", "close", "release"]
    assert where.cost.log[0] == ("hint", LONG + "Expand ")
    with pytest.raises(ConfigError, match="needs a backend that keeps prefixes"):
        tip.cache(backend())
