"""Graphs as text, drawings and JSON, and which JSON from outside is refused."""

import copy
import inspect
import json
import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jsg as sgl
from jsg.errors import GraphError
from jsg.lang.executor import driver
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_from_dict, sampling_to_dict
from jsg.lang.graphs.nodes import AnyNode, Open
from jsg.lang.tracing import traced_state
from jsg.lang.words.ir import SamplingArgs
from tests.lang.graph_programs import PLANS, PNG, planned


@sgl.function
def expand(s, topic):
    s += f"Expand {topic}: " + sgl.gen("more", max_tokens=8, temperature=0.5)
    return s["more"]


@sgl.function(num_api_spec_tokens=3)
def everything(s, question, photo):
    with s.user():
        s += "Look: " + sgl.image(photo) + sgl.image(PNG) + question
    with s.assistant():
        s += sgl.separate_reasoning(sgl.gen("plan", max_tokens=9, stop=["\n", "END"]), "qwen3")
        s += sgl.gen("many", n=2, regex="[ab]+") + sgl.gen(max_tokens=1)
    s += sgl.select("vote", ["yes", f"no {question}"], temperature=0.5)
    with s.var_scope("span"):
        s += sgl.unordered("constant", f"{question}", sgl.image(PNG))
    forks = s.fork(2, position_ids_offset=[0, 5])
    forks += lambda i: f"{i}: {s['plan']} " + sgl.gen("part", max_tokens=2)
    forks.join("concate_and_append")
    both = s.fork(2)
    both += sgl.gen("x")
    both.join()
    called = expand(s["plan"])
    sgl.cond(
        s,
        sgl.all_of(sgl.equals(s["vote"], "yes"), sgl.not_(sgl.matches(s["plan"], "[a-z]+"))),
        lambda s: s.extend("good" + sgl.gen("end")),
    )
    s["round"] = ""

    def body(s):
        s["round"] = f"{s['round']}+"

    sgl.loop(s, body, until=lambda s: sgl.any_of(sgl.contains(s["round"], "+++"), sgl.equals("a", "b")), max_rounds=5)
    s["kept"] = {"x": s["x"], "n": [1, 2.5, None, True]}
    return called, s.text()


