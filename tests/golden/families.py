"""One variant of each family, for what every family must keep and no two variants of one keep differently.

A family joins by having a variant in `VARIANTS`.
"""

import json
import tempfile
from pathlib import Path

from jsg.errors import ConfigError, ModelError
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec
from tests.golden.variants import VARIANTS


def one_of_each(*, is_sparse: bool = False) -> dict[str, ModelSpec]:
    """The first variant of each architecture that two devices can share; only those with experts, if so asked."""
    found: dict[str, tuple[str, ModelSpec]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        for variant, config in VARIANTS.items():
            architecture = config["architectures"][0]
            if architecture in found:
                continue
            file.write_text(json.dumps(config))
            spec = read_spec(Path(folder))
            try:
                spec.over_devices(2, 2 if is_sparse else 1)  # refuses groups of what has no experts
            except (ConfigError, ModelError):
                continue
            found[architecture] = variant, spec
    return dict(found.values())
