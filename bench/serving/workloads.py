"""The workloads: sessions of one or more turns, which depend only on a seed.

Prompts are words, so that no tokenizer is needed. The same words go to every server, and the server counts their
tokens. For servers that take token ids, prompts may also be ids below the vocabulary's size.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

from bench.serving.dialects import Prompt, joined

# Words that are one token, together with the blank before them, in common vocabularies.
WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away "
    "again off went old number great tell men say small every found still between name should home big give air line "
    "set own under read last never us left end along while might next sound below saw something thought both few those "
    "always looked show large often together asked house world going want school important until form food keep"
).split()


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        text: What it adds to the conversation.
        approximate_len: About the number of tokens of `text`.
        max_tokens: The most tokens of the answer.
    """

    text: Prompt
    approximate_len: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """Requests that are sent one after another, each after the answer to the request before.

    Attributes:
        group: The group of the session. Sessions of one group share their first tokens.
        turns: The requests; at least one.
    """

    group: int
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The options of a workload. Lengths are in tokens, which words meet only approximately.

    Attributes:
        groups: Number of shared prefixes; for a tree, of its roots.
        shared_len: Tokens that a group shares; for a tree, from the root to a leaf.
        unique_len: Tokens that only one request or turn has.
        output_len: Tokens of each answer.
        turns: Turns of a conversation.
        depth, branching: Depth of the tree, and children of each of its nodes.
        input_mean, input_sigma, output_mean, output_sigma: Log-normal lengths: the mean in tokens, and the standard
            deviation of the logarithm.
        max_input_len, max_output_len: Longer lengths are cut to this.
        range_ratio: Random lengths are uniform from this fraction of the length to the length; with 1 all are equal.
    """

    groups: int = 8
    shared_len: int = 512
    unique_len: int = 64
    output_len: int = 128
    turns: int = 4
    depth: int = 3
    branching: int = 4
    input_mean: float = 161.0
    input_sigma: float = 1.3
    output_mean: float = 338.0
    output_sigma: float = 0.9
    max_input_len: int = 1024
    max_output_len: int = 1024
    range_ratio: float = 1.0


class Writer:
    """Makes prompts of a length in tokens, as words or as ids."""

    def __init__(self, *, vocab_size: int | None = None, tokens_per_word: float = 1.0):
        """Makes a writer of words or, with a vocabulary, of ids.

        Args:
            vocab_size: Ids are below it. They are at least `FIRST_ID`, because special tokens come first.
            tokens_per_word: The mean number of tokens of a word.
        """
        self._vocab_size = vocab_size
        self._tokens_per_word = tokens_per_word

    def write(self, rng: random.Random, num_tokens: int) -> Prompt:
        """A prompt part of this number of tokens. Text ends with a blank, so that parts can be joined."""
        if self._vocab_size is not None:
            return tuple(rng.choices(range(min(FIRST_ID, self._vocab_size - 1), self._vocab_size), k=num_tokens))
        words = rng.choices(WORDS, k=max(1, round(num_tokens / self._tokens_per_word)))
        return " ".join(words) + " "


FIRST_ID = 300


def shared_prefix(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """A system prompt for each group, and a different question for each request."""
    prefixes = [writer.write(_rng(seed, f"prefix {group}"), shape.shared_len) for group in range(shape.groups)]
    choices = random.Random(seed)
    for index in _forever():
        group = choices.randrange(shape.groups)
        own = writer.write(_rng(seed, index), shape.unique_len)
        prompt = joined([prefixes[group], own])
        yield Session(group, (Turn(prompt, shape.shared_len + shape.unique_len, shape.output_len),))


def multi_turn(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Conversations with shared system prompts. Each turn sends the whole conversation, with the server's answers."""
    prefixes = [writer.write(_rng(seed, f"prefix {group}"), shape.shared_len) for group in range(shape.groups)]
    choices = random.Random(seed)
    for index in _forever():
        group, rng = choices.randrange(shape.groups), _rng(seed, index)
        questions = [writer.write(rng, shape.unique_len) for _ in range(shape.turns)]
        first = Turn(joined([prefixes[group], questions[0]]), shape.shared_len + shape.unique_len, shape.output_len)
        rest = [Turn(question, shape.unique_len, shape.output_len) for question in questions[1:]]
        yield Session(group, (first, *rest))


def tree(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Prompts that are paths of a tree, as with few-shot examples and searches. Each level adds a part."""
    step = max(1, shape.shared_len // shape.depth)
    parts: dict[tuple[int, ...], Prompt] = {}
    choices = random.Random(seed)
    for index in _forever():
        path = (choices.randrange(shape.groups), *(choices.randrange(shape.branching) for _ in range(shape.depth - 1)))
        for end in range(1, shape.depth + 1):
            if path[:end] not in parts:
                parts[path[:end]] = writer.write(_rng(seed, path[:end]), step)
        own = writer.write(_rng(seed, index), shape.unique_len)
        prompt = joined([*(parts[path[:end]] for end in range(1, shape.depth + 1)), own])
        yield Session(path[0], (Turn(prompt, step * shape.depth + shape.unique_len, shape.output_len),))


def sharegpt(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Lengths like those of ShareGPT conversations, with nothing shared.

    The lengths are log-normal. Their means, 161 and 338 tokens, are those that the vLLM paper (Kwon et al., 2023) gives
    for ShareGPT with OPT's tokenizer. The spreads are this file's choice, and cutting the tails lowers the means. This
    is no replay of the data set, so figures must not be compared with those of a replay.
    """
    lengths = random.Random(seed)
    for index in _forever():
        input_len = _log_normal(lengths, shape.input_mean, shape.input_sigma, shape.max_input_len)
        output_len = _log_normal(lengths, shape.output_mean, shape.output_sigma, shape.max_output_len)
        yield Session(index, (Turn(writer.write(_rng(seed, index), input_len), input_len, output_len),))


def random_lengths(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Unique prompts. Lengths are uniform between a fraction of `unique_len` and `output_len` and the full length."""
    lengths = random.Random(seed)
    for index in _forever():
        input_len = lengths.randint(max(1, math.ceil(shape.unique_len * shape.range_ratio)), shape.unique_len)
        output_len = lengths.randint(max(1, math.ceil(shape.output_len * shape.range_ratio)), shape.output_len)
        yield Session(index, (Turn(writer.write(_rng(seed, index), input_len), input_len, output_len),))


WORKLOADS: dict[str, Callable[[Shape, Writer, int], Iterator[Session]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "tree": tree,
    "sharegpt": sharegpt,
    "random": random_lengths,
}


def _log_normal(rng: random.Random, mean: float, sigma: float, largest: int) -> int:
    """A log-normal length with this mean, which is then cut to its limit."""
    mu = math.log(mean) - sigma**2 / 2
    return max(1, min(largest, round(rng.lognormvariate(mu, sigma))))


def _rng(seed: int, part: object) -> random.Random:
    """A generator for one part of a workload, such as a request or a prefix; each part and seed has its own."""
    return random.Random(f"{seed}:{part}")  # a text, because Python treats -1 and 1 as the same seed


def _forever() -> Iterator[int]:
    index = 0
    while True:
        yield index
        index += 1
