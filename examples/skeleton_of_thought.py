"""Skeleton of thought: first the points of an answer, then every point written out, all at the same time.

`expand` is a function called from another: it is a conversation of its own, and three of them run side by side.
"""

import common

import jsg as sgl


@sgl.function
def expand(s, point):
    s += sgl.user(f"What is the capital of {point}?")
    s += sgl.assistant(sgl.gen("paragraph", max_tokens=24, temperature=0))


@sgl.function
def travel_guide(s, wish):
    s += sgl.user(f"Repeat: {wish}")
    s += sgl.assistant(sgl.gen("skeleton", max_tokens=24, temperature=0, regex="[A-Z][a-z]+( [A-Z][a-z]+){0,5}"))
    points = s["skeleton"].split()
    paragraphs = [expand(point) for point in points]
    return "\n".join(f"{point}. {text['paragraph']}" for point, text in zip(points, paragraphs, strict=True))


def main() -> None:
    print(travel_guide.run("France Japan Kenya").ret_value)


if __name__ == "__main__":
    common.run(main)
