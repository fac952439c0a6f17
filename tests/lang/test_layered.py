"""Dictionaries that fork: against plain copies, and that few entries are copied and few layers read."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.lang.words.layered import LayeredDict

STEPS = st.lists(
    st.tuples(st.integers(0, 7), st.one_of(st.none(), st.sampled_from("abcdefghij"))), min_size=1, max_size=60
)


@given(steps=STEPS)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_as_plain_copies(steps: list[tuple[int, str | None]]):
    """Each step forks one of the dictionaries, or sets a name in it."""
    layered, plain = [LayeredDict({"a": -1})], [{"a": -1}]
    for number, (which, name) in enumerate(steps):
        which %= len(plain)
        if name is None:
            layered.append(layered[which].fork())
            plain.append(dict(plain[which]))
        else:
            layered[which][name] = plain[which][name] = number
    for one, other in zip(layered, plain, strict=True):
        assert list(one.items()) == list(other.items()) and len(one) == len(other)
        assert all((name in one) == (name in other) and one.get(name) == other.get(name) for name in "abcxyz")


def test_forks_share_what_they_have_in_common():
    """The work of a chain of forks, and of many forks of one dictionary, is counted in entries of layers."""
    layered, shared = LayeredDict[int](), set[int]()
    num_copied = most_layers = 0
    for number in range(4096):
        layered[f"v{number}"] = number
        layered = layered.fork()
        most_layers = max(most_layers, len(layered._layers))
        num_copied += sum(len(layer) for layer in layered._layers if id(layer) not in shared)
        kept = list(layered._layers)
        shared = {id(layer) for layer in kept}
    assert most_layers <= 14 and num_copied < 14 * 4096
    many = [layered.fork() for _ in range(100)]
    assert all(each._layers[:-1] == layered._layers[:-1] for each in many)
    assert len({id(layer) for each in many for layer in each._layers[:-1]}) <= 14
