"""What the server tells of itself: to clients, to routers, and never a secret, a path or an address."""

import dataclasses
import pathlib

import httpx

import jsg
from jsg.config import EngineConfig, ServerConfig
from jsg.server.native.info import HIDDEN_KNOBS
from tests.server.running import RunningServer
from tests.server.scrape import scrape
from tests.server.threads import ServerMaker

PATHS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load", "/version", "/v1/models")
TOLD = {"served_model_name", "model_path", "tokenizer_path", "root_path"}  # names, and a path that clients know
LONG = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 1000}}


def test_model_info(http: httpx.Client):
    info = http.get("/model_info").json()
    assert info["model_path"] == "fake" and info["is_generation"] is True
    assert (info["context_length"], info["max_request_tokens"], info["vocab_size"]) == (1024, 1024, 512)
    assert info == http.get("/get_model_info").json()


def test_server_info(http: httpx.Client):
    info, other = http.get("/server_info").json(), http.get("/get_server_info").json()
    assert info.keys() == other.keys()
    chosen = ("page_size", "context_length", "max_running_requests", "max_total_tokens")
    assert [info[name] for name in chosen] == [info["model_info"][name] for name in chosen]
    assert info["page_size"] == 1 and info["version"] == jsg.__version__
    assert info["internal_states"][0]["num_running"] == 0
    assert info["model_info"].items() <= http.get("/model_info").json().items()


def test_routers_are_told_where_events_are(make_server: ServerMaker, http: httpx.Client):
    assert "kv_events" not in http.get("/server_info").json()
    where = {"kv_events_endpoint": "tcp://*:5557", "kv_events_topic": "kv@pod@model"}
    with make_server(server=where) as server:
        assert server.http.get("/server_info").json()["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": None,
            "endpoint_port_base": 5557,
            "topic": "kv@pod@model",
            "block_size": 16,
            "dp_size": 1,
            "replay_port_base": 5558,
        }


def test_every_knob_is_told_or_hidden_on_purpose(http: httpx.Client):
    """A new knob that holds a text must be looked at: it may be a secret."""
    knobs = [*dataclasses.fields(ServerConfig), *dataclasses.fields(EngineConfig)]
    assert {knob.name for knob in knobs} - http.get("/server_info").json().keys() == HIDDEN_KNOBS
    texts = {knob.name for knob in knobs if "str" in str(knob.type) and not knob.metadata["choices"]}
    assert texts - HIDDEN_KNOBS == TOLD


def test_no_secret_no_path_and_no_address_is_told(make_server: ServerMaker, tokenizer_dir: pathlib.Path):
    directory = tokenizer_dir.parent
    engine = {"model_path": str(directory), "tokenizer_path": str(tokenizer_dir)}
    engine["compilation_cache_dir"] = str(directory / "xla")
    key_file = directory / "keys"
    key_file.write_text("file-secret\n")
    knobs = {"api_key": "first-secret", "api_key_file": str(key_file), "admin_api_key": "admin-secret"}
    knobs |= {"cors_allow_origin": ("https://pages.example",), "served_model_name": "mine"}
    with make_server(engine=engine, server=knobs) as server:
        server.http.headers["Authorization"] = "Bearer admin-secret"
        for path in PATHS:
            response = server.http.get(path)
            assert response.status_code == 200, response.text
            for hidden in ("secret", str(directory), "pages.example", "127.0.0.1", str(server.http.base_url.port)):
                assert hidden not in response.text, path
        names = {"model_path": directory.name, "tokenizer_path": tokenizer_dir.name}
        assert names.items() <= server.http.get("/server_info").json().items()
        assert names.items() <= server.http.get("/model_info").json().items()


def test_the_load(server: RunningServer):
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "waiting": {}, "num_tokens": 0}
    assert server.http.get("/get_load").json() == [idle]
    with server.http.stream("POST", "/generate", json=LONG) as response:
        events = response.iter_raw()
        next(events)
        (load,) = server.http.get("/get_load").json()
    assert (load["num_reqs"], load["num_waiting_reqs"]) == (1, 0) and 1 < load["num_tokens"] <= 1001
    server.wait_for_stats(num_running=0)


def test_those_that_wait_are_part_of_the_load(make_server: ServerMaker):
    with make_server(engine={"max_running_requests": 1}) as server:
        body = LONG | {"input_ids": [[1], [2], [3]]}
        with server.http.stream("POST", "/generate", json=body) as response:
            events = response.iter_raw()
            next(events)
            (load,) = server.http.get("/get_load").json()
            assert scrape(server.http).by("jsg:waiting_requests", "reason") == {"rows": 2}
        assert (load["num_reqs"], load["num_waiting_reqs"], load["waiting"]) == (3, 2, {"rows": 2})


def test_versions(http: httpx.Client):
    assert http.get("/version").json() == {"version": jsg.__version__}
    weights = http.get("/get_weight_version").json()["weight_version"]
    assert weights == http.get("/model_info").json()["weight_version"] == "default"


def test_what_the_engine_cannot_tell_is_a_500_that_does_not_say_why(make_server: ServerMaker):
    with make_server(engine={"model_path": "uncounted"}) as server:
        for path in ("/server_info", "/get_load"):
            response = server.http.get(path)
            assert response.status_code == 500 and "page equation" not in response.text
        assert server.http.get("/health").status_code == 200


def test_an_engine_that_stands_still_holds_nobody_up(make_server: ServerMaker):
    with make_server(server={"health_timeout": 0.3}) as server:
        with server.engines[0].frozen():
            for method, path in (("GET", "/server_info"), ("GET", "/get_load"), ("POST", "/flush_cache")):
                response = server.http.request(method, path)
                assert response.status_code == 504
                assert "--health-timeout" in response.json()["error"]["message"]
            assert server.http.get("/model_info").status_code == 200
        server.wait_for_stats(num_running=0)
