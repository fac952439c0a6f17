"""What the front can know of engines' radix trees from the requests that it sends, or from what the engines tell it.

A prompt is cut into blocks. The name of a block is a digest of its tokens and of everything before them, so two prompts
share a name exactly where they share a prefix. Everything that is part of the tree's keys is part of the digest too:
the namespace, a position that is not the token's index, the words of an image (`sched/positions.py`).
"""

import dataclasses
import hashlib
import itertools
import operator
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from jsg.types import Request

BLOCK_TOKENS = 32
"""A shared prefix that is shorter than a block is not noticed. Computing it takes less than a step."""
DIGEST_BYTES = 16

Chain = tuple[bytes, ...]
"""Digests of successive blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixPath:
    """The blocks of a request's prompt in a radix tree.

    Attributes:
        stem: The whole blocks of its tokens; for a joined prompt, those that all its branches have in common.
        branches: For each branch of a joined prompt, the blocks behind the stem.
        behind: The blocks of what follows the branches. It sees all of them, so in the tree it is a path of its own.
    """

    stem: Chain
    branches: tuple[Chain, ...] = ()
    behind: Chain = ()

    @property
    def others(self) -> tuple[Chain, ...]:
        """All chains but the stem, those that the engine can do without first."""
        return self.behind, *self.branches


@final
class BlockHolders:
    """Which engines know a block: a bit for each engine, so that one look-up answers for all of them.

    Invariant: an engine's bit of a block is set exactly if the engine's `PrefixIndex` knows the block.
    """

    def __init__(self, num_engines: int) -> None:
        """Makes an empty table for engines that are numbered from 0."""
        self._masks: dict[bytes, int] = {}
        self._num_engines = num_engines

    def add(self, block: bytes, engine: int) -> None:
        """Notes that an engine knows a block."""
        self._masks[block] = self._masks.get(block, 0) | 1 << engine

    def discard(self, block: bytes, engine: int) -> None:
        """Notes that an engine does not know a block."""
        if mask := self._masks.get(block, 0) & ~(1 << engine):
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)

    def match(self, path: PrefixPath) -> np.ndarray:
        """int64 [engines]: how many blocks of a path each engine knows."""
        matched = self._match_chain(path.stem)
        for chain in path.others:
            if chain:
                matched += self._match_chain(chain) * (matched >= len(path.stem))
        return matched

    def _match_chain(self, chain: Chain) -> np.ndarray:
        """int64 [engines]: the sum of their bits, as no engine counts behind the first block that it does not know."""
        matched = np.zeros(self._num_engines, np.int64)
        masks = itertools.accumulate((self._masks.get(block, 0) for block in chain), operator.and_)
        for mask, run in itertools.groupby(masks):
            if not mask:
                break
            matched += sum(1 for _ in run) * self._bits(mask)
        return matched

    def _bits(self, mask: int) -> np.ndarray:
        """int64 [engines]: 0 or 1 for each."""
        octets = np.frombuffer(mask.to_bytes(-(-self._num_engines // 8), "little"), np.uint8)
        return np.unpackbits(octets, count=self._num_engines, bitorder="little").astype(np.int64)


@final
class PrefixIndex:
    """The blocks that one engine has computed or is about to compute. It drops the least recently used ones.

    The blocks of a hold are known as long as the hold lasts, because an engine evicts nothing of it. A block that the
    engine itself has said to be stored is known until the engine says that it was removed.

    Invariants: there are at most `max_blocks`, not counting those that are held or stored. A block was used no later
    than the block before it in its prompt, so it is dropped first. So the known blocks of a chain are its beginning, as
    long as the engine says the same of what it has removed; what is behind a gap is not matched.
    """

    def __init__(self, max_blocks: int, holders: BlockHolders | None = None, engine: int = 0) -> None:
        """Makes an empty index.

        Args:
            max_blocks: As many blocks as the engine's KV pool holds.
            holders: A table that is to show which blocks this index knows, beside those of other engines.
            engine: The engine's number in the table.
        """
        self._max_blocks = max_blocks
        self._times: OrderedDict[bytes, int] = OrderedDict()  # when each was last used, oldest first
        self._held: Counter[bytes] = Counter()
        self._stored: set[bytes] = set()
        self._now = 0
        self._holders = holders or BlockHolders(engine + 1)
        self._engine = engine

    def __len__(self) -> int:
        return len(self._times)

    def match(self, path: PrefixPath) -> int:
        """How many blocks of a path are known. Changes nothing."""
        return int(self._holders.match(path)[self._engine])

    def times(self, path: PrefixPath) -> list[int]:
        """When each known block of the stem was last used; 0 where it is only held or stored."""
        return [self._times.get(block, 0) for block in itertools.takewhile(self._knows, path.stem)]

    def use(self, path: PrefixPath) -> int:
        """Notes that the engine has or will have all blocks of a path. Returns the time, above all earlier ones."""
        self._now += 1
        for chain in (*path.others, path.stem):
            for block in reversed(chain):
                if block not in self._times:
                    self._holders.add(block, self._engine)
                self._times[block] = self._now
                self._times.move_to_end(block)
        while len(self._times) > self._max_blocks:
            self._drop_oldest()
        return self._now

    def undo(self, path: PrefixPath, time: int, num_known: int) -> None:
        """Forgets the blocks that a call of `use` made known, unless they were used again since.

        Args:
            path: The path that was noted.
            time: The time that `use` returned.
            num_known: Blocks of its stem that were known before. If the whole stem was, the other chains are kept,
                because nothing says which of them were known.
        """
        chains = (path.stem[num_known:], *path.others) if num_known < len(path.stem) else ()
        for block in itertools.chain.from_iterable(chains):
            if self._times.get(block) == time:
                del self._times[block]
                self._note_loss(block)

    def hold(self, path: PrefixPath) -> None:
        """Keeps the blocks of a path known until `release` was called as often as this."""
        for block in itertools.chain(path.stem, *path.others):
            self._held[block] += 1
            self._holders.add(block, self._engine)

    def release(self, path: PrefixPath) -> None:
        """Ends one hold of a path."""
        for block in itertools.chain(path.stem, *path.others):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._note_loss(block)

    def store(self, blocks: Iterable[bytes]) -> None:
        """Notes that the engine has said that its cache has these blocks."""
        for block in blocks:
            self._stored.add(block)
            self._holders.add(block, self._engine)

    def remove(self, blocks: Iterable[bytes]) -> None:
        """Notes that the engine has said that its cache has dropped these blocks."""
        for block in blocks:
            self._stored.discard(block)
            self._times.pop(block, None)
            self._note_loss(block)

    def forget_until(self, time: int) -> None:
        """Forgets every block that was last used at that time or earlier and is neither held nor stored."""
        while self._times and next(iter(self._times.values())) <= time:
            self._drop_oldest()

    def clear(self) -> None:
        """Forgets every block that is not held."""
        self.remove([*self._times, *self._stored])

    def _drop_oldest(self) -> None:
        self._note_loss(self._times.popitem(last=False)[0])

    def _note_loss(self, block: bytes) -> None:
        """Tells the table that a block is no longer known, if it is not known in another way."""
        if not self._knows(block):
            self._holders.discard(block, self._engine)

    def _knows(self, block: bytes) -> bool:
        return block in self._times or block in self._held or block in self._stored


def prefix_path(request: Request) -> PrefixPath:
    """The blocks of a request's prompt. Takes about 1 µs for each block of 32 tokens."""
    root = _root(request)
    if not request.joined:
        return PrefixPath(_chain(root, *_row(request, (), 0)))
    tokens, jumps = request.input_ids.array, _jumps(request, len(request.input_ids))
    num_prefix = request.joined[0]
    stem = _chain(root, tokens[:num_prefix].tobytes(), _shifts(jumps[:num_prefix]))
    start = len(stem) * BLOCK_TOKENS
    last = stem[-1] if stem else root
    branches = []
    for low, high in itertools.pairwise(request.joined):
        path = np.concatenate([tokens[start:num_prefix], tokens[low:high]])
        shifts = np.cumsum(np.concatenate([jumps[:num_prefix], jumps[low:high]]))[start:]
        branches.append(_chain(last, path.tobytes(), shifts if shifts.any() else None))
    return PrefixPath(stem, tuple(branches), _behind(request, ()))


