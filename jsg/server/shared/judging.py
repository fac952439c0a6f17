"""Whether a model can judge documents as Qwen3-Reranker does, and the tokens in which it says so."""

from jsg.processing.tokenizer import Tokenizer

TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
LABELS = ("yes", "no")


def judging_ids(tokenizer: Tokenizer) -> list[int] | None:
    """The tokens of `LABELS`; None where the tokenizer lacks one of them, or the turns of Qwen3-Reranker."""
    markers = [tokenizer.token_id(marker) for marker in (TURN_BEGIN, TURN_END)]
    labels = [
        ids[0] for ids in (tokenizer.encode(label, add_special_tokens=False) for label in LABELS) if len(ids) == 1
    ]
    can_judge = all(marker in tokenizer.special_ids for marker in markers) and len(labels) == len(LABELS)
    return labels if can_judge else None
