from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.processing.stop_strings import StopMatcher
from tests.constrained.work import work

TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(text=TEXT, stops=STOPS)
def test_state_equals_brute_force_after_every_character(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    prefixes = {stop[:n] for stop in stops for n in range(1, len(stop) + 1)}
    for end, char in enumerate(text, start=1):
        seen = text[:end]
        match_len = matcher.advance(char)
        assert match_len == max((len(stop) for stop in stops if seen.endswith(stop)), default=0)
        assert matcher.held_len == max((len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0)


def test_a_matcher_costs_nothing_before_its_text_comes() -> None:
    short, long = (["a" * n + str(i) for i in range(32)] for n in (1, 1000))
    assert work(lambda: StopMatcher(long)) == work(lambda: StopMatcher(short))


def test_long_stop_strings_cost_a_constant_per_character() -> None:
    stops = ["a" * n + "b" for n in range(990, 1022)]
    matcher = StopMatcher(stops)
    text = "a" * 2000 + "b"
    matches: list[int] = []
    assert work(lambda: matches.extend(map(matcher.advance, text))) < 10 * len(stops) * len(text)
    assert matches[-1] == 1022 and not any(matches[:-1])


def test_a_matcher_may_be_used_again() -> None:
    matcher = StopMatcher(["aab", "ac"])
    assert [matcher.advance(char) for char in "aa"] == [0, 0]
    matcher.reset()
    assert matcher.held_len == 0 and [matcher.advance(char) for char in "bac"] == [0, 0, 2]
