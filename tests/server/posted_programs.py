"""Programs that are posted to `/v1/programs`, and what comes of them."""

import copy
import json
from typing import Any

from tests.server.battery import PROGRAM
from tests.server.running import check_discreet
from tests.server.scripted import ScriptedServer


def graph_of(program: Any, **constants: object) -> dict[str, Any]:
    return json.loads(program.compile(**constants).to_json())


def gen_program(count: int = 1, **args: object) -> dict[str, Any]:
    """Gens `a0`, `a1`, ... one behind the other, each with these arguments."""
    graph = copy.deepcopy(PROGRAM)
    graph["nodes"] = graph["nodes"][:2]
    for number in range(count):
        graph["nodes"].append(
            {"kind": "generate", "id": 2 + number, "stream": 0, "line": f"ask:{3 + number}", "name": f"a{number}",
             "args": {"max_tokens": 2} | args}
        )  # fmt: skip
    graph["outputs"] = {f"a{n}": {"text": [{"node": 2 + n, "name": f"a{n}"}]} for n in range(count)}
    return graph


def run(server: ScriptedServer, graph: dict, **body) -> dict:
    response = server.http.post("/v1/programs", json={"graph": graph, "arguments": {"q": "hi"}} | body)
    assert response.status_code == 200, response.text
    check_discreet(response.text)
    return response.json()


def judged(*conditions: dict[str, Any]) -> dict[str, Any]:
    """A program that appends "then" or "otherwise" for each of these conditions."""
    graph = copy.deepcopy(PROGRAM)
    graph["nodes"] = graph["nodes"][:1]
    for number, condition in enumerate(conditions):
        place = {"stream": 0, "line": f"ask:{2 + number}"}
        then, otherwise = (
            {"nodes": [{"kind": "append", "id": 3 * number + i, **place, "pieces": [text]}], "outputs": {}}
            for i, text in ((2, "then "), (3, "otherwise "))
        )
        graph["nodes"].append(
            {"kind": "cond", "id": 3 * number + 1, **place, "condition": condition, "then": then}
            | {"otherwise": otherwise}
        )
    return graph | {"outputs": {}, "returns": {"constant": None}}


def matching(*patterns: str) -> dict[str, Any]:
    return {"any": [{"matches": [[{"argument": "q"}], pattern]} for pattern in patterns]}
