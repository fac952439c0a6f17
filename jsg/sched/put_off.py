"""Puts off a request: it takes part in a step that has begun, but that step does not sample for it after all.

The engine puts off a request if the mask of its grammar would take too long.
"""

from jsg.sched.batch import BatchEntry
from jsg.sched.table import RequestTable


def put_off(entry: BatchEntry, table: RequestTable) -> None:
    """Changes an entry so that the step does not sample for it. A later step runs the request's last token again.

    The keys and values that this step computes stay, and are not written again. The call must come before the step
    samples, and after all earlier steps are committed.

    Args:
        entry: An entry for which the step would sample.
        table: It gets back the pages of the entry's drafts.
    """
    place = entry.place
    assert entry.samples and place.num_in_flight == 1, "the step does not sample for an entry that is put off"
    table.shrink(place, entry.num_drafts)
    entry.samples = entry.ends_prefill = False
    place.num_in_flight = 0
    place.is_prefilling = True
    place.device_has_last = True  # this is true once the step that runs the token again has sampled
