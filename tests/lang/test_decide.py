"""Decisions: their numbers, and `decide` in programs."""

import json
import math

import pytest

import jsg as sgl
from jsg.errors import GraphError, RequestError, UnsupportedError
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.remote.openai import OpenAI
from jsg.lang.words import decisions
from jsg.lang.words.backend import Selection
from jsg.lang.words.decisions import Decision
from jsg.testing import ScriptedBackend
from tests.lang.graph_programs import run_here
from tests.lang.wire_servers import HashToy, WireServer

TICKET = "My card was charged twice for order 17."
TEAMS = {"billing": "Payments and invoices.", "technical": None, "technical support": None}


def decided(kind, *probabilities, temperature=1.0):
    return Decision.of(kind, Selection("", probabilities, {"label_mass": 0.25}), temperature)


class TestNumbers:
    def test_confidence_is_that_of_system_one(self):
        assert decided("choice", 0.7, 0.2, 0.1).confidence == pytest.approx((3 * 0.7 - 1) / 2)
        assert decided("choice", 0.25, 0.25, 0.25, 0.25).confidence == 0
        assert decided("choice", 1.0).confidence == 1
        # Levels 0, 1, 2: the mean distance from level 1 is 0.4; for equal probabilities it is 2/3.
        assert decided("score", 0.3, 0.6, 0.1).confidence == pytest.approx(1 - 0.4 / (2 / 3))
        assert decided("score", 0.5, 0.0, 0.5).confidence == 0, "never below 0"

    def test_confidence_looks_for_the_best_label_once(self, monkeypatch):
        """Looking for it at each of many levels takes a time that grows with their square."""
        looked = []
        monkeypatch.setattr(Decision, "best", property(lambda decision: looked.append(decision) or 0))
        assert decided("score", *(0.2,) * 5).confidence == 0
        assert len(looked) == 1

    def test_a_score_is_the_expected_level(self):
        assert decided("score", 0.3, 0.6, 0.1).report() == {
            "probabilities": (0.3, 0.6, 0.1),
            "score": pytest.approx(0.8),
            "confidence": pytest.approx(0.4),
            "label_mass": 0.25,
        }

    def test_a_temperature_divides_the_log_probabilities(self):
        cooler, hotter = (decided("predicate", 0.8, 0.2, temperature=t).probabilities[0] for t in (0.5, 2.0))
        assert cooler == pytest.approx(0.64 / (0.64 + 0.04))
        assert hotter == pytest.approx(math.sqrt(0.8) / (math.sqrt(0.8) + math.sqrt(0.2)))
        for t in (1e-300, 1e300):
            assert sum(decided("choice", 0.8, 0.2, 0.0, temperature=t).probabilities) == pytest.approx(1)


@sgl.function
def triage(s, ticket, team):
    s += sgl.user(ticket)
    s += sgl.decide("double", "The customer paid twice.")
    s += sgl.decide("team", f"Which team, {team} or another?", TEAMS)
    s += sgl.decide("anger", "How angry is the customer?", levels=["calm", "cross", "furious"], temperature=2.0)
    s += sgl.user("Sum it up.") + sgl.assistant(sgl.gen("sum", max_tokens=2, temperature=0))


