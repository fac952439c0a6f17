"""A recorded vision variant, its checkpoint and its model, for the tests of models and of the engine."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jsg.models.clip import VisionTower
from jsg.models.image_layout import NEWLINE, image_layout, num_tiles, video_layout
from tests.golden.compare import Recorded
from tests.golden.vision_variants import ITEMS, vision_pixels, vision_tensors, write_vision_checkpoint
from tests.kernels_pallas.definition import QUICKLY
from tests.models.paged import load_directory


class VisionGolden(Recorded):
    """The record, and the same prompt encoded here."""

    def __init__(self, variant: str, directory: Path):
        super().__init__(variant)
        self.variant = variant
        self.tensors = vision_tensors(variant, self.note["seed"])
        write_vision_checkpoint(directory, variant, self.tensors)
        self.config, self.model = load_directory(directory)
        vision = self.config.vision
        assert vision is not None
        self.vision = vision
        self.layouts = [
            video_layout(vision, item) if isinstance(item, int) else image_layout(vision, item)
            for item in ITEMS[variant]
        ]
        first, second = [item if isinstance(item, int) else num_tiles(vision, item) for item in ITEMS[variant]]
        self.pixels = vision_pixels(variant, self.note["seed"], (first, second))
        graph = nnx.graphdef(self.model.vision)
        self._programs = {
            name: jax.jit(
                lambda state, pixels, name=name: getattr(nnx.merge(graph, state), name)(pixels),
                compiler_options=QUICKLY,
            )
            for name in ("encode", "encode_frames")
        }

    def encode(self, tower: VisionTower | None = None) -> list[np.ndarray]:
        """The rows [tokens, D] that each item's tokens are embedded as; by another tower, if one is given."""
        tower, width = tower or self.model.vision, self.config.hidden_size
        newline = np.zeros(width, np.float32) if tower.newline is None else tower.newline[...]
        rows = []
        for item, pixels, layout in zip(ITEMS[self.variant], self.pixels, self.layouts, strict=True):
            name = "encode_frames" if isinstance(item, int) else "encode"
            encoded = self._programs[name](nnx.state(tower), pixels).reshape(-1, width)
            rows.append(np.where(layout[:, None] == NEWLINE, newline, np.asarray(encoded)[layout]))
        return rows