def answered_path(request: Request, path: PrefixPath, output_ids: Sequence[int]) -> PrefixPath:
    """The path of a prompt and its answer without its last token, which never ran."""
    if len(output_ids) < 2:
        return path
    if request.joined:
        return dataclasses.replace(path, behind=_behind(request, output_ids[:-1]))
    start = len(path.stem) * BLOCK_TOKENS
    last = path.stem[-1] if path.stem else _root(request)
    return PrefixPath(path.stem + _chain(last, *_row(request, output_ids[:-1], start)))


def _root(request: Request) -> bytes:
    return _digest(request.namespace.encode(errors="surrogatepass"))


def _behind(request: Request, output_ids: Sequence[int]) -> Chain:
    """The blocks behind the branches of a joined prompt, whose names depend on all tokens and positions before them."""
    last = request.joined[-1]
    jumps = [jump for jump in request.position_jumps if jump[0] < last]
    before = request.input_ids.array[:last].tobytes()
    root = _digest(_root(request) + repr((request.joined, jumps)).encode() + before)
    return _chain(root, *_row(request, output_ids, last))


def _row(request: Request, output_ids: Sequence[int], start: int) -> tuple[bytes, np.ndarray | None]:
    """The tree's keys of the tokens from `start` on, 4 bytes each, and how far their positions exceed their indices."""
    tokens = array("i", request.input_ids.array[start:].tobytes())
    tokens.extend(output_ids)
    for item in request.media:
        if item.end > start:
            low = max(item.start, start)
            tokens[low - start : item.end - start] = array("i", item.words[low - item.start :].tobytes())
    if not request.position_jumps:
        return tokens.tobytes(), None
    shifts = _shifts(_jumps(request, start + len(tokens)))
    return tokens.tobytes(), None if shifts is None else shifts[start:]


def _jumps(request: Request, size: int) -> np.ndarray:
    """int64 [size]: by how much the position jumps at each token."""
    jumps = np.zeros(size, np.int64)
    for index, extra in request.position_jumps:
        if index < size:  # the last jump may be at a token that does not exist yet
            jumps[index] = extra
    return jumps


def _shifts(jumps: np.ndarray) -> np.ndarray | None:
    return np.cumsum(jumps) if jumps.any() else None


def _chain(root: bytes, tokens: bytes, shifts: np.ndarray | None) -> Chain:
    """Digests of the whole blocks of tokens that follow the prefix with the digest `root`."""
    size, block, chain = BLOCK_TOKENS * 4, root, []
    for index, start in enumerate(range(0, len(tokens) - size + 1, size)):
        content = tokens[start : start + size]
        if shifts is not None and (moved := shifts[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]).any():
            content += moved.tobytes()
        block = _digest(block + content)
        chain.append(block)
    return tuple(chain)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
