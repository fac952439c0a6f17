"""The parts of `bench.lang` on the embedded model with few rounds: what they do counts, not how long it takes."""

import ast
import asyncio
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import jsg
from bench.lang import __main__ as bench_lang
from bench.lang import line_counts, overhead, reordering, selecting, workloads
from bench.lang.null_backend import ANSWER, NullBackend
from bench.lang.round_trips import PROMPT_TOKENS, measure_round_trips, prompts
from bench.lang.sharing import measure_sharing
from bench.lang.workloads import PROGRAMS, Sizes
from bench.report import Report

KNOBS = {"max_running_requests": 8, "max_total_tokens": 4096, "context_length": 1024, "deterministic": True}
"""A deterministic engine compiles a third of the programs."""
SMALL = Sizes(passage_words=20, thought_tokens=3, depth=2, num_dimensions=2)


@pytest.fixture
def report() -> Report:
    return Report("bench.lang", [], None)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_serial", [False, True])
def test_both_forms_of_a_program_ask_for_the_same(name: str, is_serial: bool):
    state = PROGRAMS[name].run(3, SMALL, is_serial, backend=NullBackend())
    expected = {
        "tree of thought": [ANSWER] * 4,
        "judge": ANSWER,
        "skeleton": [ANSWER] * 2,
    }
    assert state.ret_value == expected[name] and state.error() is None


def test_the_parallel_form_has_its_branches_at_once():
    backend = Meeting(4)
    state = workloads.judge.run(1, Sizes(num_dimensions=4), False, backend=backend)
    assert state.error() is None
    assert backend.most == 4


def test_the_serial_form_waits_for_each_branch():
    backend = Meeting(1)
    state = workloads.judge.run(1, Sizes(num_dimensions=4), True, backend=backend)
    assert state.error() is None
    assert backend.most == 1


