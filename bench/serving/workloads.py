"""What is asked: sessions of one turn or several, decided by a seed and by nothing else.

Prompts are words, so that no tokenizer is needed: the same words go to every server, and how many tokens they are is
what the server says. Or they are token ids below a vocabulary's size, for servers that take ids.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

from bench.serving.dialects import Prompt, joined

# Words that common vocabularies have as one token with the blank before them.
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
    """One request of a session: what it adds to what was said before, and how many tokens it wants.

    Attributes:
        text: New part of the prompt.
        approximate_len: Of the new part, in tokens as the workload means it.
        max_tokens: Of the answer.
    """

    text: Prompt
    approximate_len: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each follows the answer to the one before.

    Attributes:
        group: Sessions of one group share their first tokens.
        turns: At least one.
    """

    group: int
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The knobs of a workload. Lengths are in tokens, as near as words can be.

    Attributes:
        groups: Shared prefixes; of a tree, its roots.
        shared_len: Tokens that a group shares; of a tree, from the root to a leaf.
        unique_len: Tokens that a request (a turn) has for itself.
        output_len: Tokens of each answer.
        turns: Of a conversation.
        depth, branching: Of the tree.
        input_mean, input_sigma, output_mean, output_sigma: Log-normal lengths: the mean in tokens, and the standard
            deviation of the logarithm.
        max_input_len, max_output_len: Longer ones are cut to this.
        range_ratio: Random lengths are uniform from this fraction of the length to the length; 1 for all the same.
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
        """Words, or with a vocabulary ids.

        Args:
            vocab_size: Ids are below it, and not among the first `FIRST_ID`, where special tokens are.
            tokens_per_word: What a word is on average.
        """
        self._vocab_size = vocab_size
        self._tokens_per_word = tokens_per_word

    def write(self, rng: random.Random, num_tokens: int) -> Prompt:
        """So many tokens; ends with a blank where it is text, so that parts can be put together."""
        if self._vocab_size is not None:
            return tuple(rng.choices(range(min(FIRST_ID, self._vocab_size - 1), self._vocab_size), k=num_tokens))
        words = rng.choices(WORDS, k=max(1, round(num_tokens / self._tokens_per_word)))
        return " ".join(words) + " "


FIRST_ID = 300


def shared_prefix(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """A system prompt for each group, and a question of its own for each request."""
    prefixes = [writer.write(_rng(seed, f"prefix {group}"), shape.shared_len) for group in range(shape.groups)]
    choices = random.Random(seed)
    for index in _forever():
        group = choices.randrange(shape.groups)
        own = writer.write(_rng(seed, index), shape.unique_len)
        prompt = joined([prefixes[group], own])
        yield Session(group, (Turn(prompt, shape.shared_len + shape.unique_len, shape.output_len),))


def multi_turn(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Conversations under shared system prompts. Each turn carries everything said before, the server's answers too."""
    prefixes = [writer.write(_rng(seed, f"prefix {group}"), shape.shared_len) for group in range(shape.groups)]
    choices = random.Random(seed)
    for index in _forever():
        group, rng = choices.randrange(shape.groups), _rng(seed, index)
        questions = [writer.write(rng, shape.unique_len) for _ in range(shape.turns)]
        first = Turn(joined([prefixes[group], questions[0]]), shape.shared_len + shape.unique_len, shape.output_len)
        rest = [Turn(question, shape.unique_len, shape.output_len) for question in questions[1:]]
        yield Session(group, (first, *rest))


def tree(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Paths from a root to a leaf, as few-shot examples and searches share them: each level adds its part."""
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
    """Lengths like those of ShareGPT conversations, nothing shared.

    Log-normal. The means, 161 and 338 tokens, are those that the vLLM paper (Kwon et al., 2023) gives for ShareGPT
    with OPT's tokenizer; the spreads are this file's choice, and cutting the tails lowers the means. It is no replay
    of the data set, and figures of the two must not be compared.
    """
    lengths = random.Random(seed)
    for index in _forever():
        input_len = _log_normal(lengths, shape.input_mean, shape.input_sigma, shape.max_input_len)
        output_len = _log_normal(lengths, shape.output_mean, shape.output_sigma, shape.max_output_len)
        yield Session(index, (Turn(writer.write(_rng(seed, index), input_len), input_len, output_len),))


def random_lengths(shape: Shape, writer: Writer, seed: int) -> Iterator[Session]:
    """Unique prompts; lengths are uniform between a fraction of `unique_len` and `output_len` and all of them."""
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
    """A length whose logarithm is normal and whose mean, before it is cut, is `mean`."""
    mu = math.log(mean) - sigma**2 / 2
    return max(1, min(largest, round(rng.lognormvariate(mu, sigma))))


def _rng(seed: int, part: object) -> random.Random:
    """For one part of a workload: a request by its number, a prefix by its name. No two parts and seeds share one."""
    return random.Random(f"{seed}:{part}")  # a text, for Python takes -1 and 1 for the same seed


def _forever() -> Iterator[int]:
    index = 0
    while True:
        yield index
        index += 1
