"""Grammars in the engine: which requests have one, what it allows next, and what it forces.

A request's masker has accepted exactly the committed output tokens. So a retract or a dropped step changes nothing
here. To look up the masks of drafts, the masker accepts them and is then rolled back.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from jsg.constrained.grammar import GrammarMasker
from jsg.constrained.limits import STEP_STEPS
from jsg.engine.device.mask_pool import MaskPool, num_words
from jsg.engine.device.packing import needs_tables
from jsg.engine.grammars.jump import MOST_LOOKED_BACK, Tokens
from jsg.engine.grammars.lexicon import LexiconLoader
from jsg.engine.grammars.store import GrammarStore, StoredGrammar
from jsg.engine.grammars.thought_watch import ThoughtWatch
from jsg.errors import GrammarError, JsgError
from jsg.sched.batch import Batch, BatchEntry, Proposal, StepResult
from jsg.sched.request import RunningRequest
from jsg.step_reports import ConstraintReport
from jsg.types import JumpForward, Request

logger = logging.getLogger(__name__)

PATIENCE = 16
"""After so many tokens without a forced text after them, a request's steps are planned before its last token is known.
If a text is forced then, one more token is sampled before the first draft."""
BIND_STEPS = 300_000
"""Work to bind a grammar to the vocabulary, in the steps of `Limits`, in addition to one step a byte of its tables."""
BUG = "the engine failed this request; its log has the cause"


@dataclasses.dataclass(slots=True, eq=False)
class Constraint:
    """One request's grammar.

    Attributes:
        store: The store of the grammar.
        grammar: The grammar, which the store holds while the request is live.
        jump: What to do where text is forced.
        num_accepted: Tokens that the masker has accepted.
        num_unforced: Tokens since the last one after which a text was forced.
        num_steps: Work for its text that steps of the engine were charged with. It is negative until they were charged
            with binding the grammar.
        watch: Watches how long the request thinks; None where nothing limits that.
        failure: Why the request cannot go on; None while it can.
    """

    store: GrammarStore
    grammar: StoredGrammar
    jump: JumpForward
    num_accepted: int = 0
    num_unforced: int = 0
    num_steps: int = 0
    watch: ThoughtWatch | None = None
    failure: JsgError | None = None
    _masker: GrammarMasker | None = dataclasses.field(default=None, init=False)

    @property
    def must_know_tokens(self) -> bool:
        """Whether its steps wait for the tokens of the step before.

        With "retokenize" they always do: appended tokens are part of the answer, so they must not depend on the steps
        of other requests.
        """
        return self.jump == "retokenize" or (self.jump == "draft" and self.num_unforced < PATIENCE)

    @property
    def masker(self) -> GrammarMasker:
        """Its masker, which is made for its first step, so that waiting requests take no memory."""
        if self._masker is None:
            if self.grammar.machine is None:
                self.num_steps = -BIND_STEPS - len(self.grammar.tables)
            self._masker = self.store.new_masker(self.grammar)
        return self._masker


@dataclasses.dataclass(frozen=True, slots=True)
class MaskRows:
    """The masks of a step.

    Attributes:
        rows: int32, the row of the mask pool for each row of logits.
        put_off: Entries whose masks were too much work for this step. Tokens that are sampled for them mean nothing.
    """

    rows: np.ndarray
    put_off: list[BatchEntry]


@final
class Constraints:
    """Every grammar that the engine knows, and the maskers of the live requests.

    The work of all grammars from one step to the next is limited, in the steps of `Limits`. When it is spent, no more
    drafts are proposed, and a request whose mask is not known yet is put off. The oldest request comes first and,
    without drafts, always gets its mask, so that every request goes on in its turn. Sampled tokens are always read.

    Invariant: a masker has accepted as many tokens as its request has committed output tokens.
    """

    def __init__(
        self,
        loader: LexiconLoader,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        jump: JumpForward,
    ):
        """Knows no grammar yet. `jump` is the mode of requests that name none; the loader loads the model's tokens."""
        self._loader = loader
        self._grammars = GrammarStore(loader)
        self._num_words = num_words(vocab_size)
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._jump: JumpForward = jump
        self._live: dict[str, Constraint] = {}
        self._tokens: Tokens | None = None
        self._num_failures = 0
        self._most_steps = self._steps_left = STEP_STEPS

    # Grammars and requests in and out.

    @property
    def are_loaded(self) -> bool:
        """Whether tokenizer and kernels are loaded. A request with a grammar that comes before holds up all steps."""
        return self._loader.is_loaded

    def wait(self) -> None:
        """Returns when tokenizer and kernels are loaded. For other threads than that of the steps."""
        self._loader.wait()

    def close(self, *, waits: bool = True) -> None:
        """Ends background work, and waits for its end if `waits` is set."""
        self._loader.close(waits=waits)

    def add_grammar(self, key: str, tables: bytes) -> None:
        """Makes a grammar known under this key."""
        self._grammars.add(key, tables)

    def forget_grammars(self, keys: Iterable[str]) -> None:
        """Forgets grammars. Requests that have one keep it, and unknown keys are ignored."""
        self._grammars.forget(keys)

    def prepare(self, request: Request) -> Constraint | None:
        """The constraint of a request, for `put`; None where it has no grammar.

        Raises:
            RequestError: Its grammar is not known, or the model has no tokenizer.
            QueueFullError: The grammars of live requests take too much memory.
        """
        key = request.sampling.grammar_key
        if key is None:
            return None
        jump: JumpForward = request.sampling.jump_forward or self._jump
        grammar = self._grammars.find(key)
        if self._tokens is None:
            self._tokens = Tokens(self._grammars.lexicon)
        if needs_tables(request.sampling):  # the device counts penalties of no draft
            jump = "off"
        limit = request.thought_limit
        return Constraint(self._grammars, grammar, jump, watch=None if limit is None else ThoughtWatch(limit))

    def put(self, rid: str, constraint: Constraint) -> None:
        """Keeps a constraint until its request has ended."""
        self._grammars.hold(constraint.grammar)
        self._live[rid] = constraint

    def forget(self, rid: str) -> None:
        """Forgets the constraint of a request that has ended. Ignores a request without a grammar."""
        constraint = self._live.pop(rid, None)
        if constraint is not None:
            self._grammars.release(constraint.grammar)

    # Around a step.

    @property
    def has_requests(self) -> bool:
        """Whether a live request has a grammar."""
        return bool(self._live)

    def concerns(self, batch: Batch) -> bool:
        """Whether a request of a step has a grammar."""
        # Every step does this, and a list takes a quarter of the time of a generator.
        return bool([1 for entry in batch.entries if entry.running.request.sampling.grammar is not None])

    def must_know_tokens(self, running: Sequence[RunningRequest]) -> bool:
        """Whether text may be forced after the next token of a request, so that the next step must wait for it."""
        if not self._live:
            return False
        constraints = map(self._live.get, [each.request.rid for each in running])  # not those of all that wait
        return any(each is not None and each.must_know_tokens for each in constraints)

    def jump_of(self, request: Request) -> JumpForward | None:
        """What happens where text is forced for a live request; None if it has no grammar."""
        constraint = self._live.get(request.rid)
        return None if constraint is None else constraint.jump

    def forced(self, running: RunningRequest, most: int) -> Proposal | None:
        """At most `most` tokens that are forced behind the known ones of a request with nothing in flight."""
        constraint = self._live.get(running.request.rid)
        if constraint is None or constraint.jump == "off" or constraint.failure is not None or self._steps_left <= 0:
            return None
        try:
            proposal = self._proposal(running, constraint, most)
            self._charge(constraint)
        except Exception as error:
            self._fail(constraint, error)
            return None
        return proposal

    def num_allowed(self, running: RunningRequest, tokens: Sequence[int]) -> int:
        """How many of these tokens a request may say one after another, as far as there is work left for this step.

        Half of the work is kept for masks, without which requests would be put off.
        """
        constraint = self._live[running.request.rid]
        if constraint.failure is not None or 2 * self._steps_left < self._most_steps:
            return 0
        try:
            return self._walk(constraint, tokens)
        except Exception as error:
            self._fail(constraint, error)
            return 0

    def mask_rows(self, batch: Batch, pool: MaskPool) -> MaskRows:
        """The masks for a step. All tokens before it must be committed.

        A request whose grammar raises gets no mask, and fails when the step is committed.
        """
        pool.begin_step()
        first_rows = batch.first_rows
        masks = MaskRows(np.zeros(first_rows[-1] + batch.entries[-1].num_rows, np.int32), [])
        is_first = True
        for entry, row in sorted(zip(batch.entries, first_rows, strict=True), key=lambda pair: pair[0].running.arrival):
            constraint = self._live.get(entry.running.request.rid)
            if constraint is None or not entry.samples or entry.is_stale or constraint.failure is not None:
                continue
            try:
                may_begin = is_first or self._steps_left > 0
                if not may_begin or not self._find_masks(constraint, entry, pool, masks.rows[row:]):
                    masks.put_off.append(entry)
            except Exception as error:
                self._fail(constraint, error)
            is_first = False
        self._steps_left = self._most_steps
        return masks

    def accept(self, batch: Batch, result: StepResult) -> None:
        """Gives a step's tokens to the maskers before the scheduler commits them, and notes ends and reports.

        A request fails alone if its grammar raised or does not allow its token.
        """
        if not self.concerns(batch):
            return
        for index, (entry, row) in enumerate(zip(batch.entries, batch.first_rows, strict=True)):
            request = entry.running.request
            if request.sampling.grammar is None or not entry.samples or entry.is_stale:
                continue
            constraint = self._live.get(request.rid)
            if constraint is None:  # it had no mask either: its answer may break the grammar
                logger.error("a request with a grammar has no masker")
                self._num_failures += 1
                result.failed.append(entry.running)
                continue
            self._grammars.note_use(constraint.grammar)
            if constraint.failure is None:
                try:
                    self._advance(constraint, index, entry, row, result)
                except Exception as error:
                    self._fail(constraint, error)
                self._charge(constraint)
            if constraint.failure is not None:
                result.failed.append(entry.running)
                result.reasons[request.rid] = constraint.failure

    def stats(self, pool: MaskPool) -> dict[str, int]:
        """Gauges and totals: see `CONSTRAINT_STATS`."""
        return {
            "num_grammars": len(self._grammars),
            "grammar_bytes": self._grammars.num_bytes,
            "num_masks": len(pool),
            "num_masks_made": pool.num_made,
            "num_masks_found": pool.num_found,
            "num_grammar_failures": self._num_failures,
        }

    def _proposal(self, running: RunningRequest, constraint: Constraint, most: int) -> Proposal | None:
        forced = constraint.masker.forced_bytes()
        most = min(most, running.num_to_come - 1)
        if not forced or most <= 0:
            return None
        assert self._tokens is not None, "a request with a grammar has loaded the tokenizer"
        first = running.num_known - MOST_LOOKED_BACK
        output = running.tokens[max(first, running.num_prompt) : running.num_known].tolist()
        is_forced = constraint.jump == "retokenize"
        tokens = self._tokens.appended(output, forced) if is_forced else self._tokens.draft(output, forced, most)
        allowed = self._walk(constraint, tokens[:most])
        return Proposal(tokens[:allowed], is_forced, allowed) if allowed else None

    def _charge(self, constraint: Constraint) -> bool:
        """Charges the step with the work for a text since the last time; returns whether there may be more."""
        num_steps = constraint.masker.num_steps
        self._steps_left -= num_steps - constraint.num_steps
        constraint.num_steps = num_steps
        return self._steps_left > 0

    def _walk(self, constraint: Constraint, tokens: Sequence[int]) -> int:
        """How many of the tokens the grammar allows one after another, up to one that ends the text."""
        masker, num_accepted = constraint.masker, 0
        try:
            while num_accepted < len(tokens) and self._charge(constraint) and masker.accept(tokens[num_accepted]):
                num_accepted += 1
                if masker.is_finished():
                    break
        finally:
            masker.rollback(num_accepted)
        return num_accepted

    def _find_masks(self, constraint: Constraint, entry: BatchEntry, pool: MaskPool, rows: np.ndarray) -> bool:
        """Writes the rows of an entry's masks; False if that is more work than the step has left."""
        assert constraint.num_accepted == entry.output_index, "a masker is not where its request is"
        masker, drafts = constraint.masker, entry.drafts
        num_walked = 0
        try:
            watch = None if constraint.watch is None else constraint.watch.fork()
            rows[0] = self._row_under(watch, masker, pool)
            for index, draft in enumerate(drafts):
                if not self._charge(constraint):
                    return False
                if not masker.accept(draft):
                    break  # it cannot be sampled either, so the rows after it do not count
                num_walked += 1
                if not self._charge(constraint):
                    return False
                if watch is not None:
                    watch.push(masker.grammar.vocabulary.text_of(draft))
                rows[index + 1] = self._row_under(watch, masker, pool)
        except GrammarError:
            if not num_walked:
                raise
            # No token can follow that draft. If it is taken, no token after it is: see `_advance`.
        finally:
            masker.rollback(num_walked)
            self._charge(constraint)
        return True

    def _row_under(self, watch: ThoughtWatch | None, masker: GrammarMasker, pool: MaskPool) -> int:
        """The row of the mask for the next token, under a limit of thoughts."""
        closing = None if watch is None else watch.closing_token(masker)
        return self._mask_row(masker, pool) if closing is None else self._only(closing, pool)

    def _only(self, token: int, pool: MaskPool) -> int:
        """The row of the mask that allows one token."""
        key = b"only %d" % token
        row = pool.find(key)
        if row is None:
            mask = np.zeros(self._num_words, np.uint32)
            mask[token >> 5] = 1 << (token & 31)
            row = pool.put(key, mask)
        return row

    def _mask_row(self, masker: GrammarMasker, pool: MaskPool) -> int:
        key = masker.mask_key()
        row = pool.find(key)
        if row is None:
            assert key is not None, "a pool finds the mask that allows everything"
            mask = np.empty(self._num_words, np.uint32)
            masker.fill_mask(mask)
            row = pool.put(key, mask)
        return row

    def _advance(self, constraint: Constraint, index: int, entry: BatchEntry, row: int, result: StepResult) -> None:
        request, masker = entry.running.request, constraint.masker
        tokens = entry.taken(result.token_ids[row : row + entry.num_rows])
        if tokens[-1] < 0:
            tokens.pop()
        learns = self._tokens if constraint.jump == "draft" else None
        before = int(entry.running.tokens[entry.running.num_known - 1]) if constraint.num_accepted else -1
        is_complete, is_forced = list[bool](), list[bool]()
        for count, token in enumerate(tuple(tokens), 1):
            forced = masker.forced_bytes() if constraint.jump != "off" else b""
            if learns is not None and forced:
                learns.learn(before, forced, token)
            is_forced.append(bool(forced) and forced.startswith(masker.grammar.vocabulary.text_of(token)))
            before = token
            if not masker.accept(token):
                raise _why_not(request, constraint, token)
            constraint.num_accepted += 1
            if constraint.watch is not None:
                constraint.watch.push(masker.grammar.vocabulary.text_of(token))
            is_complete.append(masker.is_complete())
            if masker.is_finished() and not self._can_end(request, constraint.num_accepted):
                result.ended[index] = count
                del tokens[count:]
                break
            if token in request.sampling.stop_token_ids and constraint.num_accepted >= request.sampling.min_new_tokens:
                del tokens[count:]  # the stop token ends the request, even if it was a draft
                break
        masker.commit()
        if constraint.jump != "off":
            constraint.num_unforced = 0 if masker.forced_bytes() else constraint.num_unforced + len(tokens)
        if request.sampling.return_constraint:
            mass = tuple(result.kept_mass[i] for i in range(row, row + len(tokens)))
            result.constraints[index] = [
                ConstraintReport(
                    is_forced=tuple(is_forced[:count]), kept_mass=mass[:count], is_complete=is_complete[count - 1]
                )
                for count in range(1, len(tokens) + 1)
            ]

    def _can_end(self, request: Request, num_output: int) -> bool:
        """Whether an EOS token that comes next would end the request."""
        sampling = request.sampling
        return bool(self._eos_token_ids) and not sampling.ignore_eos and num_output >= sampling.min_new_tokens

    def _fail(self, constraint: Constraint, error: Exception) -> None:
        self._num_failures += 1
        if isinstance(error, JsgError):
            constraint.failure = error.with_traceback(None)  # which would keep what it was raised in
        else:
            logger.error("a grammar failed", exc_info=error)
            constraint.failure = JsgError(BUG)


def _why_not(request: Request, constraint: Constraint, token: int) -> Exception:
    """The error for a token that the grammar does not allow. Raises GrammarError where it allows none."""
    constraint.masker.mask_key()
    least = request.sampling.min_new_tokens
    if constraint.num_accepted < least:
        return GrammarError(
            f"the grammar must allow a token that does not end the request until there are min_new_tokens = {least}, "
            f"but after {constraint.num_accepted} it allows only such as do; lower min_new_tokens"
        )
    return AssertionError(f"token {token} was chosen, which the grammar does not allow here")
