"""What a router knows of an engine's tree: the names of blocks, and which of them it keeps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.front.prefix_index import (
    BLOCK_TOKENS,
    BlockHolders,
    PrefixIndex,
    PrefixPath,
    answered_path,
    prefix_path,
)
from jsg.media import MediaInput
from jsg.types import Request, SamplingParams
from tests.engine.integrity import check_index

B = BLOCK_TOKENS
IDS = tuple(range(4 * B))


def request(ids: tuple[int, ...] = IDS, **fields) -> Request:
    return Request(rid="r", input_ids=ids, **fields)


def num_shared(a: PrefixPath, b: PrefixPath) -> int:
    """Blocks that two stems have in common; none behind the first that differs."""
    same = [x == y for x, y in zip(a.stem, b.stem, strict=False)]
    first = same.index(False) if False in same else len(same)
    assert not any(same[first:])
    return first


class TestPath:
    def test_a_prompt_has_as_many_blocks_as_it_fills(self):
        assert [len(prefix_path(request(IDS[:n])).stem) for n in (1, B - 1, B, 2 * B - 1, 4 * B)] == [0, 0, 1, 1, 4]

    def test_names_agree_up_to_the_first_other_token(self):
        for index in (0, B - 1, B, 3 * B + 1):
            other = (*IDS[:index], 7777, *IDS[index + 1 :])
            assert num_shared(prefix_path(request()), prefix_path(request(other))) == index // B

    def test_namespaces_share_nothing(self):
        assert num_shared(prefix_path(request()), prefix_path(request(namespace="a"))) == 0

    def test_a_position_jump_parts_what_is_behind_it(self):
        plain, jumped = prefix_path(request()), prefix_path(request(position_jumps=((2 * B, 5),)))
        assert num_shared(plain, jumped) == 2
        assert num_shared(jumped, prefix_path(request(position_jumps=((2 * B, 6),)))) == 2
        assert num_shared(jumped, prefix_path(request(position_jumps=((2 * B, 5), (3 * B, 1))))) == 3
        late = prefix_path(request(position_jumps=((len(IDS), 5),)))  # of the first token to come
        assert late == plain

    def test_pictures_are_told_apart_by_their_words(self):
        def seeing(word: int) -> Request:
            words = np.full(8, word, np.int32)
            pixels = np.zeros((1, 3, 2, 2), np.float32)
            item = MediaInput(B + 4, words, np.arange(8, dtype=np.int32), pixels, b"d" * 16)
            return request(media=(item,))

        assert num_shared(prefix_path(seeing(600)), prefix_path(seeing(601))) == 1
        assert num_shared(prefix_path(seeing(600)), prefix_path(seeing(600))) == 4
        asked = request((*IDS, *IDS), media=seeing(600).media)
        assert answered_path(seeing(600), prefix_path(seeing(600)), [*IDS, 0]) == prefix_path(asked)

    def test_an_answer_goes_on_from_its_prompt_but_for_its_last_token(self):
        for size in (B + 3, 2 * B):
            prompt, answer = request(IDS[:size]), list(IDS[size : 3 * B + 1])
            assert answered_path(prompt, prefix_path(prompt), answer) == prefix_path(request(IDS[: 3 * B]))
            assert len(answered_path(prompt, prefix_path(prompt), answer[:-1]).stem) == 2
        jumped = request(IDS[: B + 3], position_jumps=((4, 9), (B + 3, 2)))
        whole = request(IDS[: 3 * B], position_jumps=jumped.position_jumps)
        assert answered_path(jumped, prefix_path(jumped), IDS[B + 3 : 3 * B + 1]) == prefix_path(whole)

    def test_branches_are_found_where_they_were_computed_alone(self):
        prefix, first, second = IDS[: B + 5], IDS[B + 5 : 3 * B + 7], IDS[3 * B + 7 : 4 * B]
        at = (len(prefix), len(prefix + first), len(prefix + first + second))
        joined = prefix_path(request((*prefix, *first, *second, 9), joined=at))
        assert joined.stem == prefix_path(request(prefix)).stem
        assert [joined.stem + branch for branch in joined.branches] == [
            prefix_path(request(prefix + branch)).stem for branch in (first, second)
        ]

    def test_a_jump_in_a_branch_ends_with_it(self):
        at = (B, 3 * B, 5 * B)
        branches = (*IDS[B : 3 * B], *IDS[B : 3 * B])
        joined = prefix_path(request((*IDS[:B], *branches, 9), joined=at, position_jumps=((2 * B, 4),)))
        jumped = prefix_path(request(IDS[: 3 * B], position_jumps=((2 * B, 4),)))
        assert [joined.stem + branch for branch in joined.branches] == [
            jumped.stem,
            prefix_path(request(IDS[: 3 * B])).stem,
        ]

    def test_what_follows_branches_depends_on_all_of_them(self):
        at, answer = (B, 2 * B, 3 * B), tuple(range(2000, 2000 + B))
        path = prefix_path(request(IDS[: 4 * B], joined=at))
        longer = prefix_path(request((*IDS[: 4 * B], *answer, 9), joined=at))
        assert len(path.behind) == 1 and len(longer.behind) == 2 and longer.behind[:1] == path.behind
        assert answered_path(request(IDS[: 4 * B], joined=at), path, (*answer, 9)) == longer
        others = (
            request((*IDS[:B], *IDS[2 * B : 3 * B], *IDS[B : 2 * B], *IDS[3 * B : 4 * B]), joined=at),
            request(IDS[: 4 * B], joined=(B, 2 * B + 1, 3 * B)),
            request(IDS[: 4 * B], joined=at, position_jumps=((B + 1, 4),)),
            request(IDS[: 4 * B], joined=at, namespace="other"),
        )
        assert all(prefix_path(other).behind != path.behind for other in others)
        late = prefix_path(request((*IDS[: 4 * B], *answer, 9), joined=at, position_jumps=((4 * B, 4),)))
        assert late.behind[0] == longer.behind[0] and late.behind[1] != longer.behind[1]


class TestIndex:
    def test_what_was_used_last_is_kept(self):
        index = PrefixIndex(5)
        a, b, c = (prefix_path(request(tuple(range(n, n + 2 * B)))) for n in (0, 1000, 2000))
        for path in (a, b, a, c):
            index.use(path)
        assert [index.match(path) for path in (a, b, c)] == [2, 1, 2]

    def test_a_prompt_that_is_larger_than_the_cache_keeps_its_beginning(self):
        index = PrefixIndex(3)
        index.use(prefix_path(request()))
        assert index.match(prefix_path(request())) == 3

    def test_forgetting_what_was_used_before(self):
        index = PrefixIndex(100)
        a, b = prefix_path(request()), prefix_path(request(tuple(range(1000, 1000 + 4 * B))))
        at = [index.use(path) for path in (a, b)]
        index.forget_until(at[0])
        assert [index.match(path) for path in (a, b)] == [0, 4]
        index.clear()
        assert len(index) == 0

    def test_undone_is_what_nobody_else_has_used(self):
        index = PrefixIndex(100)
        short, long = prefix_path(request(IDS[:B])), prefix_path(request())
        index.use(short)
        at = index.use(long)
        index.undo(long, at, num_known=1)
        assert index.match(long) == 1
        at = index.use(long)
        index.use(prefix_path(request(IDS[: 2 * B])))
        index.undo(long, at, num_known=1)
        assert index.match(long) == 2

    def test_a_match_may_have_any_number_of_blocks(self):
        index = PrefixIndex(1000)
        path = PrefixPath(tuple(number.to_bytes(2) for number in range(300)))
        index.use(path)
        assert index.match(path) == 300

    def test_branches_count_behind_a_whole_stem_only(self):
        index = PrefixIndex(100)
        at = (B, 2 * B, 3 * B)
        joined = prefix_path(request(IDS, joined=at))
        index.use(prefix_path(request((*IDS[:B], *IDS[2 * B : 3 * B]))))
        assert index.match(joined) == 2
        index.use(joined)
        assert index.match(joined) == 4

    @given(st.data())
    def test_what_is_matched_was_sent_and_the_bound_holds(self, data: st.DataObject):
        """Against a set of every prefix that was ever used."""
        index, sent = PrefixIndex(data.draw(st.integers(0, 12))), set()
        tokens = st.integers(0, 1)  # of blocks of equal tokens, so that prefixes are shared
        for _ in range(data.draw(st.integers(1, 20))):
            blocks = tuple(data.draw(st.lists(tokens, min_size=1, max_size=5)))
            path = prefix_path(request(tuple(token for token in blocks for _ in range(B))))
            num_known = index.match(path)
            assert num_known == 0 or blocks[:num_known] in sent
            assert len(index.times(path)) == num_known
            at = index.use(path)
            check_index(index)
            sent |= {blocks[:n] for n in range(1, len(blocks) + 1)}
            match data.draw(st.sampled_from(["go on", "undo", "forget"])):
                case "undo":
                    index.undo(path, at, num_known)
                    assert index.match(path) <= len(blocks)
                case "forget":
                    index.forget_until(data.draw(st.integers(0, at)))
            check_index(index)


class OneEngine:
    """What `PrefixIndex` says of itself, with lists and loops and without a table that engines share."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks, self.now, self.times, self.held, self.stored = max_blocks, 0, {}, [], set()

    def knows(self, block: bytes) -> bool:
        return block in self.times or block in self.held or block in self.stored

    def match(self, path: PrefixPath) -> int:
        def first_unknown(chain):
            return next((at for at, block in enumerate(chain) if not self.knows(block)), len(chain))

        matched = first_unknown(path.stem)
        return matched if matched < len(path.stem) else matched + sum(map(first_unknown, path.others))

    def use(self, path: PrefixPath) -> None:
        self.now += 1
        for chain in (*path.others, path.stem):
            for block in reversed(chain):
                self.times.pop(block, None)
                self.times[block] = self.now  # a dictionary keeps the order
        for block in list(self.times)[: max(len(self.times) - self.max_blocks, 0)]:
            del self.times[block]

    def undo(self, path: PrefixPath, time: int, num_known: int) -> None:
        if num_known < len(path.stem):
            for block in [*path.stem[num_known:], *(block for chain in path.others for block in chain)]:
                if self.times.get(block) == time:
                    del self.times[block]

    def forget_until(self, time: int) -> None:
        self.times = {block: at for block, at in self.times.items() if at > time}


