"""The least that any prefix cache must compute for the prompts and answers of a run, in the best order.

Every token behind a different beginning must be computed once. Generating computes the tokens of answers, all but the
last, so a later prompt with them need not. And each call computes at least the last token of its own prompt.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence

from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart

type Place = int
"""A token behind a beginning: a hash of the place before it and the token."""
START: Place = 0


class Sequences:
    """The prompts and answers of a run."""

    def __init__(self) -> None:
        self._needed: set[Place] = set()
        self._generated: set[Place] = set()
        self._ends: collections.Counter[Place] = collections.Counter()
        self._has_media = False

    def generated(
        self, prompt: Sequence[Part], part_ids: Iterable[Sequence[int]], answer: Sequence[int], *, is_cut: bool
    ) -> None:
        """Notes a call that continued a prompt.

        Args:
            prompt: The prompt.
            part_ids: The tokens of its texts, as in `Outcome`.
            answer: The tokens of the answer.
            is_cut: Whether the answer ended because it was long enough. Then its last token was not computed.
        """
        place = self._walk(prompt, iter(part_ids), START)
        self._ends[place] += 1
        for token in answer[:-1] if is_cut else answer:
            place = hash((place, token))
            self._generated.add(place)

    def scored(
        self,
        prompt: Sequence[Part],
        part_ids: Iterable[Sequence[int]],
        common_ids: Sequence[int],
        choices: Iterable[Sequence[int]],
    ) -> None:
        """Notes a call that scored choices. The last token of a choice need not be computed."""
        end = len(prompt)
        while end and isinstance(prompt[end - 1], TextPart):
            end -= 1
        place = self._walk(prompt[:end], iter(part_ids), START)
        place = self._needs(place, common_ids)
        self._ends[place] += 1
        for choice in choices:
            self._needs(place, choice[:-1])

    def least(self) -> int | None:
        """The tokens that a cache without limits computes beside answers. None if there were pictures."""
        if self._has_media:
            return None
        repeated = sum(count - (place in self._needed - self._generated) for place, count in self._ends.items())
        return len(self._needed - self._generated) + repeated

    def _walk(self, parts: Sequence[Part], part_ids: Iterator[Sequence[int]], place: Place) -> Place:
        """The place behind parts that follow a place."""
        for part in parts:
            match part:
                case TextPart():
                    place = self._needs(place, next(part_ids))
                case TokenPart(ids):
                    place = self._needs(place, ids)
                case OffsetPart(offset):
                    place = hash((place, "offset", offset)) if offset else place
                case MediaPart():
                    self._has_media = True
                case JoinedPart(branches):
                    place = hash(tuple(self._walk(branch, part_ids, place) for branch in branches))
        return place

    def _needs(self, place: Place, ids: Iterable[int]) -> Place:
        for token in ids:
            place = hash((place, token))
            self._needed.add(place)
        return place
