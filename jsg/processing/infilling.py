"""Fill in the middle: a prompt and what comes after the answer → the tokens that a model of code was trained on."""

import dataclasses
from collections.abc import Sequence
from typing import final

from jsg.processing.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class _Marks:
    """The special tokens of a family.

    Attributes:
        prefix: What comes before the prompt.
        suffix: What comes before the text after the answer.
        middle: What comes after both, before the answer; None where the prompt comes last, and the answer goes on.
        ends: Tokens besides these that end an answer, where the tokenizer has them.
        suffix_first: The text after the answer comes first.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    _Marks(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<|endoftext|>", "<file_sep>")),  # StarCoder, Granite
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),  # SantaCoder
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # CodeLlama
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<｜end▁of▁sentence｜>",)),  # DeepSeek-Coder
    _Marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Marks("[PREFIX]", "[SUFFIX]", None, ends=("[MIDDLE]",), suffix_first=True),  # Codestral
)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Infilling:
    """How a model fills in the middle.

    Attributes:
        end_ids: Tokens that end an answer.
    """

    end_ids: tuple[int, ...]
    _tokenizer: Tokenizer
    _ids: tuple[int, int, int | None]
    _suffix_first: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infilling | None":
        """The way of the family whose marks the tokenizer has; None where it has none."""
        for marks in _FAMILIES:
            prefix, suffix = tokenizer.token_id(marks.prefix), tokenizer.token_id(marks.suffix)
            middle = None if marks.middle is None else tokenizer.token_id(marks.middle)
            if prefix is None or suffix is None or (marks.middle is not None and middle is None):
                continue
            ends = (prefix, suffix, middle, *map(tokenizer.token_id, marks.ends))
            found = tuple(token for token in ends if token is not None)
            return cls(found, tokenizer, (prefix, suffix, middle), marks.suffix_first)
        return None

    def encode(self, prompt: str, suffix: str, max_tokens: int) -> list[int]:
        """The tokens of a prompt for an answer between the two texts. Raises as `Tokenizer.encode`."""
        prefix_id, suffix_id, middle_id = self._ids

        def encoded(text: str, *, continues: bool) -> Sequence[int]:
            return self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens, continues=continues)

        before = [prefix_id, *encoded(prompt, continues=False)]
        behind = [suffix_id, *encoded(suffix, continues=True)]
        both = [*behind, *before] if self._suffix_first else [*before, *behind]
        return [*self._tokenizer.bos_ids, *both, *([] if middle_id is None else [middle_id])]
