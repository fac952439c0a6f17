"""Drafts: tokens that are proposed for the end of a request, which one step verifies together."""

from collections.abc import Mapping, Sequence

from jsg.sched.batch import BatchEntry, Proposal
from jsg.sched.buckets import Buckets
from jsg.sched.drafts.gate import BESIDE_PROMPTS, Gate
from jsg.sched.table import RequestTable

MOST_AGAIN = 8
"""If more tokens of a request than this run again in a step, it has no drafts: each wrong draft would add to these."""


def add_drafts(
    decoding: Sequence[BatchEntry],
    proposals: Mapping[str, Proposal],
    table: RequestTable,
    buckets: Buckets,
    gate: Gate,
    most_entries: int,
    max_rows: int,
) -> int:
    """Adds drafts to entries, as far as rows of logits, budget and memory allow; returns how many.

    Args:
        decoding: Entries of one token; they are changed.
        proposals: The tokens to propose, by rid.
        table: Gives the pages.
        buckets: The shapes that a step may have.
        gate: Decides which drafts are worth it.
        most_entries: The most entries that the step may have in the end.
        max_rows: The most rows of logits of a step in which all requests decode.
    """
    by_entry = [(entry, proposals.get(entry.running.request.rid)) for entry in decoding]
    proposed = [(entry, proposal) for entry, proposal in by_entry if proposal is not None]
    counts, max_rows = _worth(
        [proposal for _, proposal in proposed], len(decoding), most_entries, buckets, gate, max_rows
    )
    num_tokens, num_drafts = sum(entry.num_new for entry in decoding), 0
    spare = min(max_rows - most_entries, (buckets.chunk - num_tokens) // 2)
    for (entry, proposal), worth in zip(proposed, counts, strict=True):
        running, place = entry.running, entry.place
        assert entry.output_index == running.num_output, "a token is proposed after one that is not known"
        count = min(worth, spare - num_drafts, running.num_to_come, table.room(place))
        num_rows = len(decoding) + num_drafts
        while count > 0 and not buckets.with_room(num_tokens + num_drafts + count, num_rows + count):
            count -= 1  # beside tokens that run again
        if count <= 0 or entry.num_new > MOST_AGAIN or not table.may_draft(place, entry.start):
            continue
        running.make_room()
        running.tokens[running.num_known : running.num_known + count] = proposal.tokens[:count]
        table.grow(place, count)
        entry.num_new, entry.num_drafts, entry.proposal = entry.num_new + count, count, proposal
        entry.state_source, entry.state_slot = place.state.source, place.state.slot
        place.num_again = 0 if table.slots is None else entry.num_new
        entry.from_device = place.device_has_last = False
        num_drafts += count
    return num_drafts


def _worth(
    proposed: Sequence[Proposal], num_rows: int, most_entries: int, buckets: Buckets, gate: Gate, max_rows: int
) -> tuple[Sequence[int], int]:
    """How many tokens of each proposal are worth a row of logits, and how many rows the step should have at most.

    Sure ones always are.
    """
    sure = [each.num_sure for each in proposed]
    choice = gate.choose(num_rows, [each.chances for each in proposed], max_rows)
    gate.num_open += choice is not None
    gate.num_shut += choice is None and any(each.chances for each in proposed)
    has_chunks = num_rows < most_entries  # there may be some, and shapes for many tokens have no rows for many drafts
    if has_chunks:
        least = buckets.max_rows
    else:
        least = buckets.rows_worth(num_rows, num_rows + sum(sure), max_rows) if sum(sure) else 0
    if choice is None:
        return sure, least
    if has_chunks:
        likely = [sum(chance >= BESIDE_PROMPTS for chance in each.chances) for each in proposed]
        return [*map(max, sure, likely)], least
    return [*map(max, sure, choice.counts)], max(least, choice.num_rows)
