"""Scores of prompts are arrays from the device to the client: no objects live, and nothing of them changes."""

import dataclasses
import gc
import itertools
import math

import msgspec
import numpy as np
import pytest

from jsg import token_scores
from jsg.engine.child.protocol import FromEngine
from jsg.token_scores import PACK, GrowingScores, ScorePart, TokenLogprob, TokenScores
from jsg.types import RequestOutput
from tests.scored import scores_of


def scored(count: int, num_top: int, chosen: tuple[int, ...], *, is_whole: bool) -> list[TokenLogprob]:
    """Scores of a prompt from its first token on, if it is whole."""
    numbers = iter(np.random.default_rng(count).standard_normal(count * 9).astype(np.float32).tolist())
    return [
        TokenLogprob(index, None)
        if is_whole and not index
        else TokenLogprob(
            index,
            next(numbers) if index % 5 else -math.inf,
            tuple((2**31 - 1 - other, next(numbers)) for other in range(num_top)),
            tuple((other, next(numbers)) for other in chosen),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("num_top", "chosen"), [(0, ()), (5, ()), (0, (9, 3)), (2, (7,))])
def test_they_are_those_that_were_put_in(num_top: int, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_scores, "AT_ONCE", 4)
    for count, is_whole in itertools.product((1, 2, 30), (True, False)):
        expected = scored(count, num_top, chosen, is_whole=is_whole)
        parts = [part for some in itertools.batched(expected, 7) for part in scores_of(some).parts]
        sent = msgspec.msgpack.encode(FromEngine(outputs=[RequestOutput(rid="a", prompt_logprobs=TokenScores(parts))]))
        (output,) = msgspec.msgpack.decode(sent, type=FromEngine).outputs
        found = output.prompt_logprobs
        assert found is not None
        assert found == expected and found == tuple(expected) and tuple(found) == tuple(expected)
        assert found != expected[1:] and found != [*expected[:-1], TokenLogprob(0, 1.0)] and found != 3
        for start, stop, step in itertools.product((None, 0, 3, 7, -1), (None, 0, 4, 7, 21, 99), (1, 2, -2)):
            assert found[start:stop:step] == expected[start:stop:step]
        assert [found[index] for index in (0, -1)] == [expected[0], expected[-1]]
        with pytest.raises(IndexError):
            _ = found[count]
    assert not TokenScores() and list(TokenScores()) == []


@pytest.mark.parametrize(("num_top", "chosen"), [(0, ()), (5, ()), (2, (7, 5))])
def test_those_of_a_growing_answer_are_those_that_were_put_in(num_top: int, chosen: tuple[int, ...]):
    """In 64 bits: nothing is rounded."""
    expected, grown = list[TokenLogprob](), GrowingScores()
    for number, score in enumerate(scored(3 * PACK + 7, num_top, chosen, is_whole=True)):
        third = None if score.logprob is None else score.logprob / 3
        expected.append(dataclasses.replace(score, logprob=third, top=score.top[: number % 3]))
    for some in itertools.batched(expected, 50):
        grown += some
    assert grown == expected and tuple(grown) == tuple(expected) and grown != expected[1:] and grown != 3
    for start, stop, step in itertools.product((None, 0, 3, PACK, -1), (None, 0, 4, PACK + 1, -9, 999), (1, 2, -2)):
        assert list(grown[start:stop:step]) == expected[start:stop:step]
    assert [grown[index] for index in (0, PACK, -1)] == [expected[0], expected[PACK], expected[-1]]
    with pytest.raises(IndexError):
        _ = grown[len(expected)]
    gc.collect()
    assert sum(isinstance(each, TokenLogprob) for each in gc.get_referents(*gc.get_referents(grown))) < PACK
    assert not GrowingScores() and list(GrowingScores()) == []


def test_however_many_there_are_few_objects_live():
    size, k = 20_000, 5
    rows = np.zeros((size, k), np.int32)
    ids = np.arange(size, dtype=np.int32)
    part = ScorePart.of(ids, ids.view(np.float32), rows, rows.view(np.float32), (), rows.view(np.float32)[:, :0])
    gc.collect()
    before = len(gc.get_objects())
    scores = TokenScores([ScorePart.first(3), part, part])
    assert len(scores) == 2 * size + 1
    seen = [len(gc.get_objects()) - before for token in scores if token.token_id == size // 2]
    assert max(seen) < 20 * token_scores.AT_ONCE, "an iteration makes a few at a time"
    assert dataclasses.is_dataclass(scores), "msgspec encodes it"
