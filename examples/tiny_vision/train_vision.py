"""Train the text model on conversations about pictures, and write the model's files. The tower stays as it is.

    python examples/tiny_vision/train_tower.py --out /tmp/tower.safetensors
    python examples/tiny_vision/train_vision.py --tower /tmp/tower.safetensors --out /tmp/tiny-vision

A row is one picture and as many questions as fit behind it, so a picture is encoded once for all of them. In most rows
they are branches, as of a program's `fork`: a token sees the picture and its own branch only, for a model that may read
its earlier answers learns to look there and not at the picture. Every seventh row is text of examples/tiny_model, so
that what the text model could do is not forgotten.
"""

import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from questions import training_questions, training_scene
from safetensors.numpy import load_file
from scenes import Scene, draw
from tokenizers import Tokenizer
from tower import TowerConfig, forward, preprocess, save_model, text_model
from vocabulary import IMAGE, VOCAB_SIZE, save_extended, start_text

sys.path.append(str(Path(__file__).parents[1] / "tiny_model"))  # the text half is trained by its modules

import tokenizer as text_tokenizer
from phrasings import SYSTEM_PROMPTS
from train import RowWriter

ROW_LENGTH = 160
PICTURES, TEXTS = 12, 2
"""Rows of each kind in a step."""
CHAIN = 0.2
"""The share of rows that are one conversation, and of branches that go on for another question."""


