"""Train the tiny model from nothing and write its files.

    python examples/tiny_model/train.py --out jsg/assets/tiny

Rows are dialogues or raw few-shot texts cut to one length; rows get longer as training goes on. Answers weigh 1 and
prompts `PROMPT_WEIGHT`. Matrices are trained with Muon, embeddings and norms with AdamW, both from optax.
"""

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tasks
from model import Params, TinyConfig, forward, init_params, load_model, logits, save_model
from phrasings import FACTS, SYSTEM_PROMPTS
from tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from words import Values

PROMPT_WEIGHT = 0.03
DECAY_FROM = 0.05
"""The share of training after which the learning rate falls."""


class Phase(NamedTuple):
    """A stretch of training: up to which share of it, the shapes of its batches with their odds, and its echo rows."""

    until: float
    shapes: list[tuple[int, int]]
    odds: list[float]
    echo: float


PHASES = [
    Phase(0.20, [(18, 112)], [1.0], 0.3),
    Phase(0.70, [(14, 144), (5, 384)], [0.92, 0.08], 0.05),
    Phase(1.00, [(14, 144), (5, 384), (2, 1344)], [0.93, 0.04, 0.03], 0.0),
]
"""About 2000 tokens a step. The last phase has dependencies over more than 1000 tokens; training that continues from a
model (`--init`) has only that one."""
RAW_SHARE = 0.07


class RowWriter:
    """Writes training rows as token ids with a loss weight per token."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        """Draw everything from `rng`."""
        self.tokenizer = tokenizer
        self.rng = rng
        self.special = {token: tokenizer.token_to_id(token) for token in (BEGIN, END, SYSTEM, USER, ASSISTANT)}
        self.ids: list[int] = []
        self.weights: list[float] = []

    def _text(self, text: str, weight: float) -> None:
        ids = self.tokenizer.encode(text).ids
        self.ids += ids
        self.weights += [weight] * len(ids)

    def _special(self, token: str, weight: float = 0.0) -> None:
        self.ids.append(self.special[token])
        self.weights.append(weight)

    def _turn(self, turn: tasks.Turn) -> None:
        self._special(USER)
        self._text(turn.prompt, PROMPT_WEIGHT)
        self._special(END)
        self._special(ASSISTANT)
        self._text(turn.answer, 1.0)
        self._special(END, 1.0)

    def _shots(self) -> None:
        shots = tasks.few_shot(self.rng, False, self.rng.randint(3, 7))
        for index, turn in enumerate(shots.turns):
            self._text((shots.joiner if index else "") + turn.prompt, PROMPT_WEIGHT)
            self._text(turn.answer, 1.0 if index else PROMPT_WEIGHT)
        if self.rng.random() < 0.5:
            self._text(shots.joiner, PROMPT_WEIGHT)
        self._special(END)

    def _raw(self, length: int) -> None:
        while len(self.ids) < length:
            if self.rng.random() < 0.3:
                turn = tasks.training_completion(self.rng)
                self._text(turn.prompt, PROMPT_WEIGHT)
                self._text(turn.answer, 1.0)
                self._special(END, 1.0)
            else:
                self._shots()

    def _echo(self, length: int) -> None:
        """Write random tokens in chunks and then the chunks again in another order, which teaches copying itself."""
        rng, first = self.rng, len(self.special) + 1
        while len(self.ids) < length:
            sizes = [rng.randint(2, 6) for _ in range(rng.randint(2, 8))]
            chunks = [[rng.randrange(first, self.tokenizer.get_vocab_size()) for _ in range(size)] for size in sizes]
            for weight in (0.0, 1.0):
                for chunk in chunks:
                    self.ids += chunk
                    self.weights += [0.0, *[weight] * (len(chunk) - 1)]
                rng.shuffle(chunks)
            self._special(END)

    def _dialogue(self, length: int) -> None:
        rng, values = self.rng, Values(self.rng, unseen=False)
        if rng.random() < 0.25:
            self._special(SYSTEM)
            self._text(rng.choice(SYSTEM_PROMPTS), 0.0)
            self._special(END)
        facts: dict[str, str] = {}
        pending: list[tasks.Turn] = []
        if length >= 384 and rng.random() < 0.6:
            size = rng.randint(length // 40, length // 17)
            first, *pending = tasks.lookup(rng, values, size, questions=max(4, length // 50))
            self._turn(first)
        while len(self.ids) < length:
            chance = rng.random()
            if pending and rng.random() < 0.5:
                self._turn(pending.pop())
            elif chance < 0.10:
                self._fact(facts, values)
            elif chance < 0.16:
                first, *more = tasks.lookup(rng, values, rng.randint(2, 6), questions=rng.randint(1, 3))
                self._turn(first)
                for turn in more:
                    self._turn(turn)
            else:
                turn = tasks.training_turn(rng)
                if turn.task == "greeting":
                    if "name" in facts:
                        continue
                    facts["name"] = turn.item
                self._turn(turn)

    def _fact(self, facts: dict[str, str], values: Values) -> None:
        """Tell a new fact or ask for a known one."""
        missing = [field for field in FACTS if field not in facts]
        if missing and (not facts or self.rng.random() < 0.35):
            field = self.rng.choice(missing)
            turn, facts[field] = tasks.state_fact(self.rng, values, field)
            while tasks.is_held_out(turn.task, turn.phrasing, turn.item):
                turn, facts[field] = tasks.state_fact(self.rng, values, field)
            self._turn(turn)
            return
        field = self.rng.choice(list(facts))
        turn = tasks.ask_fact_on_side(self.rng, field, facts[field], held_out=False)
        if turn is not None:
            self._turn(turn)

    def row(self, length: int, echo: float = 0.0) -> tuple[list[int], list[float]]:
        """Return the ids and weights of one row of `length` tokens, an echo row with the given odds."""
        self.ids, self.weights = [], []
        if self.rng.random() < echo:
            self._echo(length)
            return self.ids[:length], self.weights[:length]
        if self.rng.random() < 0.3:
            self._special(BEGIN)
        if self.rng.random() < RAW_SHARE:
            self._raw(length)
        else:
            self._dialogue(length)
        return self.ids[:length], self.weights[:length]

    def batch(self, rows: int, length: int, echo: float) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [B, T] and weights [B, T]."""
        drawn = [self.row(length, echo) for _ in range(rows)]
        return np.array([ids for ids, _ in drawn], np.int32), np.array([weights for _, weights in drawn], np.float32)


