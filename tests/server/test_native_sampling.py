"""`sampling_params` of `/generate`."""

import pytest

from jsg.errors import RequestError
from jsg.server.native.sampling import REFUSED_SAMPLING, one_each, to_samplings


def test_a_number_that_the_client_names_stays():
    assert to_samplings({"max_new_tokens": 500}, [1000], 1024)[0].max_new_tokens == 500
    assert to_samplings({"max_new_tokens": None}, [1000], 1024)[0].max_new_tokens == 24


def test_one_set_for_all_is_checked_once():
    samplings = to_samplings({"logit_bias": {"5": 1.5}}, [3] * 100, 1000)
    assert len(samplings) == 100
    assert len(set(map(id, samplings))) == 1


@pytest.mark.parametrize("name", sorted(REFUSED_SAMPLING))
def test_what_is_refused_is_named_with_what_to_do_instead(name):
    with pytest.raises(RequestError, match=rf"^{name} is not supported: \w") as refused:
        to_samplings({name: "x"}, [1], 10)
    assert refused.value.param == name
    for nothing in (None, False, "", [], {}):
        assert to_samplings({name: nothing}, [1], 10) == to_samplings({}, [1], 10)
    with pytest.raises(RequestError, match=f"^{name} is not supported"):
        to_samplings({name: 0}, [1], 10)


def test_what_changes_nothing_is_checked_all_the_same():
    for value in (True, False, None):
        assert to_samplings({"spaces_between_special_tokens": value}, [1], 10) == to_samplings({}, [1], 10)
    with pytest.raises(RequestError, match="spaces_between_special_tokens must be true or false, but got 'yes'"):
        to_samplings({"spaces_between_special_tokens": "yes"}, [1], 10)
    assert to_samplings({"stream_interval": 1}, [1], 10) == to_samplings({}, [1], 10)
    for other in (2, 0, True, 1.0, "1"):
        with pytest.raises(RequestError, match=r"^stream_interval must be 1, but got"):
            to_samplings({"stream_interval": other}, [1], 10)


def test_one_each():
    assert one_each("rid", None, 2, "d") == ["d", "d"] and one_each("rid", "a", 2, "d") == ["a", "a"]
    assert one_each("rid", ["a", None], 2, "d") == ["a", "d"]
    assert one_each("top_logprobs_num", 0, 2, 7) == [0, 0]
