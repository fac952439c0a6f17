"""`/v1/programs`: what runs, what is told, what is refused, what ends a program."""

import asyncio
import contextlib
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import jsg as sgl
from jsg.constrained.text_patterns import PatternSet, PatternTables, pattern_tables
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.errors import ContextLengthError, RequestError
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import Text
from jsg.processing.parts import TextPart
from jsg.server.caller import ApiCall, Caller
from jsg.server.http.event_stream import COMMENT
from jsg.server.native import programs
from jsg.server.native.lang_backend import FrontModel
from tests.server.battery import PROGRAM
from tests.server.posted_programs import gen_program, graph_of, run
from tests.server.running import RunningServer, data_of, events_of
from tests.server.scrape import Scrape, scrape, scrape_until
from tests.server.scripted import ScriptedServer
from tests.server.threads import ServerMaker, ServerThread


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


@sgl.function
def judge(s, topic):
    s += "Of " + topic + ": "
    s += sgl.gen("essay", max_tokens=8, temperature=0)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f" ({number}) "
        branch += sgl.gen("mark", max_tokens=3)
    branches.join()
    s += " so " + sgl.select("verdict", ["good", "bad"])
    return s["verdict"]


@sgl.function
def talk(s, shots, question):
    for number in range(6):
        s += sgl.user(f"{shots}{number}?") + sgl.assistant(f"yes {number}")
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=3))
    return s["answer"]