def test_one_more_kind_of_node_is_a_node_to_who_does_not_know_it():
    done = subprocess.run(
        [sys.executable, "-m", "tests.lang.made_up_node"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    about = {"node": 1, "name": "a"}
    assert json.loads(done.stdout) == {
        "json": {"kind": "remark", "id": 2, "stream": 0, "line": "p:3", "words": "good", "about": about},
        "is read": True,
        "refused": "node 2 (remark, p:3): it reads 'a' of node 0, which does not define it before and where it can be "
        "seen",
        "text": ["2", "s0", "remark", "#", "p:3"],
        "is drawn": True,
        "sets": {},
        "is of each run": True,
        "ends what is known": 0,
    }
    for kind in set(get_args(AnyNode)) - {Open}:  # the files that must know a kind
        for module in (driver, traced_state):
            assert re.search(rf"\b{kind.__name__}\b", inspect.getsource(module)), (kind, module)


def test_a_graph_prints_one_line_a_node():
    graph = everything.trace()
    text = str(graph)
    assert text.splitlines()[0] == "program everything(question, photo: image)"
    assert f"print({everything.compile()!r})".startswith("print(<compiled everything, ")
    for part in (
        "  s0   begin user  # test_graph.py:",
        "image {photo}",
        f"image, {len(PNG)} bytes",
        "plan = gen max_tokens=9 stop=['\\n', 'END'] reasoning of qwen3 apart",
        "vote = select ['yes', 'no ' {question}]",
        "+ 'constant' (part 0 of an unordered group)",
        "fork → 1, 2 at offsets [0, 5]",
        "+ '0: ' {plan@",
        "join 1, 2 (concate_and_append)",
        "s5   open expand",
        "cond ({vote@",
        "matches '[a-z]+'",
        "loop, 5 rounds at most until ('+++' in {round@",
        "    round = {round@",
        "  return (state of stream 5, {text@",
    ):
        assert part in text, part


def test_a_graph_draws():
    dot = everything.compile().to_dot()
    assert dot.startswith("digraph program {") and dot.endswith("}")
    nodes = [line for line in dot.splitlines() if "[label=" in line and "->" not in line]
    assert len(nodes) == sum(1 for _ in everything.trace().nodes())
    assert '[style=dashed, label="plan"]' in dot
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=dot.encode(), check=True, capture_output=True)


def test_json_comes_back_as_the_same_graph():
    graph = everything.trace()
    text = graph.to_json()
    assert graph_from_json(text) == graph and graph_from_json(text.encode()) == graph
    assert graph_from_json(json.loads(text)) == graph
    assert CompiledFunction.from_json(text).to_json() == text


AS_CLIENTS_WROTE_IT = (
    '{"jsg_graph":1,"name":"p","arguments":[{"name":"q","kind":"text"},{"name":"v","kind":"video"}],"nodes":['
    '{"kind":"open","id":0,"stream":0,"line":"a.py:1","program":"p","defaults":{},"num_api_spec_tokens":3},'
    '{"kind":"append","id":1,"stream":0,"line":"a.py:2","pieces":["ü ",{"argument":"q"}],"part":[0,1]},'
    '{"kind":"media","id":2,"stream":0,"line":"a.py:3","source":{"argument":"v"},"num_frames":2},'
    '{"kind":"media","id":3,"stream":0,"line":"a.py:3","source":{"image":"YWJj","media_type":"image/png"}},'
    '{"kind":"media","id":4,"stream":0,"line":"a.py:3",'
    '"source":{"video":"YWJj,YWJj","media_type":"video/mp4","num_frames":1}},'
    '{"kind":"generate","id":5,"stream":0,"line":"a.py:4"},'
    '{"kind":"generate","id":6,"stream":0,"line":"a.py:4","name":"g","args":{"max_tokens":4,"n":2,"stop":["."],'
    '"stop_token_ids":[1],"temperature":0.5,"ignore_eos":true,"seed":-3,"dtype":"int"},"reasoning":"qwen3"},'
    '{"kind":"choose","id":7,"stream":0,"line":"a.py:5","choices":[["a"],[{"node":6,"name":"g","index":1}]],'
    '"method":"token_trie"},'
    '{"kind":"turn","id":8,"stream":0,"line":"a.py:6","role":"user","is_begin":true},'
    '{"kind":"turn","id":9,"stream":0,"line":"a.py:6","role":"user","is_begin":false},'
    '{"kind":"scope","id":10,"stream":0,"line":"a.py:7","name":"s","is_begin":true},'
    '{"kind":"scope","id":11,"stream":0,"line":"a.py:7","name":"s","is_begin":false},'
    '{"kind":"readtext","id":12,"stream":0,"line":"a.py:8"},'
    '{"kind":"assign","id":13,"stream":0,"line":"a.py:9","name":"w","value":{"dict":{"k":{"list":[{"constant":null},'
    '{"constant":1},{"constant":2.5},{"constant":true},{"text":[{"node":12,"name":""}]},'
    '{"variable":{"node":6,"name":"g"}}]}}}},'
    '{"kind":"fork","id":14,"stream":0,"line":"a.py:10","branches":[1,2],"offsets":[0,5]},'
    '{"kind":"join","id":15,"stream":0,"line":"a.py:11","branches":[1,2],"mode":"gather_variable"},'
    '{"kind":"cond","id":16,"stream":0,"line":"a.py:12","condition":{"all":[{"equals":[[{"argument":"q"}],["a"]]},'
    '{"not":{"contains":[["a"],[]]}},{"any":[{"matches":[["a"],"[a-z]+"]}]}]},'
    '"then":{"nodes":[],"outputs":{"w":{"text":["x"]}}},"otherwise":{"nodes":[],"outputs":{}},'
    '"before":{"w":{"variable":{"node":13,"name":"w"}}}},'
    '{"kind":"loop","id":17,"stream":0,"line":"a.py:13","body":{"nodes":[],"outputs":{}},"max_rounds":2}],'
    '"outputs":{"w":{"variable":{"node":16,"name":"w"}}},'
    '"returns":{"state":0,"variables":{"s":{"text":[{"node":11,"name":"s"}]}}}}'
)


def test_the_json_of_graphs_stays_as_clients_know_it():
    assert graph_from_json(AS_CLIENTS_WROTE_IT).to_json() == AS_CLIENTS_WROTE_IT


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_any_graph_comes_back(plan):
    graph = planned.trace(plan=plan)
    assert graph_from_json(graph.to_json()) == graph


def test_sampling_arguments_come_back():
    args = SamplingArgs(
        max_tokens=1, stop=("a",), stop_token_ids=(1, 2), temperature=0.5, dtype="int", ignore_eos=True, seed=-3
    )
    assert sampling_from_dict(json.loads(json.dumps(sampling_to_dict(args)))) == args


def small():
    return _small.trace().to_dict()


@sgl.function
def _small(s, q):
    s += f"Q: {q} " + sgl.gen("a", max_tokens=4)
    forks = s.fork(2)
    forks += sgl.gen("b")
    forks.join()
    s += f"{s['a']}"


def change(path, value):
    def apply(graph):
        *inner, last = path
        place = graph
        for key in inner:
            place = place[key]
        if value is _MISSING:
            del place[last]
        else:
            place[last] = value
        return graph

    return apply


_MISSING = object()


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda graph: [], "jsg_graph 1"),
        (change(["jsg_graph"], 2), "jsg_graph 1, the version"),
        (change(["extra"], 1), "there is no field 'extra'"),
        (change(["returns"], _MISSING), "the field 'returns' is missing"),
        (change(["nodes"], {}), "nodes must be a list"),
        (change(["nodes"], []), "must begin with a node of kind 'open'"),
        (change(["nodes", 1, "kind"], "eval"), r"node 1: kind must be one of open, append"),
        (change(["nodes", 1, "kind"], ["append"]), r"node 1: kind must be one of"),
        (change(["nodes", 1, "extra"], 1), r"node 1: there is no field 'extra'"),
        (change(["nodes", 1, "pieces"], _MISSING), r"node 1: the field 'pieces' is missing"),
        (
            change(["nodes", 1, "pieces"], "text"),
            r"node 1 \(append, test_graph.py:\d+\): pieces must be a list, but got 'text'",
        ),
        (change(["nodes", 1, "pieces"], [1]), r"node 1 .*expected an object"),
        (change(["nodes", 1, "pieces"], ["\ud800"]), r"node 1 .*lone surrogate"),
        (change(["nodes", 1, "id"], True), "id must be a whole number"),
        (change(["nodes", 1, "id"], -1), "id must be between 0"),
        (change(["nodes", 1, "id"], 2**60), "id must be between 0"),
        (change(["nodes", 2, "args", "max_tokens"], 1.5), r"node 2 .*max_tokens must be a whole number"),
        (change(["nodes", 2, "args", "temperature"], float("inf")), r"node 2 .*temperature must be a finite"),
        (change(["nodes", 2, "args", "nope"], 1), r"node 2 .*no sampling argument 'nope'"),
        (change(["nodes", 2, "args", "dtype"], "code"), r"node 2 .*dtype must be one of"),
        (change(["nodes", 2, "args", "stop"], "a"), r"node 2 .*stop must be a list"),
        # Well-formed JSON of a graph that is not.
        (change(["nodes", 2, "id"], 1), r"node 1 \(gen 'a', .*ids must grow in program order, but 1 comes after 1"),
        (change(["nodes", 1, "pieces", 1], {"argument": "z"}), r"node 1 .*no argument 'z' of kind text"),
        (change(["nodes", 1, "pieces", 1], {"node": 2, "name": "a"}), r"node 1 .*reads 'a' of node 2, which does not"),
        (change(["nodes", 1, "pieces", 1], {"node": 1, "name": "a"}), r"node 1 .*reads 'a' of node 1, which does not"),
        (change(["nodes", 7, "pieces", 0, "name"], "z"), r"node 7 .*reads 'z' of node 2"),
        (change(["nodes", 7, "pieces", 0, "index"], 0), r"node 7 .*by index 0, which it does not have"),
        (change(["nodes", 7, "stream"], 9), r"node 7 .*stream 9 was not opened"),
        (change(["nodes", 7, "stream"], 1), r"node 7 .*stream 1 was not opened, has ended"),
        (change(["nodes", 6, "branches"], [1, 1]), r"node 6 .*each once"),
        (change(["nodes", 6, "branches"], [0]), r"node 6 .*was not forked from stream 0"),
        (change(["nodes", 3, "branches"], [0, 2]), r"node 3 .*stream 0 exists already"),
        (change(["nodes", 3, "branches"], []), r"node 3 .*must have branches"),
        (change(["nodes", 3, "offsets"], [1]), r"node 3 .*an offset for each"),
        (change(["nodes", 0, "stream"], 1), r"node 0 .*first stream must be number 0"),
        (change(["arguments"], [{"name": "q", "kind": "text"}] * 2), "different names"),
        (change(["arguments", 0, "kind"], "image"), r"node 1 .*no argument 'q' of kind text"),
        (change(["arguments", 0, "kind"], "file"), "kind must be one of text, image, video"),
        (change(["returns"], {"state": 7, "variables": {}}), "there is no stream 7"),
        (change(["returns"], {"constant": "text"}), "constant must be a number"),
        (change(["returns"], {"text": [], "list": []}), "one of the fields"),
        (change(["outputs", "z"], {"variable": {"node": 1, "name": "z"}}), "keeps 'z' of node 1"),
    ],
)
def test_a_graph_that_is_wrong_is_refused_with_the_node_that_is(apply, message):
    graph = apply(small())
    with pytest.raises(GraphError, match=message) as caught:
        graph_from_json(graph)
    assert caught.value.param == "graph"


