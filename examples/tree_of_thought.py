"""Tree of thought: from each state try every next step at once, keep the best few, and go on from them.

The task: choose numbers, one after another, that sum up to a target. The model adds; the search is plain Python.
A branch continues its parent's conversation, whose tokens are in the cache.
"""

import common

import jsg as sgl

NUMBERS, TARGET, BREADTH, DEPTH = (4, 7, 9), 20, 2, 4


@sgl.function
def search(s):
    s += sgl.system("You are a helpful assistant.")
    frontier = [(s, 0, ())]
    for _ in range(DEPTH):
        thoughts = []
        for state, total, path in frontier:
            for branch, number in zip(state.fork(len(NUMBERS)), NUMBERS, strict=True):
                branch += sgl.user(f"What is {total} + {number}?")
                branch += sgl.assistant(f"{total} + {number} = " + sgl.gen_int("total", max_tokens=4, temperature=0))
                thoughts.append((branch, (*path, number)))  # nothing has waited so far: all of them run
        valued = [(branch, int(branch["total"]), path) for branch, path in thoughts]
        frontier = sorted(valued, key=lambda thought: abs(TARGET - thought[1]))[:BREADTH]
        _, total, path = frontier[0]
        if total == TARGET:
            return path
    return None


def main() -> None:
    state = search.run()
    print(f"{TARGET} =", " + ".join(map(str, state.ret_value)) if state.ret_value else "?")


if __name__ == "__main__":
    common.run(main)
