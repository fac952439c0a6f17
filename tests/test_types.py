"""The rules of a request. The error for each rule names the field that breaks it."""

import math

import pytest

from jsg.errors import RequestError
from jsg.types import Request, SamplingParams, expand_answers

HUGE = 10**400
NOT_NUMBERS = [math.nan, math.inf, -math.inf, HUGE, "1", None, True, [1]]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 1e-5, 1, 100.0], [-0.1, 100.1]),
        ("top_p", [1e-6, 0.5, 1], [0, 1e-46, 1.01]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 1, 2], [0, 1e-46, 2.1]),
        ("top_k", [-1, 1, 50, 5.0], [0, -2, 1.5, 2**31]),
        ("max_new_tokens", [0, 1, 2**31 - 1], [-1, 1.5, 2**31]),
        ("n", [1, 128], [0, 129, 1.5]),
        ("sampling_seed", [0, -1, 2**64 - 1], [2**64, 1.5, "a"]),
    ],
)
def test_numbers_have_ranges(name: str, good: list, bad: list):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    wrong = bad + [value for value in NOT_NUMBERS if not (name == "sampling_seed" and value is None)]
    for value in wrong:
        if value == HUGE and name == "sampling_seed":
            continue
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "no_stop_trim"])
def test_flags_are_true_or_false(name: str):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 1})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": HUGE}}, "logit_bias"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias"),
        ({"logit_bias": [[5.7, 1]]}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": {" 1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(fields: dict, name: str):
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams.from_dict(fields)
    assert error.value.param == name


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        (True, "true"),
        (None, "null"),
        (-5, "-5"),
        pytest.param("x" * 10**6, "'" + "x" * 199 + "...", id="long text"),
        pytest.param([1] * 10**6, "[1, 1, 1, 1, 1, 1, 1, 1, ...]", id="long list"),
        pytest.param(10**5000, "a very large int", id="5000 digits"),
    ],
)
def test_a_message_has_the_rule_what_was_received_and_what_to_do(value, quoted: str):
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature=value)
    assert str(error.value) == f"temperature must be in [0, 100], but got {quoted}; leave it out for the default"


@pytest.mark.parametrize("tiny", [9e-6, 1e-9, 5e-324])
def test_a_tiny_temperature_is_greedy(tiny: float):
    assert SamplingParams(temperature=tiny) == SamplingParams(temperature=0)


def test_a_whole_number_with_a_point_is_an_integer():
    made = SamplingParams.from_dict({"max_new_tokens": 16.0, "n": 1.0, "sampling_seed": -3.0})
    assert all(type(value) is int for value in (made.max_new_tokens, made.n, made.sampling_seed))
    assert made == SamplingParams(max_new_tokens=16, sampling_seed=-3)


def test_any_json_of_sglang_is_any_object():
    given, meant = ({"json_schema": schema} for schema in ("$$ANY$$", {"type": "object"}))
    assert SamplingParams.from_dict(given) == SamplingParams.from_dict(meant)


def test_what_people_write_becomes_what_is_kept():
    made = SamplingParams(stop="END", stop_token_ids=[3], logit_bias={"7": 1, 8: 2})  # pyright: ignore[reportArgumentType]
    assert made.stop == ("END",) and made.stop_token_ids == (3,)
    assert made.logit_bias == ((7, 1.0), (8, 2.0))
    assert SamplingParams.from_dict({"stop": ["a", "b"], "temperature": None}) == SamplingParams(stop=("a", "b"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input_ids": ()}, "input_ids"),
        ({"input_ids": (1, 2.5)}, "input_ids"),
        ({"input_ids": (1, True)}, "input_ids"),
        ({"input_ids": (1, -1)}, "input_ids"),
        ({"input_ids": (1, 2**31)}, "input_ids"),
        ({"token_ids_logprob": ("a",), "return_logprob": True}, "token_ids_logprob"),
        ({"token_ids_logprob": (1,)}, "token_ids_logprob"),
        ({"top_logprobs_num": 3}, "top_logprobs_num"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"top_logprobs_num": 129, "return_logprob": True}, "top_logprobs_num"),
        ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
        ({"logprob_start_len": 10**6, "return_logprob": True}, "logprob_start_len"),
        ({"namespace": 3}, "namespace"),
        ({"sampling": SamplingParams(n=2)}, "n"),
        *(({"snapshot_at": points}, "snapshot_at") for points in ((0,), (2,), (1, 1), (-1, 1), (1.0,), (True,))),
    ],
)
def test_a_wrong_request_is_named(fields: dict, name: str):
    with pytest.raises(RequestError) as error:
        Request(**({"rid": "r", "input_ids": (1,)} | fields))
    assert error.value.param == name and len(str(error.value)) < 500


def test_answers_of_one_request_have_seeds_of_their_own():
    seeds = [p.sampling_seed for p in expand_answers(SamplingParams(n=3, sampling_seed=2**64 - 1), fresh_seed=5)]
    assert seeds == [2**64 - 1, 0, 1]
    assert [p.sampling_seed for p in expand_answers(SamplingParams(n=2), fresh_seed=5)] == [5, 6]
