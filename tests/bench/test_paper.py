"""`bench.paper`: the shapes of its programs, what its arms take away, the least that a cache computes, the report."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.optimum import optimum
from bench.paper import __main__ as paper
from bench.paper import quality, report, tree
from bench.paper.arms import ARMS, FULL
from bench.paper.data import DataError, runs_from
from bench.paper.measure import Measured, Target, timed
from bench.paper.programs import WORKLOADS
from bench.paper.programs.forms import CHARACTER, FACTS, WORD
from bench.paper.recorded import RecordedBackend, Ways
from bench.paper.sequences import Sequences
from bench.paper.texts import Texts
from bench.peers.checkpoint import SHAPES, WEIGHTLESS
from bench.report import Report
from bench.shapes import write_model
from jsg.errors import UnsupportedError
from jsg.lang.words.ir import Gen
from jsg.processing.parts import JoinedPart, TextPart, TokenPart
from tests.lang.scripted import ScriptedBackend

CALLS = {"react": None, "agents": 5, "tree-deep": 30, "tree-wide": 39, "tips": 10, "judge": 7, "chains": 6} | {
    "json-parts": 5,
    "json-long": 4,
    "chat-short": 4,
    "chat-long": 4,
}
"""The calls of a published program; one where it is not here."""


OBJECT = """{
    "name": "Ab",
    "house": "Slytherin",
    "blood status": "Half-blood",
    "occupation": "teacher",
    "wand": {
        "wood": "Ab",
        "core": "Ab",
        "length": 1.5
    },
    "alive": "Alive",
    "patronus": "Ab",
    "bogart": "Ab"
}"""
FORMED = {CHARACTER: OBJECT, WORD: '"Ab"', FACTS["latitude"][0]: "1.5"}


READABLE = ("json", "json-parts", "json-long")


def texts(seed: str = "0") -> Texts:
    """Texts whose tokens are words."""
    return Texts(seed, lambda text: len(text.split()))


def said(prompt: str, gen: Gen) -> str:
    """An answer that its form allows."""
    form = gen.args.given().get("regex", "")
    return next((text for allowed, text in FORMED.items() if form.startswith(allowed)), "1")


def calls_of(backend: ScriptedBackend) -> list[Any]:
    """The calls of the model."""
    return [call for call in backend.calls if call.kind in ("generate", "select")]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_program_has_the_calls_of_the_published_one(name: str):
    workload = WORKLOADS[name]
    (arguments,) = workload.runs(texts(), 1 / workload.count)
    inner = ScriptedBackend(said)
    backend = RecordedBackend(inner, Ways())
    timed(workload, [arguments], backend)
    expected = len(arguments["steps"]) if name == "react" else CALLS.get(name, 1)
    assert len(calls_of(inner)) == len(backend.calls) == expected
    gens = [call.what for call in calls_of(inner) if call.kind == "generate"]
    assert all(gen.args.ignore_eos or gen.args.given().get("regex") for gen in gens), "every engine does as much"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scale_takes_fewer_programs_which_are_as_long(name: str):
    workload = WORKLOADS[name]
    few, more = (workload.runs(texts(), count / workload.count) for count in (2, 4))
    assert (len(few), len(more)) == (2, 4)
    assert workload.runs(texts(), 2 / workload.count) == few
    assert workload.runs(texts("1"), 2 / workload.count) != few
    lengths = [len(json.dumps(each, default=repr)) for each in (*few, *more)]
    assert max(lengths) < 5 * min(lengths)


class TestArms:
    @pytest.mark.parametrize(("ways", "most"), [(Ways(one_by_one=True), 1), (Ways(), 5)])
    def test_calls_of_one_program_follow_each_other(self, ways: Ways, most: int):
        workload = WORKLOADS["chains"]
        backend = Slow(most)
        timed(workload, workload.runs(texts(), 1 / workload.count), RecordedBackend(backend, ways))
        assert backend.most_running == most

    def test_without_a_hint_nothing_is_computed_for_several_branches(self):
        workload = WORKLOADS["judge"]
        (arguments,) = workload.runs(texts(), 1 / workload.count)
        sizes = {}
        for hints in (True, False):
            inner = ScriptedBackend()
            timed(workload, [arguments], RecordedBackend(inner, Ways(hints_forks=hints)))
            sizes[hints] = [call.what[0] for call in inner.calls if call.kind == "fork"]
        assert sizes == {True: [6], False: [1] * 6}

    def test_each_call_has_a_form_of_its_own_that_means_the_same(self):
        workload = WORKLOADS["json"]
        inner = ScriptedBackend(said)
        timed(workload, workload.runs(texts(), 3 / workload.count), RecordedBackend(inner, Ways(compiles_always=True)))
        forms = [call.what.args.given()["regex"] for call in calls_of(inner)]
        assert len(set(forms)) == 3
        assert all(form.startswith(CHARACTER) and re.fullmatch(form[len(CHARACTER) :], "") for form in forms)

    def test_where_answers_mean_something_they_end_by_themselves(self):
        workload = WORKLOADS["gsm8k"]
        inner = ScriptedBackend()
        timed(workload, workload.runs(texts(), 1 / workload.count), RecordedBackend(inner, Ways(ends_at=("\n",))))
        (call,) = calls_of(inner)
        assert (call.what.args.ignore_eos, call.what.args.stop) == (False, ("\n",))

    def test_programs_begin_with_an_opening_once(self):
        workload = WORKLOADS["judge"]
        (arguments,) = workload.runs(texts(), 1 / workload.count)
        inner = ScriptedBackend()
        timed(workload, [arguments], RecordedBackend(inner, Ways(opening="Raw.\n")))
        prompts = [call.prompt for call in calls_of(inner)]
        assert all(prompt.startswith("Raw.\nYou judge") and prompt.count("Raw.") == 1 for prompt in prompts)

    def test_an_engine_whose_answers_have_no_end_is_not_asked_for_that(self):
        workload = WORKLOADS["gsm8k"]
        inner = ScriptedBackend()
        timed(workload, workload.runs(texts(), 1 / workload.count), RecordedBackend(inner, Ways(endless=True)))
        (call,) = calls_of(inner)
        assert "ignore_eos" not in call.what.args.given()

    @pytest.mark.parametrize("name", ["documents", "lines"])
    def test_where_branches_cannot_be_joined_their_texts_follow_each_other(self, name: str):
        workload = WORKLOADS[name]
        (arguments,) = workload.runs(texts(), 1 / workload.count)
        inner = Unjoined()
        timed(workload, [arguments], RecordedBackend(inner, Ways()))
        (call,) = calls_of(inner)
        assert call.prompt == arguments["prefix"] + "".join(arguments["bodies"]) + arguments["question"]

    def test_an_arm_is_for_workloads_on_which_it_can_make_a_difference(self):
        concerned = {arm: {w for w in WORKLOADS if ARMS[arm].concerns(WORKLOADS[w])} for arm in ARMS}
        assert concerned["no-cache"] == set(WORKLOADS) and concerned["no-jump"] == {"json", "json-parts"}
        assert "judge" in concerned["one-by-one"] and "mmlu" not in concerned["one-by-one"]


class Changed:
    """A session some of whose methods are others."""

    def __init__(self, session: Any, **methods: Any):
        self._session = session
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._session, name)


class Slow(ScriptedBackend):
    """Counts the calls that run at once. None ends before so many run, and each lets others begin after that."""

    def __init__(self, expected: int):
        super().__init__()
        self.num_running = self.most_running = 0
        self._expected, self._are_there = expected, asyncio.Event()

    def open(self, **_: Any) -> Any:
        return self._slow(super().open())

    def _slow(self, session: Any) -> Any:
        async def generate(gen: Gen):
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            if self.num_running == self._expected:
                self._are_there.set()
            await asyncio.wait_for(self._are_there.wait(), 60)
            for _ in range(50):
                await asyncio.sleep(0)
            self.num_running -= 1
            async for piece in session.generate(gen):
                yield piece

        async def fork(size: int, offsets: Any = None):
            return [self._slow(branch) for branch in await session.fork(size, offsets)]

        async def join(branches: Any) -> None:
            await session.join([branch._session for branch in branches])

        return Changed(session, generate=generate, fork=fork, join=join)


class Unjoined(ScriptedBackend):
    """Joins nothing, and has no say in positions."""

    def open(self, **_: Any) -> Any:
        session: Any = super().open()

        async def fork(size: int, offsets: Any = None) -> Any:
            if offsets is not None:
                raise UnsupportedError("no", "position_ids_offset")
            return await session.fork(size)

        async def join(branches: Any) -> None:
            raise UnsupportedError("no", "mode")

        return Changed(session, fork=fork, join=join)


class TestLeast:
    def test_of_prompts_alone_it_is_what_the_tree_of_them_has(self):
        prompts = [(1, 2, 3), (1, 2, 4), (1, 2), (5,)]
        found = Sequences()
        for prompt in prompts:
            found.generated([TokenPart(prompt)], [], [9], is_cut=True)
        assert found.least() == optimum(prompts).num_edges

    def test_a_prompt_that_is_there_computes_its_last_token_again(self):
        found = Sequences()
        for _ in range(3):
            found.generated([TokenPart((1, 2))], [], [9], is_cut=True)
        assert found.least() == 2 + 2

    def test_an_answer_computes_all_its_tokens_but_the_last_of_one_that_was_cut(self):
        for is_cut, least in ((True, 2 + 2), (False, 2 + 1)):
            found = Sequences()
            found.generated([TextPart("ab")], [(1, 2)], [3, 4], is_cut=is_cut)
            found.generated([TokenPart((1, 2, 3, 4)), TextPart("c")], [(5,)], [6], is_cut=True)
            assert found.least() == least

    def test_a_joined_prompt_has_each_branch_behind_the_beginning(self):
        found = Sequences()
        parts = [TokenPart((1, 2)), JoinedPart(((TokenPart((3,)),), (TokenPart((4,)),))), TokenPart((5,))]
        found.generated(parts, [], [9], is_cut=True)
        found.generated([*parts[:2], TokenPart((6,))], [], [9], is_cut=True)
        assert found.least() == 2 + 2 + 2

    def test_the_last_token_of_a_choice_is_not_computed(self):
        found = Sequences()
        found.scored([TokenPart((1,)), TextPart("x")], [], (2,), [(3, 4), (3, 5), (6,)])
        assert found.least() == 3


def measured(wall_s: float, **changes: Any) -> Measured:
    """A round of two programs."""
    fields: dict[str, Any] = {
        "programs": 2,
        "wall_s": wall_s,
        "alone_s": [0.5],
        "first_s": [0.1, 0.3],
        "calls": 2,
        "prompt_tokens": 100,
        "computed_tokens": 40,
        "least_tokens": 38,
        "generated_tokens": 20,
        "steps": 10,
        "states": [],
    }
    return Measured(**fields | changes)


def test_the_report_has_the_ratios_and_says_what_is_not_known(tmp_path: Path):
    made = Report("bench.paper", [], tmp_path / "run.json", model="m", dtype="float32")
    state = type("State", (), {"text": lambda self: "t"})()
    found = {
        FULL: [measured(2.0, states=[state])],
        "no-cache": [measured(3.0, states=[state], computed_tokens=100)],
        "vllm": [measured(5.0, states=[state], computed_tokens=None, least_tokens=None, alone_s=[1.0])],
    }
    paper.add_workload(made, WORKLOADS["judge"], found)
    made.close()
    report.write(json.loads((tmp_path / "run.json").read_text()), tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| LLM judge | 2 | 1 | 0.5 s | 2 | 100 | 40 | 20 | 60.0 % | 62.0 % |" in table
    assert "| judge | 1.50 |" in table and "| judge | 60.0 % | 0.0 % |" in table
    assert "| judge | 2.50 |" in table and "| judge | 2.00 |" in table
    axes = report.draw(json.loads((tmp_path / "run.json").read_text()))["hits"].axes[0]
    assert len(axes.patches) == 2, "of vllm it is not known, which is not 0"
    assert {file.name for file in tmp_path.glob("*.svg")} == {"throughput.svg", "latency.svg", "hits.svg"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "mmmlu"], r"--only takes mmlu, .*, but got mmmlu"),
        (["--arms", "none"], r"--arms takes full, .*, but got none"),
        (["--rounds", "0"], "at least 1"),
        (["--scale", "0"], "larger than 0"),
        (["--most", "0"], "at least 1"),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], why: str):
    with pytest.raises(SystemExit, match=why):
        paper.main(arguments)


@pytest.mark.parametrize(("given", "rounds"), [([], 1), (["--rounds", "2"], 2)])
def test_a_quick_run_has_other_defaults_and_does_what_is_asked(
    given: list[str], rounds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = []
    monkeypatch.setattr(paper, "make_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(paper, "run_group", lambda *arguments: asked.append(arguments[-1]))
    assert paper.main(["--quick", "--only", "judge", *given]) == 0
    assert [(options.shape, options.rounds, options.most) for options in asked] == [("small", rounds, 4)]


@pytest.mark.parametrize(
    ("shape", "joins", "options"),
    [("small", True, ()), ("hybrid-small", False, ("--load-format", "dummy", "--max-states", "9"))],
)
def test_a_model_with_states_runs_all_but_joins(
    shape: str, joins: bool, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = []
    monkeypatch.setattr(paper, "arm_targets", lambda stack, report, *rest: asked.append(rest) or [])
    monkeypatch.setattr(paper, "load_tokenizer", lambda directory: None)
    write_model(tmp_path, (SHAPES | WEIGHTLESS)[shape])
    given = paper.parser().parse_args(["--shape", shape, *["--max-states=9"] * (not joins)])
    paper.run_group(Report("bench.paper", [], None), tmp_path, [], {}, given)
    [(setting, _, can)] = asked
    assert ("joins" in can) == joins and setting.options[2:] == options


def test_batches_are_measured_with_a_growing_share_of_calls_that_find_nothing(monkeypatch: pytest.MonkeyPatch):
    ran = []

    def measure(workload, target, at_once, alone):
        ran.append((target.ways.forgotten, target.ways.hints_forks))
        return measured(1.0, computed_tokens=round(100 * target.ways.forgotten))

    monkeypatch.setattr(paper, "measure", measure)
    monkeypatch.setattr(paper, "runs_of", lambda *_: [{}])
    made = Report("bench.paper", [], None, model="m", dtype="float32")
    paper.run_batches(made, Target(name=FULL, url=""), paper.parser().parse_args([]), None)
    assert ran == [(share, False) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    plots = report.draw({"header": made.header, "figures": [each.as_json() for each in made.figures]})
    assert list(plots) == ["batches"]


def test_no_question_gives_its_answer_away():
    facts = quality.Facts(0)
    known, pairs = facts.known(40), facts.asked(20)
    assert not any(sentence in known for sentence, _ in pairs)


def test_every_workload_has_questions_that_the_embedded_models_can_answer():
    assert {*quality.CASES, *quality.PICTURES} == set(WORKLOADS) - {"films"}
    for name, case in quality.CASES.items():
        arguments, score = case(quality.Facts(0))
        workload = WORKLOADS[name]
        (state,), _ = timed(workload, [arguments], RecordedBackend(ScriptedBackend(said), Ways(ends_at=("\n",))))
        assert score(state) <= (1.0 if name in READABLE else 0.5)


@pytest.mark.parametrize(
    ("names", "arms"),
    [
        pytest.param(("judge", "json"), (FULL, "no-cache"), marks=pytest.mark.slow, id="some"),
        pytest.param(tuple(WORKLOADS), tuple(ARMS), marks=[pytest.mark.slow, pytest.mark.long], id="all"),
    ],
)
def test_workloads_run_on_arms(names: tuple[str, ...], arms: tuple[str, ...], tmp_path: Path):
    where = ["--directory", str(tmp_path / "models"), "--output", str(tmp_path / "out")]
    assert paper.main(["--quick", "--only", ",".join(names), "--arms", ",".join(arms), *where]) == 0
    figures = json.loads((tmp_path / "out" / "run.json").read_text())["figures"]
    ran = {(figure["facts"]["workload"], figure["facts"].get("target")) for figure in figures}
    assert all((name, arm) in ran for name in names for arm in arms if ARMS[arm].concerns(WORKLOADS[name]))
    full = [figure["facts"] for figure in figures if figure["facts"].get("target") == FULL]
    known = [facts for facts in full if facts["best_hit_rate"] is not None]
    assert len(known) >= 2 and all(facts["hit_rate"] >= 0.96 * facts["best_hit_rate"] for facts in known)


@pytest.mark.slow
@pytest.mark.long
def test_answers_are_as_good_without_a_cache(tmp_path: Path):
    assert quality.main(["--count", "2", "--arms", "no-cache", "--only", "mmlu,hellaswag,judge,lines,pictures"]) == 0


class TestData:
    """Real data in place of synthetic texts."""

    def runs(self, name: str, path: Path, number: int = 0, count: int = 3) -> list[dict[str, Any]]:
        return runs_from(WORKLOADS[name], path, number, count, lambda text: len(text.split()))

    def lines(self, path: Path, rows: list[Any]) -> Path:
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    def test_gsm8k_has_shots_and_questions_that_no_round_before_had(self, tmp_path: Path):
        rows = [{"question": f"q{n}", "answer": "one two"} for n in range(16)]
        first, second = (self.runs("gsm8k", self.lines(tmp_path / "f", rows), number) for number in range(2))
        assert first[0]["examples"].startswith("Question: q0\nAnswer: one two\n\nQuestion: q1\n")
        assert [run["question"] for run in first] == [f"Question: q{n}\nAnswer:" for n in (5, 6, 7)]
        assert first[0]["num_tokens"] == 2
        assert second[0]["examples"].startswith("Question: q8\n") and "q13" in second[0]["question"]

    def test_hellaswag_has_its_right_endings_as_examples(self, tmp_path: Path):
        rows = [{"ctx": f"c{n}", "endings": ["a", "b", "c", "d"], "label": n % 4} for n in range(23)]
        runs = self.runs("hellaswag", self.lines(tmp_path / "f", rows))
        assert runs[0]["examples"].startswith("c0 a\nc1 b\n") and runs[0]["examples"].endswith("c19 d\n")
        assert [run["question"] for run in runs] == ["c20", "c21", "c22"]
        assert runs[0]["choices"] == [" a", " b", " c", " d"]

    def test_each_subject_of_mmlu_has_its_share(self, tmp_path: Path):
        for kind, rows in (("dev", 5), ("test", 4)):
            (tmp_path / kind).mkdir()
            for subject in ("art_history", "biology"):
                text = "".join(f'"{kind}, {n}",w,x,y,z,B\n' for n in range(rows))
                (tmp_path / kind / f"{subject}_{kind}.csv").write_text(text)
        runs = self.runs("mmlu", tmp_path, count=4)
        assert ["about art history." in run["examples"] for run in runs] == [True, True, False, False]
        assert runs[0]["question"] == "test, 0\nA. w\nB. x\nC. y\nD. z\nAnswer:"
        assert "dev, 0\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n" in runs[0]["examples"]
        (later, *_) = self.runs("mmlu", tmp_path, 1, 4)
        assert later["question"].startswith("test, 2") and later["examples"] != runs[0]["examples"]

    def test_other_workloads_take_the_arguments_of_their_programs(self, tmp_path: Path):
        rows = [{"intro": f"i{n}", "num_tokens": 9} for n in range(4)]
        assert self.runs("json", self.lines(tmp_path / "f", rows), 1) == [rows[3], rows[0], rows[1]]

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("json", '{"intro": "x"}', "must have the fields ['intro', 'num_tokens'], but one has ['intro']"),
            ("json", "[]", "but one has list"),
            ("json", "no", "a JSON object in each line"),
            ("json", "\n", "is empty"),
            ("gsm8k", '{"question": "x"}', "is not one of gsm8k: KeyError('answer')"),
            ("mmlu", "x", "must have files test/SUBJECT_test.csv"),
        ],
    )
    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path, name: str, text: str, says: str):
        path = tmp_path / "f"
        path.write_text(text)
        with pytest.raises(DataError, match=re.escape(says)):
            self.runs(name, path)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
            self.runs("gsm8k", tmp_path / "none.jsonl")
        for only, name in (("mmlu,rag", "other"), ("mmlu,rag", "gsm8k")):  # unknown, and not run
            with pytest.raises(SystemExit, match=f"NAME is one of mmlu, rag, but got {name}"):
                paper.main(["--only", only, "--data", f"{name}=x"])


class TestTree:
    """What the radix tree costs."""

    def test_a_method_inside_another_counts_once_and_all_are_plain_afterwards(self, monkeypatch: pytest.MonkeyPatch):
        now = itertools.count()
        monkeypatch.setattr(tree.time, "perf_counter", lambda: next(now))

        class Kind:
            def inner(self) -> int:
                return 1

            def outer(self) -> int:
                return self.inner() + 1

        plain, watch = (Kind.inner, Kind.outer), tree.Stopwatch()
        with watch.on(Kind, ("inner", "outer")):
            assert Kind().outer() == 2 and Kind().inner() == 1
        assert (watch.calls, watch.seconds) == (2, 2.0)
        assert (Kind.inner, Kind.outer) == plain

    @pytest.mark.slow
    def test_a_run_times_all_that_the_steps_ask_of_the_tree(self, tmp_path: Path):
        output = tmp_path / "tree.json"
        options = ["--shape", "small", "--requests", "4", "--rounds", "1", "--directory", str(tmp_path)]
        tree.main([*options, "--output", str(output)])
        wall, share = json.loads(output.read_text())["figures"]
        assert 0 < share["median"] < 100 and share["facts"]["calls"] >= 4 * 4 and wall["median"] > 0
