"""`/select`: scores of texts that may come next, and choosing one."""

import math
from collections.abc import Sequence

import pytest

from jsg.types import FinishReason, FinishType
from tests.server.running import check_discreet
from tests.server.scripted import ScriptedServer
from tests.server.test_programs import graph_of, judge


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    """Its engine holds "y" for three times as likely as "n", and everything else for certain."""
    made = scripted_server
    likely, unlikely = (made.tokenizer.encode(char, add_special_tokens=False)[0] for char in "yn")

    def score(ids: Sequence[int], index: int) -> float:
        return math.log({likely: 0.3, unlikely: 0.1}.get(ids[index], 1.0))

    made.engine.score = score
    return made


def select(server: ScriptedServer, **body) -> dict:
    response = server.http.post("/select", json={"prompt": "So? ", "choices": ["yes!", "no"]} | body)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(server: ScriptedServer, text: str) -> list[int]:
    return server.tokenizer.encode(text, add_special_tokens=False)


def test_each_choice_is_scored_in_one_batch(server: ScriptedServer):
    answer = select(server)
    assert answer["common_ids"] == ids_of(server, "So? ")
    yes, no = answer["choices"]
    assert yes["token_ids"] == ids_of(server, "yes!") and yes["token_texts"] == list("yes!")
    assert yes["logprobs"] == pytest.approx([math.log(0.3), 0, 0, 0])
    assert no["logprobs"] == pytest.approx([math.log(0.1), 0])
    assert yes["unconditional"] == []
    assert answer["part_ids"] == []
    assert answer["meta_info"]["prompt_tokens"] == 8 + 5, "the n of no is scored with yes!, so a request asks for its o"
    assert "choice" not in answer and "probabilities" not in answer
    assert len(server.engine.requests) == 2
    assert sorted(request.sampling.max_new_tokens for request in server.engine.requests) == [0, 1]


def test_it_chooses_with_calibrated_probabilities(server: ScriptedServer):
    answer = select(server, method="token_trie")
    assert (answer["choice"], answer["text"]) == (0, "yes!")
    assert answer["probabilities"] == pytest.approx([0.75, 0.25])
    assert select(server, method="token_trie", choices=["no", "yes!"])["choice"] == 1


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_the_published_methods(server: ScriptedServer, method: str):
    answer = select(server, method=method)
    assert (answer["choice"], answer["text"]) == (0, "yes!")
    assert answer["probabilities"] == pytest.approx([0.75, 0.25])  # they are the model's, whatever the method
    assert len(answer["meta_info"]["input_token_logprobs"]) == 2
    assert ("unconditional_token_logprobs" in answer["meta_info"]) == method.startswith("unconditional")


def test_sampling_by_a_seed_is_repeatable(server: ScriptedServer):
    drawn = [select(server, method="token_trie", temperature=1.0, seed=seed)["text"] for seed in range(20)]
    assert set(drawn) == {"yes!", "no"}
    assert drawn == [select(server, method="token_trie", temperature=1.0, seed=seed)["text"] for seed in range(20)]


def test_unconditional_scores(server: ScriptedServer):
    answer = select(server, unconditional=True)
    assert answer["choices"][0]["unconditional"] == [None, 0, 0, 0]
    assert len(server.engine.requests) == 4


def test_a_prompt_in_parts(server: ScriptedServer):
    answer = select(server, prompt=["ab", [300], "<|im_start|>"])
    assert answer["part_ids"] == [ids_of(server, "ab")]  # the last text was encoded with the choices
    assert 256 not in answer["common_ids"]
    answer = select(server, prompt="<|im_start|>")
    assert answer["common_ids"] == [256]


def test_choices_that_begin_alike_and_an_empty_one(server: ScriptedServer):
    answer = select(server, choices=["y", "yn", "", "n", "n"], method="token_trie")
    stays, goes, empty, first, second = answer["probabilities"]
    assert sum(answer["probabilities"]) == pytest.approx(1)
    assert first == second  # the same tokens share what they have
    assert goes == pytest.approx(stays / 9)  # "y" keeps what does not go on into "yn"
    assert empty == pytest.approx((1 - 0.3 - 0.1) / 1.0)


def test_a_single_choice_is_certain(server: ScriptedServer):
    assert select(server, choices=["y"], method="token_trie")["probabilities"] == [1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"choices": []}, "at least 1"),
        ({"choices": ["a"] * 513}, "at most 512"),
        ({"choices": "yes"}, "choices is not valid"),
        ({"choices": [1]}, "choices"),
        ({"method": "coin"}, "method"),
        ({"temperature": 1.0}, "temperature needs a method"),
        ({"seed": 1}, "seed needs a method"),
        ({"method": "greedy_token_selection", "temperature": 1.0}, "temperature"),
        ({"method": "token_trie", "temperature": -1.0}, "temperature"),
        ({"method": "token_length_normalized", "choices": ["a", ""]}, "token_trie"),
        ({"prompt": ["a", {"image": "aGk=", "media_type": "image/png"}]}, "cannot see"),
        ({"prompt": ""}, "before them"),
        ({"prompt": []}, "before them"),
        ({"prompt": "a" * 20_000, "choices": ["b"] * 512}, "choices must have at most"),
        ({"prompt": "a" * 9000}, "8192"),
        ({"prompt": [[1] * 9000]}, "8192"),
        ({"wish": 1}, "unknown field 'wish'"),
    ],
)
def test_what_is_wrong_is_named(server: ScriptedServer, body: dict, said: str):
    response = server.http.post("/select", json={"prompt": "So? ", "choices": ["yes!", "no"]} | body)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    check_discreet(response.text)


def test_a_namespace_of_its_own(server: ScriptedServer):
    select(server, cache_salt="mine", priority=2, rid="who")
    for request in server.engine.requests:
        assert request.namespace != "" and request.priority == 2
        assert request.rid.startswith("who-")


def test_what_was_aborted_has_no_scores(server: ScriptedServer):
    server.engine.finish = FinishReason(FinishType.ABORT, message="aborted")
    response = server.http.post("/select", json={"prompt": "So? ", "choices": ["yes!", "no"]})
    assert response.status_code == 499, response.text


def test_all_that_an_http_request_generates_is_one_post(server: ScriptedServer):
    """So it takes turns with what others send."""

    def posts_of(path: str, **body) -> set[str]:
        server.engine.requests.clear()
        assert server.http.post(path, json=body).status_code == 200 and len(server.engine.requests) > 1
        return {request.post for request in server.engine.requests}

    prompts = {"prompt": ["a", "b", "c"], "max_tokens": 1}
    choices = {"prompt": "So? ", "choices": ["yes!", "no"]}
    program = {"graph": graph_of(judge), "arguments": {"topic": "art"}}
    asked = [("/v1/completions", prompts)] * 2 + [("/select", choices), ("/v1/programs", program)]
    posts = [posts_of(path, **body) for path, body in asked]
    assert list(map(len, posts)) == [1] * 4
    assert len(set.union(*posts)) == 4 and "" not in set.union(*posts)
