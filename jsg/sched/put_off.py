"""Putting a request off: it takes part in a step that has begun, but that step does not sample for it after all.

The engine does so where the mask of a grammar would take too long.
"""

from jsg.sched.batch import BatchEntry
from jsg.sched.table import RequestTable


def put_off(entry: BatchEntry, table: RequestTable) -> None:
    """Takes back that a step samples for an entry. A later step runs the request's last token again and samples then.

    The keys and values that this step computes stay, and are not written again. It must be called before the step is
    sampled, and when all steps before it are committed.

    Args:
        entry: An entry that the step was to sample for; it is changed.
        table: Gets the pages of its drafts back.
    """
    place = entry.place
    assert entry.samples and place.num_in_flight == 1, "the step does not sample for an entry that is put off"
    table.shrink(place, entry.num_drafts)
    entry.samples = entry.ends_prefill = False
    place.num_in_flight = 0
    place.is_prefilling = True
    place.device_has_last = True  # it will, once the step that runs the token again has sampled