def test_json_that_is_none_is_refused():
    for source in ("", "{", b"\xff", "[" * 100_000):
        with pytest.raises(GraphError):
            graph_from_json(source)


def test_nesting_is_bounded():
    value = {"constant": 1}
    for _ in range(40):
        value = {"list": [value]}
    graph = change(["returns"], value)(small())
    with pytest.raises(GraphError, match="nested 32 deep at most"):
        graph_from_json(graph)


@pytest.mark.parametrize("kind", ["cond", "loop"])
def test_what_is_set_in_a_block_is_not_seen_outside_by_its_own_node(kind):
    @sgl.function
    def program(s, q):
        if kind == "cond":
            sgl.cond(s, sgl.equals(q, "a"), lambda s: s.extend(sgl.gen("x")))
        else:
            sgl.loop(s, lambda s: s.extend(sgl.gen("x")), max_rounds=2)
        s += f"{s['x']}"

    graph = program.trace().to_dict()
    assert graph_from_json(graph) == program.trace()
    block = graph["nodes"][1]["then" if kind == "cond" else "body"]
    graph["nodes"][2]["pieces"][0]["node"] = block["nodes"][0]["id"]
    with pytest.raises(GraphError, match=r"node 3 .*reads 'x' of node 2, which does not define it"):
        graph_from_json(graph)


