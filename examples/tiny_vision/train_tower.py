"""Teach the vision tower, before any text, to write what each patch shows in the text model's own words.

    python examples/tiny_vision/train_tower.py --out tower.safetensors

The row of a patch should be the sum of the embeddings of the words for it: its color, its shape, its place. The text
model then finds and copies them as it does in text, and a combination that no picture has shown is a sum like any
other. Half of the pictures have shapes in any color, which teach the tower shapes that do not depend on colors.
"""

import argparse
import dataclasses
import random
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from scenes import COLORS, PLACES, SHAPES, Scene, draw, random_scene
from tower import Params, TowerConfig, encode, init_tower, preprocess
from vocabulary import start_text

NOTHING = "nothing"


def word_sums(text: Params, tokenizer) -> dict[str, np.ndarray]:
    """Embeddings [classes, D] of each color, each shape and each place; a shape or color of index 0 is none."""
    table = np.asarray(text["model.embed_tokens.weight"])

    def embedded(words: str) -> np.ndarray:
        return table[[tokenizer.token_to_id(f"Ġ{word}") for word in words.split()]].sum(0)

    places = [place.split("the ")[1] for place in PLACES]
    named = {"kind": [NOTHING, *SHAPES], "color": [NOTHING, *COLORS], "place": places}
    return {name: np.stack([embedded(words) for words in classes]) for name, classes in named.items()}


def with_any_colors(rng: random.Random, scene: Scene) -> Scene:
    """The scene with shades that have no name, none of them near a color that is held out for it."""
    shapes = []
    for shape in scene.shapes:
        while True:
            shade = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
            shown = dataclasses.replace(shape, color=_nearest(shade), shade=shade)
            contrast = sum(abs(a - b) for a, b in zip(shade, scene.background, strict=True))
            if contrast > 150 and not shown.is_held_out:
                break
        shapes.append(shown)
    return dataclasses.replace(scene, shapes=tuple(shapes))


def _nearest(shade: tuple[int, ...]) -> str:
    return min(COLORS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLORS[name], shade, strict=True)))


def draw_batch(rng: random.Random, config: TowerConfig, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Pixels [I, 3, S, S] of random training scenes, and per patch [I, M] the classes; half are of any color."""
    pixels, colors, side = [], list(COLORS), config.image_size // config.patch_size
    cells = {"kind": np.zeros((count, 9), np.int32), "color": np.zeros((count, 9), np.int32)}
    cells["place"] = np.tile(np.arange(9, dtype=np.int32), (count, 1))
    for index in range(count):
        scene = random_scene(rng, rng.randint(1, 6))
        if 2 * index >= count:
            scene = with_any_colors(rng, scene)
        pixels.append(preprocess(draw(scene, config.image_size * rng.randint(1, 4)), config))
        for shape in scene.shapes:
            cells["kind"][index, shape.cell] = 1 + SHAPES.index(shape.kind)
            cells["color"][index, shape.cell] = 1 + colors.index(shape.color)
    line = np.arange(side) * 3 // side
    cell_of_patch = (line[:, None] * 3 + line).reshape(-1)
    return np.stack(pixels), {name: classes[:, cell_of_patch] for name, classes in cells.items()}


def _loss(params: Params, config: TowerConfig, words: Params, pixels: jax.Array, labels: dict[str, jax.Array]):
    rows, named = encode(params, config, pixels), len(pixels) // 2
    sums = sum(words[name][classes] for name, classes in labels.items())
    distance = jnp.square(rows - sums)[:named].sum(-1).mean() / jnp.square(sums - sums.mean((0, 1))).sum(-1).mean()
    loss, right = 10 * distance, {"distance": distance}
    for name in ("kind", "color"):  # the words of places overlap, so that the nearest one says little
        classes = labels[name]
        centred = words[name] - words[name].mean(0)
        squares = jnp.square(centred).sum(-1)
        scores = (rows @ centred.T - squares / 2) * (8 / squares.mean())  # the nearest has the highest
        part = slice(0, named) if name == "color" else slice(None)
        loss += 0.3 * optax.softmax_cross_entropy_with_integer_labels(scores[part], classes[part]).mean()
        right[name] = (scores[part].argmax(-1) == classes[part]).mean()
    return loss, right


@partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1))
def _step(params, state, words, pixels, labels, config: TowerConfig, optimizer):
    (loss, right), grads = jax.value_and_grad(_loss, has_aux=True)(params, config, words, pixels, labels)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss, right


def train(args: argparse.Namespace) -> None:
    """Train and save tower and projector in float32."""
    rng, config = random.Random(args.seed), TowerConfig()
    text, text_config, tokenizer = start_text(args.text)
    words = word_sums(text, tokenizer)
    params = init_tower(config, text_config.dim, args.seed)
    if args.init:
        params = {name: jnp.asarray(value) for name, value in load_file(args.init).items()}
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, min(50, args.steps // 2), args.steps, args.rate / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.02))
    state, started = optimizer.init(params), time.time()
    for step in range(1, args.steps + 1):
        pixels, labels = draw_batch(rng, config, args.images)
        params, state, loss, right = _step(params, state, words, pixels, labels, config, optimizer)
        if step % 50 == 0 or step == args.steps:
            shares = " ".join(f"{name} {float(share):.4f}" for name, share in right.items())
            print(f"step {step} {time.time() - started:.0f}s loss {float(loss):.4f} {shares}", flush=True)
        if step % 100 == 0 or step == args.steps:
            save_file({name: np.asarray(value) for name, value in params.items()}, args.out)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="file of this script to start from")
    parser.add_argument("--text", type=Path, help="folder whose text half gives the words; default: the embedded model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--images", type=int, default=48, help="images a step")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