class Meeting(NullBackend):
    """Gens wait until a number of them wait. Later gens pass without a wait."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.most = 0
        self.met: asyncio.Event | None = None

    async def passed(self) -> None:
        self.met = self.met or asyncio.Event()
        self.num_waiting += 1
        self.most = max(self.most, self.num_waiting)
        if self.num_waiting == self.size:
            self.met.set()
        async with asyncio.timeout(30):
            await self.met.wait()
        for _ in range(20):  # whoever else is on the way comes now
            await asyncio.sleep(0)
        self.num_waiting -= 1


def test_primitives_are_measured(report: Report):
    overhead.measure_primitives(report, rounds=1, count=2 * overhead.BRANCHES)
    assert len(report.figures) == len(overhead.PRIMITIVES)
    assert all(figure.smallest > 0 for figure in report.figures)


@pytest.mark.slow
def test_programs_in_flight_are_held_at_once(report: Report):
    overhead.measure_in_flight(report, count=20)
    assert [figure.name for figure in report.figures] == [
        "20 programs in flight, async bodies",
        "20 programs in flight, sync bodies",
    ]
    assert all(figure.facts["before"] <= figure.smallest for figure in report.figures)


@pytest.mark.slow
def test_sharing_compares_three_arms(report: Report):
    measure_sharing(report, "tiny", rounds=1, sizes=SMALL, **KNOBS)
    assert len(report.figures) == len(PROGRAMS) * 5
    assert [figure.name for figure in report.figures[:5]] == [
        "tree of thought: parallel",
        "tree of thought: branches awaited one by one",
        "tree of thought: --disable-radix-cache",
        "tree of thought: branches awaited one by one / parallel",
        "tree of thought: --disable-radix-cache / parallel",
    ]


@pytest.mark.slow
def test_select_and_the_three_calls_are_measured(report: Report):
    selecting.measure_select(report, "tiny", rounds=1, **KNOBS)
    ours, theirs, ratio = report.figures
    assert ratio.samples[0] == pytest.approx(ours.median / theirs.median)


@pytest.mark.slow
def test_a_program_is_sent_whole_and_interpreted(report: Report):
    measure_round_trips(report, rounds=1)
    slow, fast, ratio = report.figures
    assert ratio.samples[0] == pytest.approx(slow.median / fast.median)


def test_both_sides_of_the_reordering_ask_for_the_same():
    num_calls = []
    for make in reordering.SIDES.values():
        backend = Counting()
        states = list(make(SMALL, 7).run_batch(reordering.QUESTIONS, backend=backend))
        assert [state.error() for state in states] == [None] * len(reordering.QUESTIONS)
        num_calls.append(backend.num_calls)
    assert num_calls == [len(reordering.QUESTIONS)] * 2


class Counting(NullBackend):
    """Counts calls."""

    num_calls = 0

    async def passed(self) -> None:
        self.num_calls += 1


@pytest.mark.slow
def test_the_reordering_is_measured(report: Report):
    sizes = Sizes(passage_words=60, thought_tokens=3, depth=2, num_dimensions=2)
    reordering.measure_reordering(report, "tiny", rounds=1, sizes=sizes, **KNOBS)
    unordered, written, ratio = report.figures
    assert ratio.samples[0] == pytest.approx(written.median / unordered.median)
    # The same long text in front of all questions, or behind them all.
    assert unordered.facts["computed_tokens"] < written.facts["computed_tokens"] / 2


def test_every_prompt_of_the_chain_has_its_length():
    from tokenizers import Tokenizer

    assets = pathlib.Path(jsg.__file__).parent / "assets" / "tiny" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(assets))
    for text in prompts(5).values():
        assert len(tokenizer.encode(text).ids) == PROMPT_TOKENS


def test_lines_of_functions_are_counted(tmp_path: pathlib.Path):
    path = tmp_path / "program.py"
    path.write_text(
        '"""Page."""\nimport json\nDATA = [\n 1]\n\n@mark\ndef f(x):\n    """Doc\n    more."""\n\n    # why\n'
        "    return json.dumps(\n        x\n    )\n\n\ndef main():\n    print(f(DATA))\n"
    )
    assert line_counts.count_lines(path) == 5


def test_every_example_but_two_has_a_raw_form():
    examples = {path.stem for path in line_counts.EXAMPLES.glob("*.py")}
    # No API joins documents that were read apart; dspy_rag is about another library.
    assert set(line_counts.pairs()) == examples - {"common", "parallel_document_qa", "dspy_rag"}


def test_raw_forms_use_only_the_client():
    for path in line_counts.RAW.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("jsg") for name in names)


@pytest.fixture(scope="module")
def examples() -> Iterator[None]:
    before = set(sys.modules)
    sys.path.insert(0, str(line_counts.EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(line_counts.EXAMPLES))
        for name in set(sys.modules) - before:
            if (line_counts.EXAMPLES / f"{name}.py").is_file():
                del sys.modules[name]


def raw(name: str) -> ModuleType:
    module = __import__(f"bench.lang.raw.{name}", fromlist=["*"])
    assert isinstance(module, ModuleType)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_raw_forms_find_what_the_examples_find():
    """Programs whose lengths are compared have the same results."""
    openai = pytest.importorskip("openai")
    from bench.served import served

    with (
        served(["serve", "tiny", "--port", "0", "--max-running-requests", "16"]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        few_shot = __import__("few_shot")
        found = raw("few_shot").opposites(client, "tiny", few_shot.EXAMPLES, few_shot.WORDS)
        assert found["fast"] == "slow" and found["wide"] == "narrow"
        messages = raw("multi_turn_chat").chat(client, "tiny", ["My name is Nina.", "What is my name?"])
        assert messages[-1]["content"] == "Your name is Nina."
        json_extraction = __import__("json_extraction")
        records = raw("json_extraction").records(client, "tiny", json_extraction.SCHEMA, json_extraction.TEXTS)
        assert records[0] == {"name": "Nina", "age": 36, "city": "Oslo"}
        assert raw("self_consistency").vote(client, "tiny", "What is 7 + 8?")[0] == "15"
        tree = __import__("tree_of_thought")
        arguments = (tree.NUMBERS, tree.TARGET, tree.BREADTH, tree.DEPTH)
        assert sum(raw("tree_of_thought").search(client, "tiny", *arguments)) == tree.TARGET
        guide = raw("skeleton_of_thought").travel_guide(client, "tiny", "Peru Egypt")
        assert guide == "Peru. The capital of Peru is Lima.\nEgypt. The capital of Egypt is Cairo."
        judge = __import__("llm_judge")
        report = raw("llm_judge").judge(client, "tiny", judge.QUESTIONS, judge.ANSWERS)
        assert report["geography"]["Anna"] > 0.5 and report["counting"]["Ben"] > 0.5
        essay = __import__("essay_judge")
        shared = (essay.CITIES, essay.DIMENSIONS, essay.SUMMARY)
        assert raw("essay_judge").judge(client, "tiny", essay.PICTURE, essay.SHOWN, essay.ESSAY, *shared)[0] == "A"
        react = __import__("react_agent")
        answer = raw("react_agent").agent(
            client, "tiny", "What is the phone number of Clara?", react.PHONE_BOOK, react.look_up
        )
        assert answer == "The code of Clara is 8052."
        rag = __import__("rag")
        assert raw("rag").answers(client, "tiny", ["Where does Tom live?"], rag.retrieve) == ["Tom lives in Cairo."]


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench_lang._options(["--only", "sharing,lins"])
    assert "the parts are sharing" in capsys.readouterr().err
