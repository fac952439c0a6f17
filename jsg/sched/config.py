"""What the scheduler knows of the model and of the options, and the checks of requests against it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jsg.errors import FieldName, RequestError, check_length
from jsg.sched.buckets import Buckets
from jsg.sched.joined import check_joined
from jsg.sched.positions import positions_of
from jsg.sched.table import RequestTable
from jsg.sched.vision_store import VisionShape
from jsg.types import Request

MAX_HOLDS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know of the model and of the options. Lengths are in tokens.

    Attributes:
        embeds: Whether requests ask for the vector of their prompt, with one new token that nobody reads.
        vision: The shape of the vision pool; None if the model takes text only.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    buckets: Buckets
    max_running: int
    policy: str = "lpm"
    conservativeness: float = 1.0
    max_prefill_tokens: int = 16_384
    max_bypass_tokens: int = 16_384
    max_queued: int = 10_000
    max_holds: int = MAX_HOLDS
    embeds: bool = False
    vision: VisionShape | None = None


def check_request(request: Request, config: SchedulerConfig, table: RequestTable) -> None:
    """Raises RequestError for a request that can never run."""
    limit = min(config.context_length, table.num_pages * table.page_size)
    # The token that a vector costs is never computed with, so it needs no position.
    check_length(len(request.input_ids), 0 if config.embeds else request.sampling.max_new_tokens, limit)
    named_ids: dict[str, Sequence[int]] = {
        "input_ids": (request.input_ids.highest,),
        "token_ids_logprob": request.token_ids_logprob,
        "stop_token_ids": request.sampling.stop_token_ids,
        "logit_bias": [token for token, _ in request.sampling.logit_bias],
    }
    for name, ids in named_ids.items():
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            got = max(ids) if min(ids) >= 0 else min(ids)
            rule = f": token ids must be in [0, {config.vocab_size}), but got {got}"
            raise RequestError((FieldName(name), rule), name)
    if request.joined:
        check_joined(request, table)


def check_positions(request: Request, context_length: int) -> np.ndarray | None:
    """See `positions_of`. Raises RequestError if the model has no position as large as one of these."""
    positions = positions_of(request, len(request.input_ids) + request.sampling.max_new_tokens)
    if positions is not None and positions.max() >= context_length:
        raise RequestError(
            f"positions must be below {context_length}, but with its jumps this request reaches {positions.max()}; "
            "make them smaller, or lower max_new_tokens",
            param="position_jumps",
        )
    return positions