@settings(max_examples=25)
@given(st.data())
def test_one_table_answers_for_all_engines_as_each_would_by_itself(data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=10))
    holders = BlockHolders(len(sizes))
    indexes = [PrefixIndex(size, holders, engine) for engine, size in enumerate(sizes)]
    models = [OneEngine(size) for size in sizes]
    chains = st.lists(st.integers(0, 1), max_size=4).map(
        lambda ids: tuple(bytes(ids[: n + 1]) for n in range(len(ids)))
    )
    held: list[tuple[int, PrefixPath]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        stem, *branches = data.draw(st.lists(chains, min_size=1, max_size=3))
        path = PrefixPath(stem, tuple(tuple(b"/" + block for block in chain) for chain in branches))
        assert holders.match(path).tolist() == [model.match(path) for model in models]
        engine = data.draw(st.integers(0, len(sizes) - 1))
        index, model = indexes[engine], models[engine]
        num_known = len(index.times(path))
        match data.draw(st.sampled_from(["use", "undo", "hold", "release", "store", "remove", "forget", "clear"])):
            case "use":
                index.use(path)
                model.use(path)
            case "undo":
                model.use(path)
                index.undo(path, index.use(path), num_known)
                model.undo(path, model.now, num_known)
            case "hold":
                index.hold(path)
                model.held += [block for chain in (path.stem, *path.others) for block in chain]
                held.append((engine, path))
            case "release" if held:
                engine, path = held.pop()
                indexes[engine].release(path)
                for block in (block for chain in (path.stem, *path.others) for block in chain):
                    models[engine].held.remove(block)
            case "store":
                index.store(path.stem)
                model.stored |= set(path.stem)
            case "remove":
                index.remove(reversed(path.stem))
                model.stored -= set(path.stem)
                model.times = {block: at for block, at in model.times.items() if block not in path.stem}
            case "forget":
                time = data.draw(st.integers(0, model.now))
                index.forget_until(time)
                model.forget_until(time)
            case "clear":
                index.clear()
                model.times, model.stored = {}, set()
            case _:
                pass
        check_index(index)


def test_sampling_is_no_part_of_the_name():
    assert prefix_path(request()) == prefix_path(request(sampling=SamplingParams(temperature=0), priority=3))
