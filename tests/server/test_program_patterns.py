"""`/v1/programs`: the patterns of conditions, which grammar processes compile."""

import asyncio
import random
import threading
from typing import NoReturn

import pytest

from jsg.constrained.text_patterns import PatternSet, PatternTables, pattern_tables
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.errors import GrammarError, QueueFullError
from jsg.lang.executor.limits import ProgramLimits
from jsg.server.caller import Caller
from jsg.server.native import programs
from tests.server.posted_programs import gen_program, judged, matching, run
from tests.server.scripted import ScriptedServer
from tests.server.threads import ServerMaker


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


class TestPatterns:
    """The front compiles none of them: a grammar process does, for all patterns of a post together."""

    def test_all_patterns_of_a_post_are_compiled_together_and_for_its_key(self, server: ScriptedServer):
        answer = run(server, judged(matching("a+", "h."), matching("x"), matching("a+")), arguments={"q": "hi"})
        assert (answer["text"], answer["errors"]) == ("then otherwise otherwise ", [])
        assert server.engine.grammars.given == [(PatternSet("matches", ("a+", "h.", "x")), Caller().tenant)]
        run(server, gen_program())
        assert len(server.engine.grammars.given) == 1, "a post without patterns has nothing compiled"

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_a_pattern_that_is_refused_is_named_with_its_node_before_anything_runs(
        self, server: ScriptedServer, is_stream: bool
    ):
        graph = judged(matching("fine"), matching("fine", "(a"))
        body = {"graph": graph, "arguments": {"q": "hi"}, "stream": is_stream}
        response = server.http.post("/v1/programs", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "graph")
        assert error["message"].startswith("node 4 (cond, ask:3): the pattern '(a' of matches() is refused: ")
        assert not server.engine.requests

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (GrammarError("matches: patterns must compile within 5 s", param="matches"), 400),
            (QueueFullError("others still come before it; try again later"), 503),
        ],
    )
    def test_patterns_that_take_too_long(self, server: ScriptedServer, monkeypatch, error, status):
        async def fail(patterns: PatternSet, owner: str) -> NoReturn:
            raise error

        monkeypatch.setattr(server.engine.grammars, "patterns", fail)
        body = {"graph": judged(matching("a")), "arguments": {"q": "hi"}}
        response = server.http.post("/v1/programs", json=body)
        assert response.status_code == status and str(error) in response.json()["error"]["message"]

    def test_a_program_whose_patterns_compile_takes_the_place_of_its_key_until_it_leaves(
        self, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
    ):
        begun, ended = threading.Event(), threading.Event()

        async def wait(compiler: GrammarCompiler, patterns: PatternSet, owner: str) -> PatternTables:
            if begun.is_set():
                return pattern_tables(patterns)
            begun.set()
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

        monkeypatch.setattr(GrammarCompiler, "patterns", wait)
        body = {"graph": judged(matching("a")), "arguments": {"q": "ab"}}
        with make_server(server={"max_requests_per_key": 1}) as server:
            connection = server.send("/v1/programs", body)
            assert begun.wait(60)
            assert server.http.post("/v1/programs", json=body).status_code == 429
            connection.close()
            assert ended.wait(60)
            assert server.http.post("/v1/programs", json=body).json()["text"] == "otherwise "

    def test_matching_is_charged_for_its_work(self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
        """Each character of the text can have come to thousands of places."""
        pattern = "(" + "|".join(f".{{0,{20 + n}}}{char}" for n, char in enumerate("abcdefghijklmnopqrst")) + ")*"
        monkeypatch.setattr(programs, "LIMITS", ProgramLimits(text_chars=200_000))
        text = "".join(random.Random(0).choices("abcdefghijklmnopqrst", k=2_000))
        answer = run(server, judged(matching(pattern)), arguments={"q": text})
        assert any("more text" in error["message"] for error in answer["errors"])
