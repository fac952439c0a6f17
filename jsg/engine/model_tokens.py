"""The tokens of a model as grammars need them. No JAX."""

import dataclasses
from collections.abc import Collection
from typing import Self, final

from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.special_tokens import check_names
from jsg.errors import ModelError
from jsg.models.config import read_spec
from jsg.processing.tokenizer import Tokenizer, load_tokenizer, vocabulary_bytes
from jsg.sources import resolve_model
from jsg.speech.answers.tool_calls import nameable_tokens
from jsg.types import GrammarSpec


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ModelTokens:
    """A tokenizer, and what the model says of its tokens.

    Attributes:
        tokenizer: The tokenizer.
        size: Rows of the model's vocabulary.
        eos_ids: Tokens that end an answer; those outside the vocabulary do not count.
    """

    tokenizer: Tokenizer
    size: int
    eos_ids: Collection[int]

    @classmethod
    def read(cls, name: str) -> Self:
        """Those of a model, or those that a tokenizer alone tells: a row for each token, and its own EOS.

        Args:
            name: A model or a directory with a tokenizer, as `resolve_model` finds it; it needs no weights.

        Raises:
            ModelError: There is none, it cannot be read, or nothing says which token ends a text.
        """
        directory = resolve_model(name, load_format="dummy")
        tokenizer = load_tokenizer(directory)
        if (directory / "config.json").is_file():
            model = read_spec(directory)
            return cls(tokenizer, model.vocab_size, model.eos_token_ids)
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "a tokenizer without a model must name its eos_token, but this one names none; give the model's folder"
            )
        return cls(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))

    def check(self, grammar: GrammarSpec) -> None:
        """Raises GrammarError where a grammar names a special token that it may not name with this model."""
        check_names(grammar, set(nameable_tokens(self.tokenizer, self.size, self.eos_ids).values()))

    def vocabulary(self) -> Vocabulary:
        """The bytes that grammars read for each token."""
        special = [token for token in self.tokenizer.special_ids if token < self.size]
        return Vocabulary(
            vocabulary_bytes(self.tokenizer)[: self.size],
            special,
            [token for token in self.eos_ids if token < self.size],
            size=self.size,
            special_names={i: self.tokenizer.token_bytes(i).decode(errors="replace") for i in special},
        )
