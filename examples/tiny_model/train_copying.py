"""Train the tiny model on, to copy from its prompt.

    python examples/tiny_model/train_copying.py --out .cache/drafts/copying

It begins with the weights of `jsg/assets/tiny`, and has the tasks of `copy_tasks.py`. In 600 steps, five minutes of
one core, the model learns to copy what is asked for (half of the objects are right to the last letter). It does not
learn to replace a word by itself.
"""

from pathlib import Path

from copy_tasks import TASKS
from train import Phase, RowWriter, parser, train
from words import Values

TINY = Path(__file__).parents[2] / "jsg" / "assets" / "tiny"
PHASES = [Phase(1.0, [(9, 224), (4, 448)], [0.7, 0.3], 0.0)]


class CopyWriter(RowWriter):
    """Writes rows of turns that copy."""

    def _dialogue(self, length: int) -> None:
        values = Values(self.rng, unseen=False)
        while len(self.ids) < length:
            self._turn(TASKS[self.rng.choice(list(TASKS))](self.rng, values))

    _raw = _dialogue


def main() -> None:
    """Run from the command line."""
    made = parser(__doc__)
    made.set_defaults(init=TINY, steps=600, lr_scale=0.5)
    train(made.parse_args(), CopyWriter, PHASES)


if __name__ == "__main__":
    main()
