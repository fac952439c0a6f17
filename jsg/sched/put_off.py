"""Requests that sit a step out which has begun: they run, but what comes next in them could not be settled in time."""

from jsg.sched.batch import BatchEntry
from jsg.sched.table import RequestTable


def put_off(entry: BatchEntry, table: RequestTable) -> None:
    """Takes back that a step samples for an entry. A later step runs the request's last token again and samples then.

    The keys and values that this step computes stay, and are not written again. To be called before the step is
    sampled, when all before it are committed.

    Args:
        entry: Samples; it is changed.
        table: Gets the pages of its drafts back.
    """
    place = entry.place
    assert entry.samples and place.num_in_flight == 1, "an entry is put off that the step does not sample"
    table.shrink(place, entry.num_drafts)
    entry.samples = entry.ends_prefill = False
    place.num_in_flight = 0
    place.is_prefilling = True
    place.device_has_last = True  # when the chunk that it goes on with has sampled