class PictureRows:
    """Writes rows about a picture as token ids, a loss weight per token, and pixels."""

    def __init__(self, tokenizer: Tokenizer, config: TowerConfig, rng: random.Random) -> None:
        """Draw everything from `rng`."""
        self.tokenizer, self.config, self.rng = tokenizer, config, rng
        names = (text_tokenizer.BEGIN, text_tokenizer.END, text_tokenizer.USER, text_tokenizer.ASSISTANT)
        self.begin, self.end, self.user, self.assistant = (tokenizer.token_to_id(name) for name in names)
        self.system = tokenizer.token_to_id(text_tokenizer.SYSTEM)
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.branches: list[int] = []
        self.branch = 0

    def _write(self, ids: list[int], weight: float = 0.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.branches += [self.branch] * len(ids)

    def _answer(self, prompt: list[int], answer: str) -> None:
        self._write([*prompt, self.end, self.assistant])
        self._write([*self._encoded(answer), self.end], 1.0)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def row(self, image: list[int]) -> tuple[list[int], list[float], list[int], np.ndarray]:
        """Ids, weights and branches of a row whose picture has the ids `image`, and its pixels [3, S, S].

        Branch 0 is what all others begin with: the picture, and what is in front of it.
        """
        rng, self.ids, self.weights, self.branches, self.branch = self.rng, [], [], [], 0
        scene = training_scene(rng)
        if rng.random() < 0.3:
            self._write([self.begin])
        if rng.random() < 0.1:
            self._write([self.system, *self._encoded(rng.choice(SYSTEM_PROMPTS)), self.end])
        self._write([self.user])
        picture_last = rng.random() < 0.1
        if not picture_last:
            self._write(image)
        in_turn = picture_last or rng.random() < 0.8  # the first question is in the turn of the picture
        if not in_turn:
            self._answer([], "OK.")
        self._questions(scene, image if picture_last else [], in_turn=in_turn)
        picture = draw(scene, self.config.image_size * rng.randint(1, 4))
        pixels = preprocess(picture, self.config)
        return self.ids[:ROW_LENGTH], self.weights[:ROW_LENGTH], self.branches[:ROW_LENGTH], pixels

    def _questions(self, scene: Scene, image: list[int], *, in_turn: bool) -> None:
        """Write questions until the row is full; `image` goes behind the first where it is not in front."""
        rng = self.rng
        one_conversation = bool(image) or rng.random() < CHAIN
        fresh = in_turn
        while len(self.ids) < ROW_LENGTH:
            if not one_conversation and rng.random() >= CHAIN:
                self.branch, fresh = self.branch + 1, in_turn
            for question in training_questions(rng, scene):
                prompt = [*self._encoded(question.prompt), *image]
                self._answer(prompt if fresh else [self.user, *prompt], question.answer)
                fresh, image = False, []


def visible_tokens(branches: np.ndarray) -> np.ndarray:
    """Which tokens [B, T, T] each token sees: earlier ones of its own branch [B, T] and of branch 0."""
    same = (branches[:, :, None] == branches[:, None, :]) | (branches[:, None, :] == 0)
    return np.tril(same)


class Batch(NamedTuple):
    """One step: pixels [I, 3, S, S], ids [B, T], weights [B, T], what each token sees [B, T, T].

    Ids from V on are the rows of the pictures, one picture after another.
    """

    pixels: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    visible: np.ndarray


def draw_batch(pictures: PictureRows, texts: RowWriter) -> Batch:
    """What a step learns from."""
    patches, rows, pixels = pictures.config.num_patches, [], []
    for index in range(PICTURES):
        first = VOCAB_SIZE + index * patches
        *row, picture = pictures.row(list(range(first, first + patches)))
        rows.append(row)
        pixels.append(picture)
    rows += [(*texts.row(ROW_LENGTH), [0] * ROW_LENGTH) for _ in range(TEXTS)]
    tokens, weights, branches = zip(*rows, strict=True)
    return Batch(np.stack(pixels), np.array(tokens), np.array(weights, np.float32), visible_tokens(np.array(branches)))


def _loss(text, tower, configs, batch: Batch):
    tokens, weights = batch.tokens, batch.weights[:, 1:]
    hidden = forward(tower, text, configs, batch.pixels, tokens, batch.visible)[:, :-1]
    targets = jnp.where(tokens < VOCAB_SIZE, tokens, 0)[:, 1:]  # a picture's rows are never predicted
    scores = text_model.logits(text, hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    answers = (weights == 1.0).at[PICTURES:].set(False)
    right = jnp.sum((scores.argmax(-1) == targets) & answers) / jnp.sum(answers)
    return jnp.sum(losses * weights) / jnp.sum(weights), right


@partial(jax.jit, static_argnames=("configs", "optimizer"), donate_argnums=(0, 1))
def _step(text, state, tower, batch, configs, optimizer):
    (loss, right), grads = jax.value_and_grad(_loss, has_aux=True)(text, tower, configs, batch)
    updates, state = optimizer.update(grads, state, text)
    return optax.apply_updates(text, updates), state, loss, right


def make_optimizer(steps: int, scale: float) -> optax.GradientTransformation:
    """Muon for the matrices, AdamW for the rest; both rise for 50 steps, or half of all if fewer, and fall to zero."""

    def rate(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak * scale, min(50, steps // 2), steps, 0.0)

    def labels(text: dict) -> dict:
        return {name: "muon" if "_proj" in name else "adam" for name in text}

    parts = {
        "muon": optax.contrib.muon(rate(0.006), beta=0.95, weight_decay=0.02),
        "adam": optax.adamw(rate(1e-3), b2=0.98, weight_decay=0.0),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(parts, labels))


def train(args: argparse.Namespace) -> None:
    """Train and save; the log goes to standard output."""
    text, text_config, tokenizer = start_text(args.text)
    tower = {name: jnp.asarray(value) for name, value in load_file(args.tower).items()}
    rng, configs = random.Random(args.seed), (TowerConfig(), text_config)
    pictures, texts = PictureRows(tokenizer, configs[0], rng), RowWriter(tokenizer, rng)
    optimizer = make_optimizer(args.steps, args.lr_scale)
    state, started, losses, rights = optimizer.init(text), time.time(), [], []
    image_token_id = tokenizer.token_to_id(IMAGE)
    save_extended(tokenizer, args.out)
    for step in range(1, args.steps + 1):
        batch = draw_batch(pictures, texts)
        text, state, loss, right = _step(text, state, tower, batch, configs, optimizer)
        losses.append(float(loss))
        rights.append(float(right))
        if step % 25 == 0:
            spent = f"{time.time() - started:.0f}s {time.process_time():.0f} CPU s"
            print(f"step {step} {spent} loss {np.mean(losses):.3f} answers {np.mean(rights):.4f}", flush=True)
            losses, rights = [], []
        if step % 100 == 0 or step == args.steps:
            save_model(tower, text, configs, image_token_id, args.out)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--tower", type=Path, required=True, help="file of train_tower.py")
    parser.add_argument("--text", type=Path, help="folder whose text half to start from; default: the embedded model")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr-scale", type=float, default=1.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