def test_a_question_is_asked_in_a_branch_of_the_prompt():
    with ScriptedBackend("Paid twice.", choices=["No", "billing", "cross"]) as backend:
        state = triage.run(TICKET, "billing", backend=backend)
        assert (state["double"], state["team"], state["anger"]) == ("No", "billing", "cross")
        assert state.get_meta_info("double")["probability"] == 0
        assert state.get_meta_info("anger")["score"] == 1
        assert state.text() == f"[user]{TICKET}[/user][user]Sum it up.[/user][assistant]Paid twice.[/assistant]"
    double, team, anger, _ = backend.calls
    before = f"[user]{TICKET}[/user][user]"
    assert double.prompt == f"{before}The customer paid twice.\nAnswer Yes or No.[/user][assistant]"
    assert team.prompt == (
        f"{before}Which team, billing or another?\nAnswer with one of these:\n- billing: Payments and invoices.\n"
        "- technical\n- technical support[/user][assistant]"
    )
    assert anger.prompt.startswith(f"{before}How angry is the customer?\nAnswer with one of these levels")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_question_fits_what_is_open(is_compiled):
    @sgl.function
    def program(s, q):
        s += q
        s += sgl.decide("raw", q)
        with s.user():
            s += sgl.decide("first", q)
            s += "text"
            s += sgl.decide("second", q)
        s += sgl.assistant_begin() + "an answer"
        s += sgl.decide("third", q)
        s += sgl.assistant_end()
        s["said"] = s["second"]
        s += s["said"]

    with ScriptedBackend(choices=["No", "Yes", "No", "Yes"]) as backend:
        run = program.compile().run if is_compiled else program.run
        state = run(q="why", backend=backend)
        assert [state[name] for name in ("raw", "first", "second", "third")] == ["No", "Yes", "No", "Yes"]
        assert state.text() == "why[user]text[/user][assistant]an answer[/assistant]No"
    asked = "why\nAnswer Yes or No."
    assert [call.prompt for call in backend.calls] == [
        f"why\n\n{asked}\nAnswer: ",
        f"why[user]{asked}[/user][assistant]",
        f"why[user]text\n\n{asked}[/user][assistant]",
        f"why[user]text[/user][assistant]an answer[/assistant][user]{asked}[/user][assistant]",
    ]


def test_a_program_interpreted_and_compiled_decides_as_the_labels_are_scored(engine):
    backend = engine.as_backend()
    states = [run(ticket=TICKET, team="billing", backend=backend) for run in (triage.run, triage.compile().run)]
    reports = [{name: state.get_meta_info(name) for name in ("double", "team", "anger")} for state in states]
    for name in reports[0]:
        for key in ("probabilities", "label_mass"):
            assert reports[0][name][key] == pytest.approx(reports[1][name][key], rel=1e-4)

    @sgl.function
    def by_select(s):
        s += sgl.user(TICKET) + sgl.user(decisions.predicate("The customer paid twice.").text)
        s += sgl.assistant(sgl.select("x", ["Yes", "No"]))

    meta = by_select.run(backend=backend).get_meta_info("x")
    assert reports[0]["double"]["probabilities"] == pytest.approx(meta["probabilities"], rel=1e-4)
    assert reports[0]["double"]["label_mass"] == pytest.approx(meta["label_mass"], rel=1e-4)


def test_an_api_that_scores_its_prompt_decides_and_another_one_refuses_by_name():
    @sgl.function
    def program(s):
        s += "in "
        s += sgl.decide("city", "Where?", ["Paris", "New York"])

    def decide(wire, **options):
        backend = OpenAI("toy", base_url=wire.openai_url, **options)
        try:
            return program.run(backend=backend).get_meta_info("city")["probabilities"]
        finally:
            run_here(backend.close())

    with WireServer(HashToy((" Paris", " New", " York"))).running() as wire:
        assert sum(decide(wire, api="completions", dialect="jsg")) == pytest.approx(1)
        num_requests = len(wire.requests)
        with pytest.raises(UnsupportedError, match=r"decide needs the probabilities of its labels, but .* use select"):
            decide(wire, api="completions", dialect="openai")
        assert len(wire.requests) == num_requests, "refused before anything was asked"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"instructions": None}, "instructions"),
        ({"choices": ["a"]}, "choices"),
        ({"choices": ["a", "a"]}, "choices"),
        ({"choices": ["a", ""]}, "choices"),
        ({"choices": "ab"}, "choices"),
        ({"levels": [str(i) for i in range(256)]}, "levels"),
        ({"choices": ["a", "b"], "levels": ["a", "b"]}, "levels"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_an_argument_that_is_wrong_is_named(arguments, param):
    with pytest.raises(RequestError) as caught:
        sgl.decide("x", **{"instructions": "why", **arguments})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "change", [{"decision": None}, {"temperature": 0}, {"choices": [["a"]]}, {"decision": "rumour"}]
)
def test_a_posted_decision_is_checked(change):
    graph = json.loads(triage.trace().to_json())
    nodes = graph["nodes"]
    node = next(node for node in nodes if node["kind"] == "choose")
    node |= change
    with pytest.raises(GraphError, match=f"node {node['id']}"):
        graph_from_json(graph)
