"""The programs of the paper that fork, for a model whose answers mean nothing. Only their shape and lengths matter.

Each has a parallel form, in which all branches start at once, and a serial form, which waits for each branch before the
next. Nothing else differs.
"""

import random
from typing import NamedTuple

import jsg as sgl

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


def passage(seed: int, num_words: int) -> str:
    """A text of random words, which depends only on the seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "."


class Sizes(NamedTuple):
    """The sizes of the programs.

    Attributes:
        passage_words: Words of the text that all branches of a program share.
        thought_tokens: Tokens of each answer.
        depth: Depth of the tree of thought, in which every node has two children.
        num_dimensions: Number of branches of the judge, and of points of the skeleton.
    """

    passage_words: int = 500
    thought_tokens: int = 24
    depth: int = 4
    num_dimensions: int = 6


def thought(name: str, num_tokens: int):
    """A gen of exactly this number of tokens, which takes the likeliest token each time."""
    return sgl.gen(name, max_tokens=num_tokens, temperature=0, ignore_eos=True)


@sgl.function
def tree_of_thought(s, seed, sizes, is_serial):
    """A program of 2 + 4 + ... + 2^depth answers, in which each branch continues the prompt of its parent."""
    s += f"Question {seed}: {passage(seed, sizes.passage_words)}\n"
    level = [s]
    for depth in range(sizes.depth):
        children = []
        for state in level:
            branches = state.fork(2)
            for index, branch in enumerate(branches):
                branch += f"\nStep {depth}, way {index}:" + thought("step", sizes.thought_tokens)
                if is_serial:
                    branch["step"]
                children.append(branch)
        level = children
    return [branch["step"] for branch in level]


@sgl.function
def judge(s, seed, sizes, is_serial):
    """Branch, solve, merge: one branch for each dimension, and a verdict over the answers of the branches."""
    s += f"Article {seed}: {passage(seed, sizes.passage_words)}\n"
    branches = s.fork(sizes.num_dimensions)
    for index, branch in enumerate(branches):
        branch += f"Judge its {WORDS[index]}:" + thought("judgment", sizes.thought_tokens)
        if is_serial:
            branch["judgment"]
    s += "".join(f"\nDimension {index}: {branch['judgment']}" for index, branch in enumerate(branches))
    s += "\nVerdict:" + thought("verdict", 4)
    return s["verdict"]


@sgl.function
def expand(s, seed, sizes, point):
    """Writes out one point of the skeleton. All points of a program have the same examples."""
    s += f"Examples {seed}: {passage(seed, sizes.passage_words)}\n"
    s += f"Write about {point}:" + thought("paragraph", sizes.thought_tokens)


@sgl.function
def skeleton_of_thought(s, seed, sizes, is_serial):
    """Makes an outline, then runs a separate program for each of its points."""
    s += f"List {sizes.num_dimensions} points of {passage(seed, 8)}\n" + thought("skeleton", 8)
    outline = s["skeleton"]
    texts = []
    for index in range(sizes.num_dimensions):
        text = expand(seed, sizes, f"point {index} of {outline}")
        if is_serial:
            text["paragraph"]
        texts.append(text)
    return [text["paragraph"] for text in texts]


PROGRAMS = {"tree of thought": tree_of_thought, "judge": judge, "skeleton": skeleton_of_thought}