class TestRuns:
    def test_a_whole_program(self, server: ScriptedServer):
        answer = run(server, graph_of(judge), arguments={"topic": "art"})
        assert answer["object"] == "program" and answer["id"].startswith("program-")
        assert answer["variables"] == {"essay": "hello", "mark": ["hel"] * 3, "verdict": answer["return_value"]}
        assert answer["return_value"] in ("good", "bad")
        assert answer["text"] == f"Of art: hello so {answer['return_value']}" and answer["errors"] == []
        assert answer["usage"]["calls"] == 5 and answer["meta_info"]["essay"]["completion_tokens"] == 6
        assert sum(answer["meta_info"]["verdict"]["probabilities"]) == pytest.approx(1)

    def test_what_is_common_is_sent_as_the_tokens_it_was_and_held(self, server: ScriptedServer):
        run(server, graph_of(judge), arguments={"topic": "art"})
        first, *rest = server.engine.requests
        answer = server.tokenizer.encode("hello", add_special_tokens=False)
        common = (*first.input_ids, *answer)
        holds = [request for request in rest if request.hold]
        branches = [request for request in rest if not request.hold and request.sampling.max_new_tokens == 3]
        assert holds[0].input_ids == common
        assert len(branches) == 3
        assert all(branch.input_ids[: len(common)] == common for branch in branches)
        assert server.engine.held == []

    def test_defaults_of_the_run(self, server: ScriptedServer):
        graph = gen_program()
        del graph["nodes"][2]["args"]
        answer = run(server, graph, sampling_params={"max_tokens": 4, "temperature": 0.25})
        assert answer["variables"] == {"a0": "hell"}
        assert server.sampling.temperature == 0.25

    def test_one_of_what_the_key_may_see(self, server: ScriptedServer):
        run(server, gen_program())
        run(server, gen_program(), cache_salt="other")
        first, second = server.engine.requests
        assert first.namespace != second.namespace

    def test_events(self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
        take, variables = programs._News.take, set[str]()

        def noting(news: programs._News) -> list[dict[str, Any]]:
            events = take(news)
            variables.update(event["variable"] for event in events if "delta" in event)
            return events

        monkeypatch.setattr(programs._News, "take", noting)
        server.engine.goes_on = lambda: "essay" in variables  # its beginning is on its way to the client
        body = {"graph": graph_of(judge), "arguments": {"topic": "art"}, "stream": True}
        with server.http.stream("POST", "/v1/programs", json=body) as response:
            *news, last = events_of(response)
        result = last["result"]
        for name in ("essay", "verdict"):
            own = [event for event in news if event.get("variable") == name]
            assert "".join(event.get("delta", "") for event in own) == result["variables"][name]
            assert [event.get("done") for event in own] == [None] * (len(own) - 1) + [True]
        assert [event for event in news if event.get("variable") == "mark"] == [{"variable": "mark", "done": True}]
        assert len([event for event in news if event.get("variable") == "essay"]) > 2  # it came as it grew
        texts = [event["text"] for event in news if "text" in event]
        calls = {event["index"]: event["call"] for event in news if "call" in event}
        assert [calls[index] for index in range(len(calls))] == result["timeline"] and len(calls) == 5
        assert len(texts) > 2 and "".join(texts) == result["text"] == f"Of art: hello so {result['return_value']}"

    def batch(self, server: ScriptedServer, batch: list[dict], **body) -> dict:
        answer = server.http.post("/v1/programs", json={"graph": graph_of(judge), "batch": batch} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def test_many_runs_in_one_post_are_what_each_is_alone(self, server: ScriptedServer):
        answer = self.batch(server, [{"topic": "art"}, {"topics": "?"}, {"topic": 7}])
        alone = run(server, graph_of(judge), arguments={"topic": 7})
        assert answer["object"] == "program.batch" and [each["item"] for each in answer["results"]] == [0, 1, 2]
        first, wrong, last = answer["results"]
        assert wrong["failure"]["type"] == "GraphError" and "needs the argument 'topic'" in wrong["failure"]["message"]
        assert first["result"]["text"].startswith("Of art: hello so ")
        for name in ("variables", "text", "return_value", "errors", "usage"):
            assert last["result"][name] == alone[name]

    @pytest.mark.parametrize("wrong", [None, "yes 4"])
    def test_many_runs_execute_their_common_beginning_once(
        self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, wrong: str | None
    ):
        extend, extended = TokenSession.extend, list[Any]()

        async def counting(session: TokenSession, item: Any) -> str:
            extended.append(item)
            if isinstance(item, Text) and item.text == wrong:
                raise RequestError("not this text")
            return await extend(session, item)

        monkeypatch.setattr(TokenSession, "extend", counting)
        graph, items = graph_of(talk), [{"shots": "Is it ", "question": f"why {n}?"} for n in range(9)]
        answer = server.http.post("/v1/programs", json={"graph": graph, "batch": items}).json()
        if wrong is None:
            assert len(extended) == 37 + 9 * 4  # all turns before the question and the beginning of its own; the rest
        results = [each["result"] for each in answer["results"]]
        for result, item in zip(results, items, strict=True):
            alone = run(server, graph, arguments=item)
            assert {**result, "id": "", "meta_info": {}, "timeline": []} == {
                **alone, "id": "", "meta_info": {}, "timeline": []
            }  # fmt: skip
            assert bool(result["errors"]) == (wrong is not None)

    def test_numbers_that_are_equal_but_written_otherwise_are_not_common(self, server: ScriptedServer):
        values = [1, 1.0, True, 0.0, -0.0, "1"]
        answer = self.batch(server, [{"topic": value} for value in values])
        texts = [each["result"]["text"] for each in answer["results"]]
        assert [text.split(":")[0] for text in texts] == [f"Of {value}" for value in values]
        few = self.batch(server, [{"topic": 1}, {"topic": 1.0}])["results"]
        assert few[1]["result"]["text"].startswith("Of 1.0:")

    def test_a_stream_of_many_runs_has_each_as_it_ends(self, server: ScriptedServer):
        body = {"graph": graph_of(judge), "batch": [{"topic": str(n)} for n in range(20)], "stream": True}
        with server.http.stream("POST", "/v1/programs", json=body) as response:
            first, *events = events_of(response)
        assert first == {"object": "program.batch", "items": 20}
        texts = {event["item"]: event["result"]["text"] for event in events}
        assert len(events) == 20 and all(texts[n].startswith(f"Of {n}: hello") for n in range(20))
        assert server.engine.held == []

    def test_many_runs_have_the_limits_of_one(self, server: ScriptedServer):
        graph = gen_program(max_tokens=100_000)
        for batch, status in (([{"q": "hi"}] * 11, 400), ([{"q": "hi"}] * 1025, 400), ([], 400)):
            answer = server.http.post("/v1/programs", json={"graph": graph, "batch": batch})
            assert answer.status_code == status, answer.text
        assert (
            "new_tokens up to 1000000"
            in server.http.post("/v1/programs", json={"graph": graph, "batch": [{"q": "hi"}] * 11}).text
        )
        both = server.http.post("/v1/programs", json={"graph": graph, "batch": [{}], "arguments": {}})
        assert both.status_code == 400 and "arguments and batch exclude each other" in both.text

    def test_many_runs_need_the_room_of_one_program(self, make_server: ServerMaker):
        with make_server(server={"max_requests_per_key": 1}) as server:
            assert all(
                "result" in each for each in self.batch(server, [{"topic": str(n)} for n in range(9)])["results"]
            )

    def test_n7_a_stream_on_which_nothing_happens_says_that_it_lives(
        self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(programs, "BEAT_S", 0.001)
        server.engine.answer = "a" * 90
        body = {"graph": gen_program(max_tokens=90), "arguments": {"q": "hi"}, "stream": True}
        assert COMMENT.decode() in server.http.post("/v1/programs", json=body).text


class TestFails:
    def test_a_failed_branch_is_told_with_its_node_and_the_others_are_there(self, server: ScriptedServer):
        @sgl.function
        def two(s):
            s += "a"
            left, right = s.fork(2)
            left += "b" * 9000 + sgl.gen("x", max_tokens=2)
            right += sgl.gen("y", max_tokens=2)
            s["left"], s["right"] = left["x"], right["y"]

        answer = run(server, graph_of(two), arguments={})
        assert answer["variables"]["right"] == "he" and answer["variables"]["left"] is None
        (error,) = answer["errors"]
        assert error["file"] == "test_programs.py" and error["line"] == two.func.__code__.co_firstlineno + 4
        assert error["type"] == ContextLengthError.__name__ and isinstance(error["node"], int)

    def test_a_failure_of_the_engine(self, server: ScriptedServer):
        server.engine.failure = RequestError("this is refused; leave it out")
        answer = run(server, gen_program(2))
        assert answer["variables"] == {"a0": None, "a1": None}
        assert {error["message"] for error in answer["errors"]} == {"this is refused; leave it out"}
        assert answer["text"] is None

    def test_nobody_is_told_of_a_bug(self, server: ScriptedServer, caplog: pytest.LogCaptureFixture):
        server.engine.failure = KeyError("a secret")  # pyright: ignore[reportAttributeAccessIssue]
        answer = run(server, gen_program())
        assert "secret" not in json.dumps(answer) and answer["errors"][0]["type"] == "JsgError"
        assert "internal error" in answer["errors"][0]["message"]
        assert "secret" in caplog.text


def node(graph: dict, **changes: object) -> dict:
    """The graph with another last node."""
    graph = copy.deepcopy(graph)
    graph["nodes"][-1] |= changes
    return graph


def choose(**fields: object) -> dict:
    """A `choose` in place of the gen, with these fields."""
    first = {"kind": "choose", "id": 2, "stream": 0, "line": "ask:3", "name": "a", "choices": [["x"], ["y"]]}
    return PROGRAM | {"nodes": [*PROGRAM["nodes"][:2], first | fields], "outputs": {}}


def loops(depth: int, rounds: int) -> dict:
    """Loops in loops, the innermost of which does nothing."""
    inner: list[dict] = []
    for number in reversed(range(depth)):
        body = {"nodes": inner, "outputs": {}}
        inner = [{"kind": "loop", "id": 2 + number, "stream": 0, "line": "ask:3", "max_rounds": rounds, "body": body}]
    return PROGRAM | {"nodes": PROGRAM["nodes"][:2] + inner, "outputs": {}}


MANY = [{"kind": "append", "id": 1 + i, "stream": 0, "line": "ask:2", "pieces": ["a"]} for i in range(4200)]


class TestRefused:
    @pytest.mark.parametrize(
        ("graph", "said"),
        [
            ({}, "jsg_graph"),
            (PROGRAM | {"jsg_graph": 2}, "jsg_graph"),
            (PROGRAM | {"more": 1}, "more"),
            (node(PROGRAM, kind="exec"), "node 2"),
            (node(PROGRAM, stream=7), "node 2"),
            (node(PROGRAM, id=1), "node 1"),
            (node(PROGRAM, args={"max_tokens": "x"}), "node 2"),
            (node(PROGRAM, args={"wish": 1}), "node 2"),
            (node(PROGRAM, args={"max_tokens": 2_000_000}), "node 2"),
            (node(PROGRAM, args={"n": 5000}), "node 2"),
            (node(PROGRAM, args={"temperature": -1.0}), "node 2"),
            (node(PROGRAM, args={"max_tokens": -1}), "node 2"),
            (node(PROGRAM, args={"top_p": 7.0}), "node 2"),
            (node(PROGRAM, args={"dtype": "int", "regex": "a"}), "node 2"),
            (node(PROGRAM, args={"top_logprobs_num": 3}), "node 2"),
            (node(PROGRAM, args={"top_logprobs_num": 999, "return_logprob": True}), "node 2"),
            (node(PROGRAM, args={"logprob_start_len": 7}), "node 2"),
            (choose(method="greedy_token_selection", temperature=0.5), "node 2"),
            (choose(method="token_trie", temperature=-1.0), "node 2"),
            (choose(method="coin"), "node 2"),
            (PROGRAM | {"outputs": {"a": {"text": [{"node": 9, "name": "a"}]}}}, "node 9"),
            (PROGRAM | {"nodes": PROGRAM["nodes"] * 2}, "node 0"),
            (PROGRAM | {"nodes": []}, "open"),
            (PROGRAM | {"nodes": [PROGRAM["nodes"][0], *MANY], "outputs": {}}, "nodes up to"),
            (loops(3, 256), "up to"),
            (loops(20, 256), "up to"),
            (loops(1, 1000), "rounds up to"),
            (PROGRAM | {"outputs": {f"a{i}": {"text": ["x"]} for i in range(3000)}}, "outputs up to"),
        ],
    )
    def test_a_bad_graph_is_refused_before_anything_runs(self, server: ScriptedServer, graph: dict, said: str):
        response = server.http.post("/v1/programs", json={"graph": graph, "arguments": {"q": "hi"}})
        assert response.status_code == 400, response.text[:500]
        assert said in response.json()["error"]["message"]
        assert server.engine.requests == []

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({}, "'q'"),
            (None, "'q'"),
            ({"q": "a", "r": "b"}, "'r'"),
            ({"q": ["a"]}, "'q'"),
            ({"q": {"image": "aGk=", "media_type": "image/png"}}, "'q'"),
        ],
    )
    def test_arguments(self, server: ScriptedServer, arguments: dict | None, said: str):
        response = server.http.post("/v1/programs", json={"graph": PROGRAM, "arguments": arguments})
        assert response.status_code == 400, response.text
        assert said in response.json()["error"]["message"]

    def test_n3_reports_that_are_asked_for_as_they_should(self, server: ScriptedServer):
        graph = node(PROGRAM, args={"max_tokens": 2, "return_logprob": True, "logprob_start_len": 1})
        answer = run(server, graph, arguments={"q": "hi"})
        assert answer["errors"] == []

    def test_a_fork_that_is_too_wide(self, server: ScriptedServer):
        graph = copy.deepcopy(PROGRAM)
        graph["nodes"] += [
            {"kind": "fork", "id": 3, "stream": 0, "line": "ask:4", "branches": list(range(1, 300))},
        ]
        response = server.http.post("/v1/programs", json={"graph": graph, "arguments": {"q": "hi"}})
        assert response.status_code == 400 and "fan_out" in response.json()["error"]["message"]
        assert "node 3" in response.json()["error"]["message"]

    def test_an_answer_that_would_be_too_large(self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
        """A few kilobytes may name the same text very often."""
        monkeypatch.setattr(programs, "MAX_ANSWER_CHARS", 50_000)
        server.engine.answer = "a" * 7000
        server.engine.step_len = 1000
        graph = node(PROGRAM, args={"max_tokens": 8000})
        graph["outputs"] = {f"a{i}": {"text": [{"node": 2, "name": "a"}]} for i in range(10)}
        body = {"graph": graph, "arguments": {"q": "hi"}}
        for is_stream in (False, True):
            response = server.http.post("/v1/programs", json=body | {"stream": is_stream})
            assert "50000 characters in all" in response.text and len(response.content) < 60_000

    def test_an_argument_that_is_repeated_too_often(self, server: ScriptedServer):
        graph = PROGRAM | {"returns": {"list": [{"text": [{"argument": "q"}, "!"]}] * 1000}}
        answer = run(server, graph, arguments={"q": "a" * 100_000})
        assert answer["return_value"] is None
        assert any("more text" in error["message"] for error in answer["errors"])

    def test_patterns_that_read_too_much(self, server: ScriptedServer):
        """Reading is charged by what it costs."""
        graph = loops(1, 250)
        graph["nodes"][-1]["until"] = {"matches": [[{"argument": "q"}], "(a|aa)*b"]}
        answer = run(server, graph, arguments={"q": "a" * 2000})
        assert any("more text" in error["message"] for error in answer["errors"])
        assert run(server, graph, arguments={"q": "aab"})["errors"] == []

    def test_pictures_cannot_be_seen_yet(self, server: ScriptedServer):
        graph = PROGRAM | {"arguments": [{"name": "q", "kind": "image"}]}
        graph["nodes"] = [
            PROGRAM["nodes"][0],
            {"kind": "media", "id": 1, "stream": 0, "line": "ask:2", "source": {"argument": "q"}},
            PROGRAM["nodes"][2],
        ]
        answer = run(server, graph, arguments={"q": {"image": "aGk=", "media_type": "image/png"}})
        assert "cannot see" in answer["errors"][0]["message"]


class TestLimits:
    @pytest.mark.parametrize("stop_regex", [None, "x+"])
    def test_programs_wait_for_room_of_their_key(
        self, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, stop_regex: str | None
    ):
        """Two of six branches each where three answers may be under way. Room may be lost while a pattern compiles."""

        async def slow(compiler: GrammarCompiler, patterns: PatternSet, owner: str) -> PatternTables:
            await asyncio.sleep(0.005)
            return pattern_tables(patterns)

        monkeypatch.setattr(GrammarCompiler, "patterns", slow)

        @sgl.function
        def wide(s):
            s += "abc"
            branches = s.fork(6)
            for branch in branches:
                branch += sgl.gen("x", max_tokens=5, stop_regex=stop_regex)
            branches.join()

        with make_server(server={"max_requests_per_key": 3}) as server:
            body = {"graph": graph_of(wide)}
            with ThreadPoolExecutor(2) as threads:
                sent = [threads.submit(server.http.post, "/v1/programs", json=body) for _ in range(2)]
            for answer in (future.result().json() for future in sent):
                assert answer["variables"] == {"x": ["abcab"] * 6}, answer["errors"]

    def test_programs_of_a_key_are_bounded(self, make_server: ServerMaker):
        long = {"graph": gen_program(max_tokens=900), "arguments": {"q": "ab"}, "stream": True}
        with make_server(server={"max_requests_per_key": 1}) as server:
            connection = server.send("/v1/programs", long)
            server.wait_for_stats(num_running=1)
            response = server.http.post("/v1/programs", json=long)
            assert response.status_code == 429 and "programs" in response.json()["error"]["message"]
            connection.close()
            server.wait_for_stats(num_running=0)

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_a_program_takes_no_longer_than_it_may(self, make_server: ServerMaker, is_stream: bool):
        body = {"graph": gen_program(max_tokens=900), "arguments": {"q": "ab"}, "stream": is_stream}
        with make_server(server={"program_timeout": 0.3}) as server:
            response = server.http.post("/v1/programs", json=body)
            assert "--program-timeout" in response.text
            if not is_stream:
                assert response.status_code == 504
            server.wait_for_stats(num_running=0, num_waiting=0)

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_who_leaves_ends_all_of_it(self, server_of_fakes: RunningServer, is_stream: bool):
        @sgl.function
        def wide(s, q):
            s += q
            branches = s.fork(4)
            for branch in branches:
                branch += sgl.gen("x", max_tokens=900) + sgl.gen("y", max_tokens=900)
            branches.join()

        body = {"graph": graph_of(wide), "arguments": {"q": "ab"}, "stream": is_stream}
        connection = server_of_fakes.send("/v1/programs", body)
        server_of_fakes.wait_for_stats(num_running=4, num_holds=1)
        added = server_of_fakes.stats()["num_added"]
        connection.close()
        server_of_fakes.wait_for_stats(num_running=0, num_holds=0, num_waiting=0, num_added=added)

    def test_its_calls_are_counted_like_other_requests(self, server_of_fakes: RunningServer):
        def finished(seen: Scrape) -> float:
            return seen.get("jsg:requests_finished_total", route="/v1/programs", reason="length")

        http = server_of_fakes.http
        before = scrape(http)
        http.post("/v1/programs", json={"graph": gen_program(3), "arguments": {"q": "ab"}}).raise_for_status()
        seen = scrape_until(http, lambda seen: finished(seen) == finished(before) + 3)
        assert seen.get("jsg:generation_tokens_total") == before.get("jsg:generation_tokens_total") + 6
        assert seen.get("jsg:answers_open") == 0

    def test_a_program_under_way_goes_on_while_the_server_ends(self, make_server: ServerMaker):
        body = {"graph": gen_program(3, max_tokens=100), "arguments": {"q": "ab"}, "stream": True}
        with make_server(server={"shutdown_timeout": 600}) as server:
            with contextlib.closing(server.send("/v1/programs", body)) as connection:
                response = connection.getresponse()
                response.readline()
                server.terminate()
                events = data_of(response.read().decode().splitlines())
            (result,) = [event for event in events if "result" in event]
            assert result["result"]["errors"] == []
            assert [len(text) for text in result["result"]["variables"].values()] == [100] * 3
            assert server.join() is None


async def test_what_a_program_left_held_ends_with_it(server: ScriptedServer):
    app: Any = server.http.app
    model = FrontModel(app.state.door.front, ApiCall(caller=Caller(), route="/"), namespace="")
    holds = [await model.hold((TextPart(text),)) for text in ("a", "b")]
    for hold in holds:
        await hold.cached()
    assert len(server.engine.held) == 2
    await holds[0].release()
    await holds[0].release()
    assert len(server.engine.held) == 1
    await model.close()
    assert server.engine.held == []


@pytest.fixture
def server_of_fakes(shared_server: ServerThread) -> RunningServer:
    shared_server.reset()
    return shared_server


def test_news_of_a_slow_reader_are_put_together():
    news = programs._News()
    for char in "abc":
        news.add("x", char, is_done=False)
        news.add("y", char, is_done=char == "c")
        news.add(None, char, is_done=False)
    assert news.take() == [
        {"variable": "x", "delta": "abc"},
        {"variable": "y", "delta": "abc"},
        {"variable": "y", "done": True},
        {"text": "abc"},
    ]
    assert news.take() == []
