"""Bad input of every kind at every endpoint: a refusal that helps, and nobody else notices.

Here bodies that are no JSON, or not the JSON of their endpoint; numbers and limits, and prompts have files of their
own. The endpoints are read from the interface itself, so a new one is covered or missed loudly.
"""

import json
import re

import pytest

from tests.server.battery import (
    BAD_BODIES,
    FOR_OTHER_MODELS,
    RAW,
    TEXT_FIELD,
    VALID,
    Battery,
    body_schemas,
    encode,
)

paths = pytest.mark.parametrize("path", sorted(VALID))


def test_every_endpoint_with_a_body_is_here():
    assert set(body_schemas()) == {*VALID, *FOR_OTHER_MODELS}


@paths
def test_the_small_body_is_taken(battery: Battery, path):
    assert battery.post(path, VALID[path]).status_code == 200


@pytest.mark.parametrize("path", sorted(FOR_OTHER_MODELS))
def test_what_needs_another_model_is_refused_by_name(battery: Battery, path):
    battery.refused(path, FOR_OTHER_MODELS[path], "needs a model")


class TestJson:
    @pytest.mark.parametrize(("content", "said"), BAD_BODIES)
    def test_what_is_wrong_with_a_body_is_told(self, battery: Battery, content, said):
        """One reader reads the bodies of all endpoints: here at three, in the form of each API."""
        for path in ("/generate", "/v1/completions", "/v1/messages"):
            battery.refused(path, content, said)

    @paths
    def test_every_endpoint_reads_its_body_so(self, battery: Battery, path):
        for content, said in BAD_BODIES[-3:]:
            battery.refused(path, content, said)

    @paths
    def test_a_name_given_twice_is_refused(self, battery: Battery, path):
        name, value = next(iter(VALID[path].items()))
        pair = f"{json.dumps(name)}: {json.dumps(value)}"
        error = battery.refused(path, f"{{{pair}, {pair}}}".encode(), f"{name} must be given once")
        assert error.get("param", name) == name

    @pytest.mark.parametrize("path", sorted(TEXT_FIELD))
    @pytest.mark.parametrize("raw", [r'"a\ud83d"', r'"\udc00\ud83d"'])
    def test_text_that_is_none_is_refused(self, battery: Battery, path, raw):
        name = TEXT_FIELD[path]
        battery.refused(path, encode(VALID[path] | {name: RAW}, raw), f"{name} must be text")

    @pytest.mark.parametrize("path", sorted(TEXT_FIELD.keys() - {"/abort_request"}))
    @pytest.mark.parametrize("raw", [r'"\ud83d\ude00"', r'"a\u0000b"'])
    def test_a_whole_surrogate_pair_and_a_nul_are_text(self, battery: Battery, path, raw):
        body = encode(VALID[path] | {TEXT_FIELD[path]: RAW}, raw)
        assert battery.post(path, body).status_code == 200

    @paths
    def test_other_content_types_are_refused(self, battery: Battery, path):
        body = json.dumps(VALID[path]).encode()
        for kind in (
            *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", ";"),
        ):
            battery.refused(path, body, "'Content-Type: application/json'", status=415, **{"Content-Type": kind})

    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            ("application/json; charset=utf-8", 200),
            ("Application/JSON;charset=UTF8", 200),
            ("application/vnd.api+json", 200),
            ("application/json; charset=latin-1", 415),
        ],
    )
    def test_a_content_type_may_have_parameters(self, battery: Battery, kind, status):
        body = json.dumps(VALID["/tokenize"]).encode()
        assert battery.post("/tokenize", body, **{"Content-Type": kind}).status_code == status

    @paths
    def test_compressed_bodies_are_refused(self, battery: Battery, path):
        for coding in ("gzip", "br", "identity, gzip"):
            coded = {"Content-Encoding": coding}
            battery.refused(path, b"{}", "Content-Encoding must be identity", status=415, **coded)

    @paths
    def test_unknown_fields_are_named(self, battery: Battery, path):
        error = battery.refused(path, VALID[path] | {"temprature": 1}, "'temprature'")
        assert error.get("param", "temprature") == "temprature"

    @paths
    def test_a_long_unknown_field_gives_a_short_answer(self, battery: Battery, path):
        battery.refused(path, VALID[path] | {"x" * 10**6: 1}, "unknown field")


class TestRequestIds:
    @pytest.mark.parametrize("given", ["abc-1.2:3_x", "a" * 128])
    def test_a_harmless_one_comes_back(self, battery: Battery, given):
        for path in ("/health", "/nowhere"):
            response = battery.server.http.get(path, headers={"x-request-id": given})
            assert response.headers["x-request-id"] == given

    @pytest.mark.parametrize("given", ["a" * 129, "a b", "a;b", "<script>", "a\u00e9", "", "%0d%0a"])
    def test_another_is_replaced(self, battery: Battery, given):
        response = battery.server.http.get("/health", headers={"x-request-id": given.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])

    def test_two_are_replaced(self, battery: Battery):
        response = battery.server.http.get("/health", headers=[("x-request-id", "a"), ("x-request-id", "b")])
        assert response.headers.get_list("x-request-id")[0] not in ("a", "b")

    def test_each_api_has_its_header(self, battery: Battery):
        for path, body in VALID.items():
            for content in (body, {}):
                headers = battery.post(path, content).headers
                assert headers["x-request-id"]
                assert headers.get("request-id") == (
                    headers["x-request-id"] if path.startswith("/v1/messages") else None
                )
