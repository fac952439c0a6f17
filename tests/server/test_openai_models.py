"""`/v1/models`, and what needs another kind of model."""

import datetime

import pytest

from jsg.server.openai.refused import NEEDED
from tests.server.openai_calls import chat, error_of


class TestModels:
    def test_the_list(self, http):
        body = http.get("/v1/models").json()
        assert body["object"] == "list"
        card = body["data"][0]
        assert len(body["data"]) == 1
        assert card == http.get("/v1/models/fake").json()
        assert (card["id"], card["root"], card["object"], card["owned_by"]) == ("fake", "fake", "model", "jsg")
        assert card["max_model_len"] == 1024

    def test_anthropics_clients_read_it_too(self, http):
        body = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "fake", "fake")
        card = body["data"][0]
        assert (card["type"], card["display_name"]) == ("model", "fake")
        assert datetime.datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]

    def test_when_it_was_made_does_not_change(self, http):
        created = http.get("/v1/models/fake").json()["created"]
        answered_at = chat(http, max_tokens=1).json()["created"]
        assert answered_at - 3600 < created <= answered_at
        assert http.get("/v1/models").json()["data"][0]["created"] == created

    def test_a_name_with_slashes(self, make_server):
        with make_server(server={"served_model_name": "organisation/model"}) as named:
            for path in ("organisation/model", "organisation%2Fmodel"):
                assert named.http.get(f"/v1/models/{path}").json()["id"] == "organisation/model"
            assert chat(named.http, model="organisation/model", max_tokens=1).status_code == 200

    @pytest.mark.parametrize("name", ["other", "a/b", "fake/", "%00"])
    def test_another_is_not_here(self, http, name):
        response = http.get(f"/v1/models/{name}")
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake"])
    def test_it_is_read_only(self, http, path):
        assert http.post(path, json={}).status_code == 405
        assert http.delete(path).status_code == 405


@pytest.mark.parametrize("path", sorted(NEEDED))
def test_what_needs_another_kind_of_model_is_refused_by_name(http, path):
    response = http.post(path, json={"model": "fake", "input": "a"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "model"
    assert path in error["message"]
    assert "'fake' generates text" in error["message"]
    assert http.get(path).status_code == 405
