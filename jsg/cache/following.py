"""Which tokens follow a text in the radix tree: those that came next when the same text was seen before."""

import itertools

import numpy as np

from jsg.cache.node import INT_BYTES, Node

MOST_BRANCHES = 64
"""So many branches of a node are compared, the newest ones."""


def following(node: Node, rest: np.ndarray, most: int, page_size: int) -> list[int]:
    """At most `most` tokens that the tree has after a text; none where it has no more of it.

    Where the tree branches, the branch counts that was used last. Nothing is marked as used.

    Args:
        node: The end of the first part of the text, which some lock protects.
        rest: int32, the tokens of the text after it.
        most: Tokens wanted.
        page_size: Tokens in a page of the tree.
    """
    key, end, page_bytes = rest.tobytes(), 0, page_size * INT_BYTES
    found, num_bytes = list[bytes](), 0
    while num_bytes < most * INT_BYTES and (child := _child(node, key[end : end + page_bytes], page_bytes)) is not None:
        here = min(len(key) - end, len(child.tokens))
        if not child.tokens.startswith(key[end : end + here]):
            break
        found.append(child.tokens[here:])
        num_bytes += len(child.tokens) - here
        end, node = end + here, child
    return np.frombuffer(b"".join(found), np.int32, min(most, num_bytes // INT_BYTES)).tolist()


def _child(node: Node, first: bytes, page_bytes: int) -> Node | None:
    """The child whose edge begins with this page, or with this part of one; of several the one that was used last."""
    if len(first) == page_bytes:
        return node.children.get(first)
    newest = itertools.islice(reversed(node.children.items()), MOST_BRANCHES)
    fitting = (child for page, child in newest if page.startswith(first))
    return max(fitting, key=lambda child: (child.last_used, child.serial), default=None)
