"""Makes one batch of the entries of a step: their order, the shape of the step, and the prefixes that are read once."""

from collections.abc import Sequence

from jsg.sched.batch import Batch, BatchEntry
from jsg.sched.buckets import Buckets, Phase
from jsg.sched.groups import PrefixGrouping
from jsg.sched.request import RunningRequest
from jsg.sched.table import RequestTable


class Batcher:
    """Makes batches. It remembers the groups of the last decode step, which are mostly those of the next step too."""

    def __init__(self, buckets: Buckets, table: RequestTable):
        self._buckets = buckets
        self._table = table
        self._grouping = PrefixGrouping(table.page_size)

    def make(
        self, decoding: Sequence[BatchEntry], chunks: Sequence[BatchEntry], admitted: Sequence[RunningRequest]
    ) -> Batch:
        """Makes one step of all entries. Entries with one token come first.

        It takes what the table has noted for the next step: dirty rows, copies, and images to encode.

        Args:
            decoding: One entry for each request that decodes.
            chunks: The entries of prompts.
            admitted: Requests that run since the last batch was made.
        """
        table = self._table
        short = [chunk for chunk in chunks if chunk.num_new == 1]
        long = [chunk for chunk in chunks if chunk.num_new > 1]
        num_drafts = sum(entry.num_drafts for entry in decoding)
        if any(entry.num_new > 1 for entry in decoding):  # with drafts, or with tokens that run again
            long = [entry for entry in decoding if entry.num_new > 1] + long
            decoding = [entry for entry in decoding if entry.num_new == 1]
        num_singles = len(decoding) + len(short)
        is_decode = not long and not any(chunk.scores_prompt or chunk.vision_ids is not None for chunk in short)
        num_tokens = num_singles + sum(entry.num_new for entry in long)
        if num_drafts:
            key = self._buckets.with_room(num_tokens, num_singles + len(long) + num_drafts)[0]
        else:
            key = self._buckets.pick(Phase.DECODE if is_decode else Phase.EXTEND, num_tokens)
        may_share = is_decode and bool(self._buckets.grouped)
        groups = self._grouping.update([entry.place for entry in decoding]) if may_share else ()
        dirty_rows, copies = tuple(sorted(table.dirty_rows)), tuple(table.copies.values())
        lacking, table.lacking = table.lacking, {}
        table.dirty_rows.clear()
        table.copies.clear()
        is_deterministic = not self._buckets.decode
        return Batch(
            key,
            (*decoding, *short, *long),
            num_singles=0 if is_deterministic else num_singles,
            admitted=tuple(admitted),
            dirty_rows=dirty_rows,
            groups=groups,
            has_drafts=num_drafts > 0,
            is_deterministic=is_deterministic,
            copies=copies,
            encodings=table.vision.take_encodings(),
            lacking=lacking,
        )