def loss_fn(params: Params, config: TinyConfig, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weighted mean cross entropy, and the share of full-weight tokens that are predicted right."""
    hidden = forward(params, config, tokens)[:, :-1]
    targets, weights = tokens[:, 1:], weights[:, 1:]
    scores = logits(params, hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    answers = weights == 1.0
    right = jnp.sum((jnp.argmax(scores, axis=-1) == targets) & answers) / jnp.sum(answers)
    return jnp.sum(losses * weights) / jnp.sum(weights), right


def make_optimizer(name: str, scale: float) -> optax.GradientTransformation:
    """Return Muon (matrices) with AdamW (the rest), or AdamW alone, at their peak learning rates."""
    adam = optax.adamw(2e-3 * scale, b1=0.9, b2=0.98, weight_decay=0.02)
    if name == "adamw":
        return optax.chain(optax.clip_by_global_norm(1.0), adam)
    muon = optax.contrib.muon(0.010 * scale, beta=0.95, weight_decay=0.02)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"muon": muon, "adam": adam}, _optimizer_labels),
    )


def learning_rate_factor(step: int, progress: float) -> float:
    """Return the share of the peak learning rate: 50 steps of warm-up, level, then down to zero."""
    return min(1.0, (step + 1) / 50) * min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def _optimizer_labels(params: Params) -> dict[str, str]:
    """Muon trains the matrices between the embedding and the logits."""
    return {name: "muon" if "_proj" in name else "adam" for name in params}


@partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1))
def train_step(params, opt_state, tokens, weights, factor, config: TinyConfig, optimizer):
    """Return the parameters and optimizer state after one step, the loss and the answer accuracy."""
    (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, config, tokens, weights)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    updates = jax.tree.map(lambda update: update * factor, updates)
    return optax.apply_updates(params, updates), opt_state, loss, right


class Budget:
    """How far training is: by steps, or by the clock where `minutes` is given."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        """Start the clock."""
        self.steps = steps
        self.seconds = None if minutes is None else 60 * minutes
        self.started = time.time()

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.time() - self.started

    def progress(self, step: int) -> float:
        """Return the share of training that is done before `step`; at 1.0 it ends."""
        return min(1.0, step / self.steps if self.seconds is None else self.elapsed_s() / self.seconds)


def train(args: argparse.Namespace, make_writer: type[RowWriter] = RowWriter, phases: Sequence[Phase] = PHASES) -> None:
    """Train and save; the log goes to standard output."""
    rng = random.Random(args.seed)
    tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json")) if args.init else build_tokenizer()
    config = TinyConfig(vocab_size=tokenizer.get_vocab_size())
    params = load_model(args.init)[0] if args.init else init_params(config, args.seed)
    optimizer = make_optimizer(args.optimizer, args.lr_scale)
    opt_state = optimizer.init(params)
    save_tokenizer(tokenizer, args.out)
    writer = make_writer(tokenizer, rng)
    budget = Budget(args.steps, args.minutes)
    phases = phases[-1:] if args.init else phases
    step, seen, losses, rights = 0, 0, [], []
    while (progress := budget.progress(step)) < 1.0:
        phase = next(phase for phase in phases if progress <= phase.until)
        rows, length = rng.choices(phase.shapes, phase.odds)[0]
        tokens, weights = writer.batch(rows, length, phase.echo)
        factor = jnp.float32(learning_rate_factor(step, progress))
        params, opt_state, loss, right = train_step(params, opt_state, tokens, weights, factor, config, optimizer)
        step, seen = step + 1, seen + rows * length
        losses.append(float(loss))
        rights.append(float(right))
        if step % args.log_every == 0:
            print(
                f"step {step} ({progress:.1%}) {budget.elapsed_s():.0f}s {seen / 1e6:.2f}M tokens "
                f"loss {np.mean(losses):.3f} answers {np.mean(rights):.3f}",
                flush=True,
            )
            losses, rights = [], []
        if step % args.save_every == 0:
            save_model(params, config, args.out)
    save_model(params, config, args.out)
    print(f"done: {step} steps, {seen} tokens, {budget.elapsed_s():.0f}s, {time.process_time():.0f} CPU seconds")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--minutes", type=float, help="train for this long instead of --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, help="folder of a model to start from, and of its tokenizer")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=250)
    return parser


def main() -> None:
    """Run from the command line."""
    train(parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
