"""A family: what the fields of its `config.json` mean. No JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from jsg.fields import Fields
from jsg.models.spec import ModelSpec
from jsg.models.without_effect import refuse_unknown

CAUSAL_RULE = "be true, for a token sees only those before it"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family reads its `config.json`.

    Attributes:
        architecture: Its name in `architectures`.
        model_type: Its other name.
        other_types: Names that some files have in place of it.
        defaults: Each field that it reads, with the value of an absent one, which is that of the configuration class in
            transformers: files leave fields out. A null is not an absence: it says "none", which only some fields can
            be.
        spec: From the fields, with the defaults of those that are absent, to the model.
        ignored: Fields that have no effect in this family.
        aliases: Another name of a field → its name.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    spec: Callable[[Fields], ModelSpec]
    ignored: AbstractSet[str] = frozenset()
    other_types: AbstractSet[str] = frozenset()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def read(self, config: Fields) -> ModelSpec:
        """The model of a file.

        Raises:
            ModelError: The file is one of another family, its attention is not causal, a field is out of bounds or not
                supported, or it has a field that the family does not read and that may change the answers.
        """
        model_type = config.get("model_type", self.model_type)
        is_own = model_type == self.model_type or model_type in self.other_types
        config.require(is_own, "model_type", f"be {self.model_type}", model_type)
        is_causal = config.over({"is_causal": True}).get("is_causal")  # transformers takes a null as false
        config.require(is_causal is True, "is_causal", CAUSAL_RULE, is_causal)
        refuse_unknown(config, {*self.defaults, *self.aliases, *self.ignored}, self.architecture)
        renamed = {name: config.get(alias) for alias, name in self.aliases.items() if config.get(alias) is not None}
        own_code = config.section("auto_map")
        if own_code and any(name.startswith("AutoModel") for name in own_code.names()):
            config.notes.append(
                f"{self.architecture} is computed as in transformers; auto_map's Python code is never run"
            )
        model = self.spec(config.over(self.defaults).under(renamed))
        return dataclasses.replace(model, architecture=self.architecture, notes=tuple(config.notes))
