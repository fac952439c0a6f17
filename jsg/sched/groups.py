"""Groups: decoding requests with a long prefix in common, whose keys and values a step may read once for several.

Requests whose locks are below one node of the radix tree share the pages of the path to that node.

    root ──[system prompt: 1000 tokens]──▶ ● ──[document: 3000 tokens]──▶ ● 20 requests
                                           └── 9 requests                 depth 4000

A group of n requests at depth d is cut into tiles of `GROUP_TILE` requests. Each tile reads the d tokens once, so the
group saves (n - ceil(n / GROUP_TILE)) * d reads of a token. The partition is found from the leaves to the root. Each
node inherits the groups below it, and the requests below it that are in no group. It may make one group of these
requests and of the members of some of those groups, which are dissolved for it. It dissolves the groups that save least
for each request, and as many of them as saves most.

If prefixes are not nested, no partition saves more. If they are nested, another may, since a group is dissolved only as
a whole, in one order, and for good. Over the random trees of `tests/sched/test_groups.py`, this saves 99.8 % of what
the best partition saves on average, and 84 % in the worst case that was seen.
"""

import dataclasses
from collections.abc import Sequence

from jsg.cache.node import Node
from jsg.kernels_pallas.tile import GROUP_TILE, MIN_GROUP, MIN_SHARED_TOKENS
from jsg.sched.batch import PrefixGroup
from jsg.sched.request import Placement


class PrefixGrouping:
    """Keeps the groups until other requests decode than in the step before.

    While a request decodes, its lock stays at its node. A split above that node changes neither which requests share a
    prefix nor its length. So the same requests in the same order have the same groups.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._places: list[Placement] = []
        self._groups: tuple[PrefixGroup, ...] = ()

    def update(self, places: list[Placement]) -> tuple[PrefixGroup, ...]:
        """The groups of the requests that decode in this step, given in the order of its entries."""
        if places != self._places:
            self._places, self._groups = places, find_groups(places, self._page_size)
        return self._groups


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
    """Requests that read `num_pages` together, and how many reads of a page that saves."""

    members: list[int]
    num_pages: int
    num_saved: int


@dataclasses.dataclass(slots=True, eq=False)
class _Prefix:
    """A node that may be worth a group.

    Attributes:
        num_pages: Pages from the root to here.
        parent: The next such node above; None if its prefix is too short.
        members: The requests here or below that are in no group yet.
        groups: The groups here or below; no request is in two of them.
    """

    num_pages: int
    parent: "_Prefix | None" = None
    members: list[int] = dataclasses.field(default_factory=list)
    groups: list[_Group] = dataclasses.field(default_factory=list)


def find_groups(places: Sequence[Placement], page_size: int) -> tuple[PrefixGroup, ...]:
    """The partition into groups. Members are indices of `places`; groups are in the order of their first members.

    Args:
        places: Of requests that decode. Each has at least one token more than the radix tree has of it.
        page_size: Tokens in one page.
    """
    min_pages = -(-MIN_SHARED_TOKENS // page_size)
    prefixes = _candidates(places, min_pages)
    groups: list[_Group] = []
    for prefix in sorted(prefixes, key=lambda prefix: -prefix.num_pages):  # all that is below a node comes before it
        _regroup(prefix)
        if prefix.parent is None:
            groups += prefix.groups
        else:
            prefix.parent.members += prefix.members
            prefix.parent.groups += prefix.groups
    groups.sort(key=lambda group: group.members[0])
    return tuple(PrefixGroup(tuple(group.members), group.num_pages * page_size) for group in groups)


def _candidates(places: Sequence[Placement], min_pages: int) -> list[_Prefix]:
    """The nodes with enough locks and tokens for a group. Each request is a member of the deepest one on its path.

    Every request has one lock, so a node with fewer than `MIN_GROUP` locks cannot have as many members. Some locks may
    be those of holds and of prompts that prefill, so the members are counted later.
    """
    prefixes: dict[Node, _Prefix] = {}
    for index, place in enumerate(places):
        node, num_pages = place.leading_lock.node, place.num_leading_pages
        while num_pages >= min_pages and node.num_locks < MIN_GROUP:
            num_pages -= node.num_pages
            node = _parent(node)
        if num_pages >= min_pages:
            prefix = prefixes.get(node) or _add_path(prefixes, node, num_pages, min_pages)
            prefix.members.append(index)
    return list(prefixes.values())


def _add_path(prefixes: dict[Node, _Prefix], node: Node, num_pages: int, min_pages: int) -> _Prefix:
    """Adds `node` and the nodes above it that are long enough and were not added yet."""
    added = below = prefixes[node] = _Prefix(num_pages)
    while (num_pages := num_pages - node.num_pages) >= min_pages:
        node = _parent(node)
        above = prefixes.get(node)
        if above is not None:
            below.parent = above
            break
        below.parent = below = prefixes[node] = _Prefix(num_pages)
    return added


def _regroup(prefix: _Prefix) -> None:
    """Makes a group at a node if that saves more than the groups that are dissolved for it."""
    groups = sorted(prefix.groups, key=lambda group: group.num_saved / len(group.members))
    num_members, num_lost = len(prefix.members), 0
    best, num_joining = 0, 0
    for count in range(len(groups) + 1):
        if count:
            num_members += len(groups[count - 1].members)
            num_lost += groups[count - 1].num_saved
        gain = _num_shared(num_members) * prefix.num_pages - num_lost
        if gain > best:
            best, num_joining = gain, count
    if not best:
        return
    members = sorted(prefix.members + [member for group in groups[:num_joining] for member in group.members])
    whole = len(members) - (len(members) % GROUP_TILE == 1)  # alone in a tile, a request saves nothing
    prefix.members = members[whole:]
    num_saved = _num_shared(whole) * prefix.num_pages
    prefix.groups = [*groups[num_joining:], _Group(members[:whole], prefix.num_pages, num_saved)]


def _num_shared(num_members: int) -> int:
    """How many members of a group need not read what it shares."""
    return num_members - -(-num_members // GROUP_TILE) if num_members >= MIN_GROUP else 0


def _parent(node: Node) -> Node:
    assert node.parent is not None, "a path has as many pages as its lock says"
    return node.parent
