"""Aborting, flushing, and looking at the prefix cache."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, events_of, key

LONG = {"max_new_tokens": 1000}
ABORTED = {"type": "abort", "message": "aborted"}


@contextlib.contextmanager
def answering(
    server: RunningServer, headers: dict[str, str] | None = None, **body: Any
) -> Iterator[Callable[[], httpx.Response]]:
    """A long request under way; call what it gives for its response."""
    responses: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=120) as http:
            body.setdefault("sampling_params", LONG)
            responses.append(http.post("/generate", json={"text": "ab", **body}, headers=headers))

    before = server.stats(key("root"))["num_added"]
    asking = threading.Thread(target=ask)
    asking.start()

    def response() -> httpx.Response:
        asking.join(20)
        return responses[0]

    count = len(body.get("text", "x")) * body.get("sampling_params", {}).get("n", 1) if "text" in body else 1
    server.wait_for_stats(key("root"), num_added=before + count)
    yield response
    asking.join(20)


def abort(server: RunningServer, headers: dict[str, str] | None = None, **body: Any) -> int:
    """How many answers it ended."""
    response = server.http.post("/abort_request", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["success"] is True
    return response.json()["aborted"]


def finish_types(response: httpx.Response) -> list[str]:
    return [answer["meta_info"]["finish_reason"]["type"] for answer in response.json()]


class TestAbort:
    def test_an_answer_that_is_waited_for_ends_as_aborted(self, server: RunningServer):
        with answering(server, rid="mine") as response:
            assert abort(server, rid="mine") == 1
            answer = response()
        assert answer.status_code == 200 and answer.json()["meta_info"]["finish_reason"] == ABORTED
        server.wait_for_stats(num_running=0)

    def test_a_stream_ends_with_an_event_that_says_so(self, server: RunningServer):
        body = {"text": "ab", "rid": "streamed", "stream": True, "sampling_params": LONG}
        with server.http.stream("POST", "/generate", json=body) as response:
            assert abort(server, rid="streamed") == 1
            last = events_of(response)[-1]
        assert last["meta_info"]["finish_reason"] == ABORTED
        assert last["text"] == ("ab" * 500)[: last["meta_info"]["completion_tokens"]]

    def test_the_name_of_a_list_is_that_of_all_its_answers(self, server: RunningServer):
        many = {"max_new_tokens": 1000, "n": 2}
        with answering(server, rid="g", text=["ab", "cd"], sampling_params=many) as response:
            assert abort(server, rid="g") == 4
            assert finish_types(response()) == ["abort"] * 4
        server.wait_for_stats(num_running=0)

    def test_the_name_of_one_prompt_is_that_of_its_answers_only(self, server: RunningServer):
        many = {"max_new_tokens": 600, "n": 2}
        with answering(server, rid="g", text=["ab", "cd"], sampling_params=many) as response:
            assert abort(server, rid="g_1") == 2
            assert finish_types(response()) == ["length", "length", "abort", "abort"]

    def test_names_that_only_begin_alike_are_others(self, server: RunningServer):
        with answering(server, rid="job1") as one, answering(server, rid="job12") as other:
            for begun in ("job", "job1.", "job1_", "ob1", "JOB1"):
                assert abort(server, rid=begun) == 0
            assert abort(server, rid="job1") == 1
            assert one().json()["meta_info"]["finish_reason"] == ABORTED
            assert abort(server, rid="job12") == 1
            assert other().json()["meta_info"]["finish_reason"] == ABORTED

    def test_a_name_that_nothing_has_is_no_error(self, server: RunningServer):
        assert abort(server, rid="nothing") == 0 and abort(server, abort_all=True) == 0

    def test_everything(self, server: RunningServer):
        with answering(server) as one, answering(server) as other:
            assert abort(server, rid="", abort_all=True) == 2
            for response in (one, other):
                assert response().json()["meta_info"]["finish_reason"] == ABORTED

    def test_answers_of_other_interfaces_have_names_too(self, server: RunningServer):
        body = {"prompt": "ab", "n": 2, "max_tokens": 1000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            rid = next(lines).split('"id":"')[1].split('"')[0]
            assert abort(server, rid=rid) == 2
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        server.wait_for_stats(num_running=0)

    @pytest.mark.parametrize(
        "body", [{}, {"rid": None}, {"rid": ""}, {"abort_all": False}, {"rid": "a", "abort_all": True}]
    )
    def test_one_of_both_must_be_given(self, http: httpx.Client, body: dict):
        response = http.post("/abort_request", json=body)
        assert response.status_code == 400
        assert "exactly one of rid and abort_all" in response.json()["error"]["message"]

    @pytest.mark.parametrize("body", [{"rid": 5}, {"rid": "x" * 300}, {"abort_all": 1}, {"abort_message": "bye"}])
    def test_what_is_wrong_is_named(self, http: httpx.Client, body: dict):
        response = http.post("/abort_request", json=body)
        assert response.status_code == 400
        assert next(iter(body)) in response.json()["error"]["message"]

    def test_a_key_ends_its_own_requests_only(self, two_keys: RunningServer):
        with answering(two_keys, key("alice"), rid="same") as hers, answering(two_keys, key("bob"), rid="same") as his:
            assert abort(two_keys, key("bob"), rid="same") == 1
            assert his().json()["meta_info"]["finish_reason"] == ABORTED
            assert abort(two_keys, key("bob"), abort_all=True) == 0
            assert abort(two_keys, key("root"), rid="same") == 0, "a name is its owner's, also to an admin"
            assert two_keys.stats(key("root"))["num_running"] == 1
            assert abort(two_keys, key("root"), abort_all=True) == 1
            assert hers().json()["meta_info"]["finish_reason"] == ABORTED


class TestFlush:
    def test_it_forgets_what_was_cached(self, http: httpx.Client):
        body = {"input_ids": [30, 31, 32], "sampling_params": {"max_new_tokens": 1}}
        counts = []
        for flushes in (False, False, True):
            if flushes:
                assert http.post("/flush_cache").json()["success"] is True
            counts.append(http.post("/generate", json=body).json()["meta_info"]["cached_tokens"])
        assert counts == [0, 2, 0]

    def test_it_is_refused_while_requests_run(self, server: RunningServer):
        body = {"text": "ab", "stream": True, "sampling_params": LONG}
        with server.http.stream("POST", "/generate", json=body) as response:
            events = response.iter_raw()
            next(events)
            refused = server.http.post("/flush_cache")
            assert refused.status_code == 400 and "no request runs" in refused.json()["error"]["message"]

    def test_it_is_for_admins(self, two_keys: RunningServer):
        refused = two_keys.http.post("/flush_cache", headers=key("alice"))
        assert refused.status_code == 403 and "--admin-api-key" in refused.json()["error"]["message"]
        two_keys.wait_for_stats(key("root"), num_running=0)
        assert two_keys.http.post("/flush_cache", headers=key("root")).status_code == 200
