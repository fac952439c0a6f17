"""A model around a text model: how its `config.json` and its checkpoint name the text half. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jsg.models.family import CAUSAL_RULE
from jsg.models.spec import ModelSpec, TensorNames
from jsg.models.vision_config import VisionConfig
from jsg.sources import Fields

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Where the text half is in transformers 4 (the first two) and 5. In the modules it has the names of a text model."""
_FIELDS = (
    "text_config vision_config tie_word_embeddings image_token_index image_token_id projector_hidden_act "
    "vision_feature_layer vision_feature_select_strategy multimodal_projector_bias ignore_index vocab_size"
)
"""The fields beside `text_config` that any such file may have, read or without effect."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """How the file of a model around a text model is read. Any family that jsg serves may be the text half.

    Attributes:
        text_type: The `model_type` of a text half that names none.
        text_half: The fields of the text half in a file without `text_config`; one that is there lacks none of them.
        is_tied: Whether the head is tied where the file does not say so.
        fields: More fields beside `text_config`, read or without effect, with spaces between them.
        prefixes: See `TensorNames`.
        unread: Likewise. The tower of a model of which only the text half is built.
        note: What is said about the halves, for the log; empty for nothing.
    """

    text_type: str
    text_half: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_tied: bool = False
    fields: str = ""
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=lambda: TEXT_PREFIXES)
    unread: str = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
    note: str = "the model is served without its vision tower, so it takes text only"

    @property
    def known_fields(self) -> set[str]:
        """All fields beside `text_config`."""
        return {*_FIELDS.split(), *self.fields.split()}

    def around(self, text: ModelSpec, vision: VisionConfig | None) -> ModelSpec:
        """The model around this text half, with a tower if it is built."""
        names = TensorNames(prefixes=self.prefixes, unread=f"{self.unread}|{text.names.unread}")
        notes = (*text.notes, self.note) if self.note else text.notes
        return dataclasses.replace(text, vision=vision, names=names, notes=notes)

    def text_half_of(self, whole: Fields) -> Fields:
        """The fields of the text half, with its `model_type`.

        Raises:
            ModelError: The model is not causal, or a field is out of bounds.
        """
        text = whole.section("text_config") or Fields("config.json: text_config", self.text_half, whole.notes)
        is_causal = whole.over({"is_causal": True}).get("is_causal")
        whole.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
        is_tied = whole.flag("tie_embedding", default=whole.flag("tie_word_embeddings", default=self.is_tied))
        is_tied = is_tied or text.flag("tie_word_embeddings", default=False)
        # Hugging Face's order: the whole file decides these tokens, else the text half, else the family.
        names = ("bos_token_id", "eos_token_id")
        tokens = {name: list(whole.token_ids(name)) for name in names if whole.get(name) is not None}
        model_type = text.text("model_type", default=self.text_type)
        tied = {"tie_word_embeddings": is_tied, "tie_embedding": None}
        return text.under({"model_type": model_type, **tied, **tokens})
