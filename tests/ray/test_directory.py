"""The router that all fronts share, without Ray."""

from jsg.ray.directory import MAX_REPLICAS, MAX_SILENCE_S, Directory, Pool, Report, by_hash
from jsg.ray.prompt import PromptUnits

POOL = Pool(4096, 1, 4)


class Front:
    """One front's calls, at a time that tests set."""

    def __init__(self, directory: Directory, name: str = "front") -> None:
        self.directory = directory
        self.name = name
        self.now = 0.0

    def route(self, key: str, first: int, replicas: tuple[str, ...] = ("a", "b")) -> str | None:
        prompt = PromptUnits(tuple(range(first, first + 320)), max_new_tokens=8)
        return self.directory.route(self.name, key, prompt, replicas, self.now)

    def note(self, *reports: Report) -> None:
        self.directory.note(self.name, reports, self.now)

    def answer(self, key: str, first: int, replicas: tuple[str, ...] = ("a", "b")) -> str | None:
        chosen = self.route(key, first, replicas)
        self.note(Report(key, "lease", chosen or replicas[0], POOL), Report(key, "begin"), Report(key, "end"))
        return chosen


def ready() -> Front:
    front = Front(Directory())
    assert front.answer("first", 10**6) is None  # no lease has told how large the caches are
    return front


def test_a_prefix_goes_to_the_replica_that_holds_it_whichever_front_asks():
    front = ready()
    homes = {first: front.answer(f"cold {first}", first) for first in (0, 1000, 2000, 3000)}
    assert set(homes.values()) == {"a", "b"}  # new prefixes are spread
    other = Front(front.directory, "other")
    assert {first: other.answer(f"warm {first}", first) for first in homes} == homes


def test_a_request_counts_where_serve_has_put_it():
    front = ready()
    chosen = front.route("one", 0)
    other = "b" if chosen == "a" else "a"
    front.note(Report("one", "lease", other, POOL), Report("one", "begin"))
    assert front.route("two", 0) == other  # it holds the prefix, and the chosen one does not
    front.note(Report("two", "end"), Report("one", "end"))


def test_the_requests_of_a_front_that_was_killed_end():
    front, killed = ready(), Front(ready().directory, "killed")
    killed.directory = front.directory
    busy = {killed.route(f"lost {number}", 1000 * number) for number in range(6)}
    assert busy == {"a", "b"}
    assert front.directory.num_live == 6
    front.now = MAX_SILENCE_S + 1
    front.note()
    assert front.directory.num_live == 0


def test_new_replicas_get_the_places_of_those_that_have_gone():
    front = ready()
    for number in range(2 * MAX_REPLICAS):
        name = f"replica {number}"
        assert front.answer(f"request {number}", 0, (name,)) == name
    assert front.answer("back", 0, ("replica 1",)) == "replica 1"


def test_a_hash_moves_only_the_conversations_of_a_replica_that_has_gone():
    names = ["a", "b", "c", "d"]
    conversations = [str(number).encode() for number in range(200)]
    before = {each: by_hash(each, names)[0] for each in conversations}
    after = {each: by_hash(each, ["a", "b", "d"])[0] for each in conversations}
    assert set(before.values()) == set(names)
    assert all(after[each] == before[each] for each in conversations if before[each] != "c")
