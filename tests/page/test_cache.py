"""The view of the cache in a browser: what requests do to the radix tree is seen while they do it."""

import re
from typing import Any

import pytest

from tests.page.conftest import Opener
from tests.server.running import RunningServer

pytestmark = pytest.mark.slow
NUM_NODES = 20_000
FEWEST_FRAMES = 30
FRAMES = """async ([numNodes, seconds]) => {
    const { TreeCanvas } = await import("/page/canvas.js");
    const { arrange, RadixTree } = await import("/page/radix.js");
    const nodes = [[1, 0, 100, 0, 1, 0, 0]];
    for (let id = 2; id <= numNodes; id += 1) nodes.push([id, Math.floor(id / 2), 5, 0, id % 600, 0, 0]);
    const tree = new RadixTree();
    const now = () => Date.now() / 1000;
    tree.apply({ type: "snapshot", time: now(), pool: {}, nodes, num_nodes: numNodes });
    const canvas = new TreeCanvas(() => {});
    document.getElementById("view").replaceChildren(canvas.element);
    canvas.element.style.height = "600px";
    let frames = 0;
    let next = 0;
    const end = performance.now() + 1000 * seconds;
    while (performance.now() < end) {
        if (performance.now() >= next) {  // as often as a server tells changes
            next = performance.now() + 100;
            const hits = Array.from({ length: 100 }, (_, index) => ["hit", 1 + ((frames + index) % numNodes)]);
            canvas.draw(arrange(tree), tree.apply({ type: "delta", time: now(), changes: hits }), tree);
        }
        await new Promise(requestAnimationFrame);
        frames += 1;
    }
    canvas.end();
    return frames / seconds;
}"""


def generate(server: RunningServer, text: str) -> None:
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert server.http.post("/generate", json=body, timeout=60).status_code == 200


def open_empty(opened: Opener, server: RunningServer) -> Any:
    """The view of a cache that was just emptied."""
    assert server.http.post("/flush_cache", timeout=60).status_code == 200
    page = opened(server, "/#cache").page
    page.get_by_text(re.compile("^0 nodes, 0 tokens")).wait_for()
    return page


def test_a_fork_a_hit_and_an_eviction_are_seen(opened: Opener, seeing: RunningServer):
    page = open_empty(opened, seeing)
    generate(seeing, "My name is Nina and I live in Oslo. Which city?")
    page.get_by_text(re.compile(r"^[1-9] nodes, \d+ tokens.* [1-9] new, 0 split")).wait_for()
    generate(seeing, "My name is Nina and I live in Rome. What name?")
    page.get_by_text(re.compile(r"^\d+ nodes, \d+ tokens.* [1-9]\d* hits, \d+ new, 1 split, 0 evicted")).wait_for()
    page.get_by_role("group", name="Radix tree").press("ArrowRight")
    page.get_by_text("My name is Nina and I live in", exact=True).wait_for()
    for number in range(40):  # more than the pool of 4096 tokens holds
        generate(seeing, f"{number} " * 80)
    page.get_by_text(re.compile(r"[1-9]\d* evicted")).wait_for()
    assert re.search(r"^4096 tokens = \d+ free \+ \d+ evictable", page.locator(".pool-bar").inner_text())


def test_the_last_minutes_are_shown_again(opened: Opener, seeing: RunningServer):
    page = open_empty(opened, seeing)
    generate(seeing, "What did I buy?")
    page.get_by_text(re.compile(r"^[1-9] nodes")).wait_for()
    slider = page.get_by_label("Last minutes")
    slider.press("Home")
    page.get_by_text(re.compile("^0 nodes, 0 tokens")).wait_for()
    page.get_by_role("button", name="Live").click()
    page.get_by_text(re.compile(r"^[1-9] nodes")).wait_for()


def test_who_may_not_see_texts_sees_the_tree(opened: Opener, seeing: RunningServer):
    one = opened(seeing)
    refusal = {"error": {"message": "only the admin key"}}
    one.page.route("**/debug/radix/events?text=true", lambda route: route.fulfill(status=403, json=refusal))
    one.page.get_by_role("tab", name="Cache").click()
    one.page.locator(".pool-bar").get_by_text(re.compile(r"^4096 tokens = ")).wait_for()
    assert one.refused == [403]


@pytest.mark.long
def test_many_nodes_are_drawn_fast_enough(opened: Opener, seeing: RunningServer):
    page = opened(seeing, "/#engine").page
    assert page.evaluate(FRAMES, [NUM_NODES, 3]) >= FEWEST_FRAMES
