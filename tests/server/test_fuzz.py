"""Nothing that can be sent gives a 5xx: bodies close to valid ones, and whatever the interface's description allows."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from tests.engine.fake_core import CRASHING_TOKEN, FAILING_TOKEN
from tests.server.battery import MESSAGES, PROGRAM, VALID, body_schemas, error_of, interface
from tests.server.running import RunningServer
from tests.server.test_methods import ENDLESS, routes_of
from tests.server.threads import ServerMaker

RICH_PROGRAM: dict[str, Any] = {
    **PROGRAM,
    "nodes": [
        *PROGRAM["nodes"],
        {"kind": "fork", "id": 3, "stream": 0, "line": "ask:4", "branches": [1, 2], "offsets": [0, 3]},
        {"kind": "append", "id": 4, "stream": 1, "line": "ask:5", "pieces": ["b", {"node": 2, "name": "a"}]},
        {"kind": "generate", "id": 5, "stream": 1, "line": "ask:6", "name": "b", "args": {"max_tokens": 2, "n": 2}},
        {"kind": "generate", "id": 6, "stream": 2, "line": "ask:7", "args": {"max_tokens": 1, "temperature": 0.5}},
        {"kind": "join", "id": 7, "stream": 0, "line": "ask:8", "branches": [1, 2], "mode": "concate_and_append"},
        {"kind": "choose", "id": 8, "stream": 0, "line": "ask:9", "name": "c", "choices": [["x"], [{"argument": "q"}]],
         "method": "token_trie"},
        {"kind": "loop", "id": 9, "stream": 0, "line": "ask:10", "max_rounds": 3,
         "until": {"any": [{"equals": [[{"node": 10, "name": "d"}], ["z"]]}, {"matches": [["a"], "a*"]}]},
         "body": {"nodes": [{"kind": "generate", "id": 10, "stream": 0, "line": "ask:11", "name": "d",
                             "args": {"max_tokens": 1}}],
                  "outputs": {"d": {"text": [{"node": 10, "name": "d"}]}}}},
        {"kind": "cond", "id": 11, "stream": 0, "line": "ask:12", "otherwise": {"nodes": [], "outputs": {}},
         "condition": {"contains": [[{"node": 9, "name": "d"}], ["e"]]}, "then": {"outputs": {}, "nodes": [
             {"kind": "append", "id": 12, "stream": 0, "line": "ask:13", "pieces": ["!"]}]}},
    ],
    "returns": {"dict": {"all": {"list": [{"text": [{"node": 8, "name": "c"}]}, {"constant": 1}]}}},
}  # fmt: skip
RICH: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [[1, 2], [3]],
        "sampling_params": {"max_new_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}, "n": 2, "temperature": 0.5},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "rid": ["a", "b"],
    },
    "/select": {
        "prompt": ["a", {"markup": "b"}, [1], {"offset": 3}, "c", {"branches": [["d"], [[3]]]}, {"template": "f"}],
        "choices": ["yes", "y", "no"],
        "method": "unconditional_likelihood_normalized",
        "temperature": 0.5,
        "seed": 1,
        "unconditional": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "seed": 1,
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2, "stop": "x"},
    "/v1/messages": {
        "messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}],
        "system": "s",
        "max_tokens": 2,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": True,
    },
    "/v1/programs": {
        "graph": RICH_PROGRAM,
        "arguments": {"q": "ab"},
        "sampling_params": {"temperature": 0.0, "stop": ["x"]},
        "stream": True,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "i",
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "stream": True,
    },
}
"""Larger bodies, of which there is more to spoil."""


@pytest.fixture(scope="module")
def small(make_server: ServerMaker) -> Iterator[RunningServer]:
    """A server whose longest request is 64 tokens, so that every answer is short."""
    with make_server(engine={"max_total_tokens": 64}) as server:
        yield server
        assert server.is_running
        assert server.engines[0].is_running, "the engine was lost"
        server.wait_for_stats(num_running=0)


texts = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["", "\0", "\ud800", "<|im_end|>", "../../etc/passwd", "{{7*7}}", "%s%n", "a" * 5000, "\u202e", "-1", "null"]
)
integers = st.integers(-3, 300) | st.sampled_from([2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18])
numbers = integers | st.floats() | st.sampled_from([10**400, -0.0, 5e-324])
scalars = st.none() | st.booleans() | numbers | texts
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)


def field_names() -> list[str]:
    schemas = interface()["components"]["schemas"].values()
    return sorted({name for schema in schemas for name in schema.get("properties", {})})


names = st.deferred(lambda: st.sampled_from(field_names()) | texts)


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*place, key))


@st.composite
def spoiled(draw: st.DrawFn, bodies: dict[str, list[Any]], junk: st.SearchStrategy[Any] = junk) -> tuple[str, Any]:
    """A path, and a valid body of it of which one to three parts are changed."""
    path = draw(st.sampled_from(sorted(bodies)))
    body: Any = json.loads(json.dumps(draw(st.sampled_from(bodies[path]))))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(body))))
        parent = body
        for key in place[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "add", "repeat"])):
            case "replace" if place:
                parent[place[-1]] = draw(junk)
            case "remove" if place:
                del parent[place[-1]]
            case "add" if isinstance(target := parent[place[-1]] if place else body, dict):
                target[draw(names)] = draw(junk)
            case "repeat" if place and isinstance(parent, list):
                parent += [parent[place[-1]]] * draw(st.sampled_from([1, 50, 3000]))
    return path, body


def send(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    """The answer; it is no failure inside, and a refusal in the form of its API."""
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, f"{content[:2000]!r} gave {response.text}"
    if response.status_code != 200:
        assert error_of(path, response)["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"server_error"' not in response.text and "api_error" not in response.text
    return response


def is_safe(value: Any) -> bool:
    """Whether the scripted engine does not fail or end on purpose."""
    return not any(value_at(value, place) in (FAILING_TOKEN, CRASHING_TOKEN) for place in places(value))


def value_at(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def check_spoiled(server: RunningServer, spoilt: tuple[str, Any], as_utf8: bool) -> None:
    path, body = spoilt
    hypothesis.assume(is_safe(body))
    send(server, path, json.dumps(body, ensure_ascii=not as_utf8).encode(errors="surrogatepass"))


def check_damaged(server: RunningServer, path: str, body: Any, cuts: list[tuple[float, bytes]]) -> None:
    content = json.dumps(body).encode()
    for where, inserted in cuts:
        at = math.floor(where * len(content))
        content = content[:at] + inserted + content[at + len(inserted) // 2 + 1 :]
    send(server, path, content)


BODIES = {path: [body, RICH.get(path, body)] for path, body in VALID.items()}
all_paths = st.sampled_from(sorted(VALID))
damages = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4) | st.sampled_from(list(b'{}[]":,\\0e-'.split()))))


@pytest.mark.parametrize(
    "num_examples",
    [
        30,
        pytest.param(300, marks=pytest.mark.slow),
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
class TestMutated:
    """A thousand examples are long."""

    def test_spoiled_bodies(self, small: RunningServer, num_examples):
        @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(spoilt=spoiled(BODIES), as_utf8=st.booleans())
        def run(spoilt, as_utf8):
            check_spoiled(small, spoilt, as_utf8)

        run()

    def test_damaged_bytes(self, small: RunningServer, num_examples):
        @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(path=all_paths, cuts=damages)
        def run(path, cuts):
            check_damaged(small, path, BODIES[path][-1], cuts)

        run()


FAST = {("POST /tokenize", "positive"), ("POST /v1/score", "negative"), ("GET /debug/radix", "negative")}


def cases() -> Iterator[Any]:
    """Every operation with what its description allows, and, where something is said of its input, with the rest.

    A fast one of each kind of failure, because to describe what a body may be takes most of a second. Fifty examples
    of each are long.
    """
    for route in routes_of(create_app(FrontDoor(), ServerConfig())):
        if not route.include_in_schema or route.path == ENDLESS:
            continue
        path = re.sub(":[a-z]+}", "}", route.path)  # as it is described
        has_input = route.body_field is not None or bool(route.dependant.query_params)
        for label in (f"{method} {path}" for method in sorted(route.methods)):
            for mode in ("positive", "negative") if has_input else ("positive",):
                if (label, mode) in FAST:
                    yield pytest.param(label, mode, 4, id=f"{label} {mode}")
                yield pytest.param(label, mode, 15, marks=pytest.mark.slow, id=f"{label} {mode} more")
                yield pytest.param(
                    label, mode, 50, marks=[pytest.mark.slow, pytest.mark.long], id=f"{label} {mode} many"
                )


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    """By their names. The package is imported here, because of all processes one runs these tests."""
    import schemathesis

    found = [result.ok() for result in schemathesis.openapi.from_dict(interface()).get_all_operations()]
    return {operation.label: operation for operation in found if operation.path != ENDLESS}


@pytest.mark.parametrize(("label", "mode", "num_examples"), list(cases()))
def test_the_description_is_true(small: RunningServer, operations: dict[str, Any], label, mode, num_examples):
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as conformance

    checks = (
        not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_headers_conformance,
        conformance.response_schema_conformance,
    )

    @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operations[label].as_strategy(generation_mode=GenerationMode(mode)))
    def run(case):
        hypothesis.assume(is_safe(case.body if isinstance(case.body, dict | list) else {}))
        response = case.call(base_url=str(small.http.base_url), timeout=20)
        case.validate_response(response, checks=checks)

    run()


def test_every_operation_is_tried(operations: dict[str, Any]):
    described = {(label, "positive") for label in operations} | {
        (label, "negative")
        for label, operation in operations.items()
        for described in [interface()["paths"][operation.path][operation.method]]
        if "requestBody" in described or any(each["in"] == "query" for each in described.get("parameters", ()))
    }
    assert {(case.values[0], case.values[1]) for case in cases()} == described > FAST


@pytest.mark.parametrize("path", sorted(RICH))
def test_what_is_spoiled_is_right_before(small: RunningServer, path: str):
    response = send(small, path, json.dumps(RICH[path]).encode())
    assert response.status_code == 200, response.text


class TestDescription:
    def test_it_is_served(self, small: RunningServer):
        assert small.http.get("/openapi.json").json() == interface()

    def test_every_body_is_described_in_full(self):
        known = interface()["components"]["schemas"]
        for path, schema in body_schemas().items():
            described = known[schema["$ref"].rsplit("/", 1)[1]]
            assert described["additionalProperties"] is False, path
            assert described["properties"], path

    def test_streams_are_described(self):
        streaming = {
            path
            for path, methods in interface()["paths"].items()
            if "text/event-stream" in methods.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
        }
        assert streaming == set(RICH) - {"/select"}

    def test_keys_are_described_where_there_are_some(self):
        keyed = create_app(FrontDoor(), ServerConfig(api_key=("a",))).openapi()
        assert set(keyed["components"]["securitySchemes"]) == {"bearer", "header"}
        for path, methods in keyed["paths"].items():
            for operation in methods.values():
                assert ("security" in operation) == (path not in ("/health", "/ready"))
        assert "securitySchemes" not in interface()["components"]

    def test_no_failure_is_described_that_never_comes(self):
        assert "HTTPValidationError" not in json.dumps(interface())