@pytest.mark.parametrize("where", ["body", "until"])
def test_a_loop_must_keep_the_shape_of_what_it_reads(where):
    read = [{"node": 2, "name": "v", "index": 1}]
    append = {"kind": "append", "id": 3, "stream": 0, "line": "a.py:3", "pieces": read}
    loop = {
        "kind": "loop",
        "id": 2,
        "stream": 0,
        "line": "a.py:2",
        "max_rounds": 3,
        "until": {"equals": [read, ["x"]]} if where == "until" else None,
        "before": {"v": {"list": [{"text": ["a"]}, {"text": ["b"]}]}},
        "body": {"nodes": [append] if where == "body" else [], "outputs": {"v": {"list": [{"text": ["a"]}]}}},
    }
    graph = small()
    graph["nodes"] = [graph["nodes"][0], loop]
    graph["outputs"] = {}
    with pytest.raises(GraphError, match=r"reads 'v' of node 2 by index 1, which it does not have"):
        graph_from_json(graph)
    loop["body"]["outputs"]["v"]["list"].append({"text": ["c"]})
    graph_from_json(graph)


def test_a_branch_that_turned_is_not_joined_side_by_side():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        sgl.cond(forks[1], sgl.equals("a", "a"), lambda s: s.user("more"))
        forks.join()

    graph = program.trace().to_dict()
    graph_from_json(graph)
    (join,) = (node for node in graph["nodes"] if node["kind"] == "join")
    join["mode"] = "concate_and_append"
    with pytest.raises(GraphError, match=r"\(join, .*branch 1 opened or closed a turn"):
        graph_from_json(graph)


def test_turns_and_scopes_must_close_as_they_were_opened():
    graph = everything.trace().to_dict()
    turns = [node for node in graph["nodes"] if node["kind"] == "turn"]
    for broken, message in (("system", "system ends, but user is open"), ("user", None)):
        changed = copy.deepcopy(graph)
        node = next(node for node in changed["nodes"] if node["id"] == turns[1]["id"])
        node["role"] = broken
        if message is None:
            graph_from_json(changed)
        else:
            with pytest.raises(GraphError, match=message):
                graph_from_json(changed)
    scope = next(node for node in graph["nodes"] if node["kind"] == "scope" and not node["is_begin"])
    scope["name"] = "other"
    with pytest.raises(GraphError, match="var_scope 'other' ends, but was not opened"):
        graph_from_json(graph)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_changed_in_a_graph_it_reads_or_is_refused(data):
    graph = everything.trace().to_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        place, value = graph, data.draw(_JSON)
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and data.draw(st.booleans()):
                place = place[key]
                continue
            if data.draw(st.booleans()):
                place[key] = value
            else:
                del place[key]
            break
    try:
        read = graph_from_json(graph)
    except GraphError:
        return
    assert graph_from_json(read.to_json()) == read
