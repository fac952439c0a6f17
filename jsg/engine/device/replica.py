"""What one process holds of an engine: parameters and state on its devices, and the calls that change them.

Each of several hosts has a replica with its slices of the parameters and of the pool. All make the same calls with the
same arrays in the same order; nothing else keeps them equal.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jsg.engine.device.programs import DeviceState, Programs, Variant, seen
from jsg.engine.device.sampling import TokenMasks
from jsg.models.tensor_parallel import place
from jsg.sched.buckets import BucketKey


@runtime_checkable
class Calls(Protocol):
    """Takes calls of programs: a replica, or a leader that passes them on to the replicas of all hosts."""

    def call(self, name: Hashable, *arrays: np.ndarray) -> Any:
        """See `Replica.call`."""
        ...

    def find_out(self) -> None:
        """Notes that a step has failed. Ends the process if another host was the cause."""
        ...

    def close(self) -> None:
        """Frees the memory; there will be no more calls."""
        ...


class Replica:
    """Parameters, state and programs of this process.

    Attributes:
        leaves: The model's parameters.
        state: The results of the last calls. Arrays that were donated to these calls are gone.
    """

    def __init__(self, programs: Programs, state: DeviceState):
        self.leaves = programs.leaves
        self.state = state
        self._executables = programs.executables
        self._logits: jax.Array | None = None  # results of the last forward pass
        self._hidden: jax.Array | None = None
        self._drafted: Sequence[jax.Array | None] = (None, None)  # tokens and hidden states of the last draft

    def call(self, name: Hashable, *arrays: np.ndarray) -> Any:
        """Runs a program on parameters, state and arrays of the host. Does not wait.

        Args:
            name: The program.
            arrays: Its arguments that come from the host: see `Executables.host_shapes`.

        Returns:
            `StepOutput` for a sampling, tokens for drafts, `Logprobs` for prompt tokens, vectors for `embed`, and
            None for programs that change the state only.
        """
        state, run = self.state, self._executables
        match name:
            case ("forward", BucketKey() as key):
                self._logits = self._hidden = None  # a run on padding leaves them, and this pass needs the memory
                self._logits, self._hidden, pool, page_table = run(
                    name, self.leaves, state.pool, state.page_table, state.last_token, *arrays, *seen(state, key)
                )
                self.state = state._replace(pool=pool, page_table=page_table)
            case ("sample", int(), Variant() as variant):
                return self._sample(name, variant, *arrays)
            case ("prompt_logprobs", int()):
                return run(name, self.leaves, self._or_zeros(self._hidden, name, 1), *arrays)
            case ("embed", BucketKey()):
                return run(name, self._or_zeros(self._hidden, name, 0), *arrays)
            case ("draft", int()):
                return self._draft(name, *arrays)
            case ("encode", int(), bool()):
                self.state = state._replace(vision=run(name, self.leaves, state.vision, *arrays))
            case ("write_rows", int()):
                self.state = state._replace(page_table=run(name, state.page_table, *arrays))
            case ("copy_slots",):
                self.state = state._replace(pool=run(name, state.pool, *arrays))
            case ("write_masks", int()):
                self.state = state._replace(masks=run(name, state.masks, *arrays))
            case ("write_counts",) | ("write_bias",):
                self.state = state._replace(penalties=run(name, state.penalties, *arrays))
            case _:
                raise AssertionError(f"nobody knows how to call {name}")
        return None

    def find_out(self) -> None:
        """Does nothing: there is no other host."""

    def close(self) -> None:
        """Frees parameters and state at once. Reference cycles of an engine would keep them until Python collects."""
        self._logits = self._hidden = None
        for array in jax.tree.leaves((self.leaves, self.state)):
            array.delete()

    def _sample(self, name: Hashable, variant: Variant, packed: np.ndarray, *others: np.ndarray) -> Any:
        """Samples. `others` are the ids to score, the rows of masks and the forced tokens, if the variant has them."""
        state, left = self.state, list(others)
        chosen = left.pop(0) if variant.has_logprobs else None
        masks = TokenMasks(state.masks, *left) if variant.has_masks else None  # pyright: ignore[reportArgumentType]
        penalties = state.penalties if variant.has_tables else None
        logits = self._or_zeros(self._logits, name, 0)
        self._logits = self._hidden = None  # the next forward pass needs the memory
        output, last_token, penalties = self._executables(
            name, logits, packed, state.last_token, penalties, chosen, masks
        )
        self.state = state._replace(last_token=last_token, penalties=penalties or state.penalties)
        return output

    def _draft(self, name: Hashable, *arrays: np.ndarray) -> jax.Array:
        pool = self.state.pool
        shapes = self._executables.argument_shapes(name)[-3]
        last = tuple(self._fitting(*each) for each in zip(self._drafted, shapes, strict=True))
        tokens, hidden, cache = self._executables(
            name, self.leaves, pool.layers[-1], pool.hidden[0], self.state.page_table, last, *arrays
        )
        self._drafted = tokens, hidden
        self.state = self.state._replace(pool=pool._replace(layers=(*pool.layers[:-1], cache)))
        return tokens

    def _or_zeros(self, given: jax.Array | None, name: Hashable, index: int) -> jax.Array:
        """A result of the forward pass as an argument of a program; zeros in a run on padding, which has none."""
        return self._fitting(given, self._executables.argument_shapes(name)[index])

    @staticmethod
    def _fitting(given: jax.Array | None, shape: Any) -> jax.Array:
        if given is not None and given.shape == shape.shape:
            return given
        # `place` uses no program, because nothing may compile after warm-up.
        return place(np.zeros(shape.shape, shape.dtype), shape.sharding)
