"""Proposes drafts: what a grammar forces, copies, and what the model's own layer predicts.

    forced ─▶ tree ─▶ prediction of the client ─▶ own text ─▶ past outputs ─▶ the model's layer for drafts (MTP)
           ─▶ cut at the first token that the grammar forbids ─▶ gate

A step verifies drafts: each token is sampled with its own noise under its own mask, and counts up to the first one that
differs from its draft. So a draft changes the speed of an answer and never the answer. Whether the proposals were right
is counted even where none was drafted. So a request for which copying does not work costs no wrong draft to find out.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from jsg.engine.device.packing import needs_tables
from jsg.engine.device.pool_sizes import MOST_REPEATS
from jsg.engine.device.runner import ModelRunner
from jsg.engine.grammars.constraints import Constraints
from jsg.sched.batch import Batch, BatchEntry, Proposal
from jsg.sched.drafts.estimates import FIRST_GUESSES, Estimates, Kind, kind_of, kinds_from
from jsg.sched.drafts.gate import LEAST_CHANCE, Gate
from jsg.sched.drafts.sources import DraftSource, Guess, Memories, OwnText, PastOutputs, Prediction, Tree
from jsg.sched.request import RunningRequest
from jsg.step_reports import DraftReport, Source

MOST_AHEAD = 64
"""Tokens that are looked ahead."""
MOST_SCANNED, SEARCH = 2**18, 2**13
"""Tokens of texts in which a step looks for repeats, which takes 0.15 ms, and as how many a search counts beside them:
a step has 32 searches at most, of 10 to 90 µs each."""
LIKELY = 0.5
"""If the first token of a guess has this chance, the sources behind it are not asked."""
UNLIKELY, PATIENCE, A_TOKEN = 0.3, 4, 8
"""After a search that found nothing with at least this chance, texts are searched again after so many tokens, or after
one for so many requests if that is more. So a step has few searches, however many requests there are."""
SHARE = 8
"""Each request is looked ahead for so many times its share of the rows of drafts, and for so many tokens at least."""
FORCED = kind_of(Source.FORCED, 0)
REPEATED = kinds_from(Source.MTP, 0, MOST_REPEATS)
TRIAL = 64
"""After so many tokens without drafts of the model itself, the first guess decides once more whether it makes some."""


@dataclasses.dataclass(slots=True, eq=False)
class Outlook:
    """What a request is expected to say next.

    Attributes:
        running: The request.
        estimates: How often this came true.
        can_draft: Whether it may have drafts beside forced ones.
        num_known: The tokens that it had when it was looked at.
        tokens: The tokens that should follow these.
        kinds: The kind of each.
        next_search: The number of tokens with which texts are searched again.
        next_trial: That with which the model drafts again even if what it drafted before was wrong.
        drafted: The kinds of the tokens that were proposed last.
    """

    running: RunningRequest
    estimates: Estimates
    can_draft: bool
    num_known: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    kinds: list[Kind] = dataclasses.field(default_factory=list)
    next_search: int = 0
    next_trial: int = 0
    drafted: list[Kind] = dataclasses.field(default_factory=list)

    def chances(self, kinds: Iterable[Kind]) -> list[float]:
        """For tokens of these kinds one after another, the chance of each that it and all before it come true.

        Those that no step would have are left out.
        """
        found, chance, last, own = list[float](), 1.0, None, 1.0
        for kind in kinds:
            if kind is not last:
                last, own = kind, self.estimates.chance(kind)
            chance *= own
            if chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found


@final
class Drafter:
    """Proposes drafts, and learns from the tokens of steps how good its proposals are.

    Args:
        gate: Decides which drafts are worth it.
        grammars: Say what is forced and what is allowed.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens after which nothing is proposed.
        page_size: Tokens in a page of the tree.
        is_on: Whether requests have drafts beside forced ones unless they say otherwise.
        own_layer: Drafts by the model itself; None if it has no layer for them.
    """

    def __init__(
        self,
        gate: Gate,
        grammars: Constraints,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        page_size: int,
        is_on: bool,
        own_layer: ModelRunner | None = None,
    ):
        self._gate = gate
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_on = is_on
        self._own_layer = own_layer
        self._outlooks: dict[str, Outlook] = {}
        self._memories = Memories()
        self._sources: Sequence[DraftSource] = (Tree(page_size), Prediction(), OwnText(), PastOutputs(self._memories))
        self._scans_left = MOST_SCANNED
        self._patience = PATIENCE
        self._counts = DraftReport()
        self._reports: dict[str, DraftReport] = {}

    def must_know_tokens(self, running: Sequence[RunningRequest], max_rows: int) -> bool:
        """Whether the next step may have drafts that are worth it, so that it must wait for the tokens of this one."""
        if self._grammars.must_know_tokens(running):
            return True
        if not self._gate.may_gain(len(running), max_rows):
            return False
        decoding = [each for each in running if _decodes(each)]
        most = _share(len(running), max_rows)
        chances = [self._chances_behind(each, most) for each in decoding]
        if any(chances) and self._gate.choose(len(decoding), chances, max_rows) is not None:
            return True
        return self._own_layer is not None and self._num_repeats(decoding, chances, max_rows)[0] > 0

    def _num_repeats(
        self, decoding: Sequence[RunningRequest], chances: Sequence[Sequence[float]], max_rows: int
    ) -> tuple[int, list[int]]:
        """How many tokens the model should draft, and for which requests: those whose other proposals are worse."""
        own = [self._own_chances(each) for each in decoding]
        asked = [index for index, each in enumerate(own) if sum(each) > sum(chances[index])]
        if not asked or self._own_layer is None or not self._own_layer.can_draft(len(asked)):
            return 0, []
        others = [each for index, each in enumerate(chances) if each and index not in asked]
        return self._gate.num_repeats(len(decoding), others, [own[index] for index in asked], max_rows), asked

    def _own_chances(self, running: RunningRequest) -> list[float]:
        """The chances of tokens that the model would draft behind the one that is in flight, if there is one."""
        outlook, place = self._look(running), running.place
        assert place is not None, "only a running request decodes"
        kinds = REPEATED[: max(running.num_to_come - 1 - place.num_in_flight, 0)]
        if not outlook.can_draft or running.layout is not None:
            return []
        if running.num_known < outlook.next_trial:
            return outlook.chances(kinds)
        return [*itertools.accumulate((FIRST_GUESSES[source][index] for source, index in kinds), operator.mul)]

    def _chances_behind(self, running: RunningRequest, most: int) -> list[float]:
        """The chances of the tokens behind the one that is in flight, of at most so many."""
        outlook = self._look(running)
        assert running.place is not None, "only a running request decodes"
        if not outlook.kinds or not outlook.can_draft:
            return []
        in_flight = running.place.num_in_flight
        return outlook.chances(outlook.kinds[: min(running.num_to_come, in_flight + most)])[in_flight:]

    def proposals(self, running: Sequence[RunningRequest], max_rows: int) -> dict[str, Proposal]:
        """Tokens that may follow, of each request that decodes and has nothing in flight, by rid."""
        self._scans_left, self._patience = MOST_SCANNED, max(PATIENCE, len(running) // A_TOKEN)
        found: dict[str, Proposal] = {}
        may_gain = self._gate.may_gain(len(running), max_rows)
        if not may_gain and not self._grammars.has_requests:
            return found
        most = _share(len(running), max_rows)
        decoding = [each for each in running if _decodes(each) and each.place and not each.place.num_in_flight]
        for each in decoding:
            proposal = self._grammars.forced(each, max_rows)
            if may_gain and (proposal is None or not proposal.is_forced):
                proposal = self._longer(each, proposal, most)
            if proposal is not None:
                found[each.request.rid] = proposal
        if may_gain and self._own_layer is not None:
            self._add_own(decoding, found, max_rows)
        return found

    def _add_own(self, decoding: Sequence[RunningRequest], found: dict[str, Proposal], max_rows: int) -> None:
        """Lets the model draft for the requests that have nothing better, if that is worth its time."""
        assert self._own_layer is not None, "it is asked only if there is one"
        nothing = Proposal((), False, 0)
        proposals = [(each, found.get(each.request.rid, nothing)) for each in decoding]
        decoding = [each for each, proposal in proposals if not proposal.num_sure]
        chances = [proposal.chances for _, proposal in proposals if not proposal.num_sure]
        count, asked = self._num_repeats(decoding, chances, max_rows)
        if not count:
            return
        requests = [decoding[index] for index in asked]
        ends = [each.num_known - 1 for each in requests]
        rows = [each.place.row for each in requests if each.place is not None]
        last = [int(each.tokens[end]) for each, end in zip(requests, ends, strict=True)]
        for each, tokens in zip(requests, self._own_layer.draft(rows, last, ends, count).tolist(), strict=True):
            outlook = self._look(each)
            outlook.tokens, outlook.kinds = self._usable(each, Guess(Source.MTP, 0, tokens))
            outlook.next_trial = each.num_known + TRIAL
            if (proposal := self._longer(each, None, max_rows)) is not None:
                found[each.request.rid] = proposal

    def _longer(self, running: RunningRequest, sure: Proposal | None, most: int) -> Proposal | None:
        """A proposal that goes on behind what is forced."""
        outlook, forced = self._look(running), [] if sure is None else [*sure.tokens]
        outlook.drafted = []
        if not outlook.tokens and not forced:
            return None
        ahead, kinds = outlook.tokens[len(forced) :], outlook.kinds[len(forced) :]
        if outlook.tokens[: len(forced)] != forced:
            ahead, kinds = self._search(running, outlook, forced)
        if not outlook.can_draft:
            ahead = []
        ahead = ahead[: max(min(most, running.num_to_come - 1) - len(forced), 0)]
        ahead = ahead[: len(outlook.chances(kinds[: len(ahead)]))]
        if ahead and running.request.sampling.grammar is not None:
            ahead = ahead[: max(self._grammars.num_allowed(running, forced + ahead) - len(forced), 0)]
        outlook.drafted = [FORCED] * len(forced) + kinds[: len(ahead)]
        chances = outlook.chances(outlook.drafted)
        tokens = (*forced, *ahead)[: max(len(chances), len(forced))]
        return Proposal(tokens, False, len(forced), tuple(chances)) if tokens else None

    def _look(self, running: RunningRequest) -> Outlook:
        """What a request is expected to say behind its known tokens. Counts what was expected before and has come."""
        outlook = self._outlooks.get(running.request.rid)
        if outlook is None:
            outlook = self._outlooks[running.request.rid] = self._new_outlook(running)
        elif outlook.num_known == running.num_known:
            return outlook
        elif outlook.tokens:
            self._learn(outlook, running.tokens[outlook.num_known : running.num_known].tolist())
        outlook.num_known = running.num_known
        if len(outlook.tokens) >= MOST_AHEAD // 2 or not outlook.can_draft or self._scans_left <= 0:
            return outlook
        if running.num_known >= outlook.next_search:
            outlook.tokens, outlook.kinds = self._search(running, outlook)
            if not outlook.tokens or outlook.estimates.chance(outlook.kinds[0]) < UNLIKELY:
                outlook.next_search = running.num_known + self._patience
        return outlook

    def _new_outlook(self, running: RunningRequest) -> Outlook:
        sampling = running.request.sampling
        is_on = self._is_on if sampling.speculative is None else sampling.speculative != "off"
        # Appended tokens are part of the answer, so they must follow from it alone. Penalties count no draft.
        can_draft = is_on and self._grammars.jump_of(running.request) != "retokenize" and not needs_tables(sampling)
        estimates = Estimates(self._memories.of(running.namespace).estimates)
        return Outlook(running, estimates, can_draft, next_trial=running.num_known + TRIAL)

    @staticmethod
    def _learn(outlook: Outlook, came: Sequence[int]) -> None:
        """Counts which of the expected tokens have come, up to the first other one."""
        num_right = 0
        for expected, kind, token in zip(outlook.tokens, outlook.kinds, came, strict=False):
            outlook.estimates.count(kind, is_right=expected == token)
            if expected != token:
                break
            num_right += 1
        is_right = num_right == len(came)
        outlook.tokens, outlook.kinds = outlook.tokens[num_right:] * is_right, outlook.kinds[num_right:] * is_right

    def _search(
        self, running: RunningRequest, outlook: Outlook, forced: Sequence[int] = ()
    ) -> tuple[list[int], list[Kind]]:
        """The tokens that should follow the known and the forced ones, and their kinds: of the best guess."""
        if self._scans_left <= 0:
            return [], []
        text, best, best_chance = running.tokens[: running.num_known], None, 0.0
        if forced:
            text = np.concatenate([text, np.array(forced, np.int32)])
        self._scans_left -= SEARCH
        for source in self._sources:
            if best_chance >= LIKELY:
                break
            guess = source.propose(running, text, MOST_AHEAD)
            self._scans_left -= guess.num_read
            chance = outlook.estimates.chance(kind_of(guess.source, guess.num_equal)) if guess.tokens else 0.0
            if chance > best_chance:
                best, best_chance = guess, chance
        return self._usable(running, best) if best else ([], [])

    def _usable(self, running: RunningRequest, guess: Guess) -> tuple[list[int], list[Kind]]:
        """Its tokens before the first that ends the request, which saves no step, or is none of the vocabulary."""
        sampling, tokens = running.request.sampling, guess.tokens
        eos = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        ends = eos.union(sampling.stop_token_ids)
        unusable = (index for index, token in enumerate(tokens) if token in ends or not 0 <= token < self._vocab_size)
        tokens = tokens[: next(unusable, len(tokens))]  # an image has words that are no tokens
        return tokens, kinds_from(guess.source, guess.num_equal, len(tokens))

    # After a step.

    def count(self, batch: Batch) -> None:
        """Counts the drafts of a step that the scheduler has committed."""
        for entry in batch.entries if batch.has_drafts else ():
            num_taken = entry.running.num_output - entry.output_index - 1
            if entry.num_drafts and num_taken >= 0:  # it still ran, and has new tokens
                self._count(entry, num_taken)

    def _count(self, entry: BatchEntry, num_taken: int) -> None:
        request, counts = entry.running.request, [self._counts]
        outlook = self._outlooks.get(request.rid)
        kinds = [] if outlook is None else outlook.drafted
        if request.sampling.return_drafts or request.prediction is not None:
            counts.append(self._reports.setdefault(request.rid, DraftReport()))
        for index in range(entry.num_drafts):
            source = Source.FORCED if index < entry.num_sure else kinds[index][0]
            for each in counts:
                each.proposed[source.label] += 1
                each.taken[source.label] += index < num_taken

    @property
    def has_reports(self) -> bool:
        """Whether a live request that had drafts asked for a report."""
        return bool(self._reports)

    def report(self, rid: str) -> DraftReport | None:
        """The drafts of a request so far, if it had some and asked for them."""
        report = self._reports.get(rid)
        return report and DraftReport(proposed={**report.proposed}, taken={**report.taken})

    def end(self, rid: str) -> None:
        """Keeps the output of a request that has ended, and forgets the rest."""
        self._reports.pop(rid, None)
        if (outlook := self._outlooks.pop(rid, None)) is not None:
            running = outlook.running
            self._memories.of(running.namespace).add(running.tokens[running.num_prompt : running.num_known])

    def flush(self) -> None:
        """Forgets past outputs, and how good proposals were."""
        self._memories.clear()

    def stats(self) -> dict[str, int]:
        """Totals: see `protocol.CORE_STATS`."""
        proposed, taken = self._counts.proposed, self._counts.taken
        return {
            "num_drafts": sum(proposed.values()),
            "num_drafts_taken": sum(taken.values()),
            **{f"num_drafts_{source.label}": proposed.get(source.label, 0) for source in Source},
            **{f"num_drafts_taken_{source.label}": taken.get(source.label, 0) for source in Source},
            "num_gate_open": self._gate.num_open,
            "num_gate_shut": self._gate.num_shut,
        }


def _decodes(running: RunningRequest) -> bool:
    """Whether the next step samples a token of a request. None does of a branch, which has the rid of its whole."""
    return running.place is not None and not running.place.is_prefilling and running.num_to_come > 0


def _share(num_rows: int, max_rows: int) -> int:
    """The most tokens that are proposed for one of so many requests."""
    return min(MOST_AHEAD, max(SHARE, SHARE * (max_rows - num_rows) // max(num_rows, 1)))
