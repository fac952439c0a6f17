"""The running example of the SGLang paper on a model that sees: an essay about a picture is judged.

    python examples/tiny_vision/picture_judge.py

One branch for each dimension, all of which share the picture's tokens; a picture of several things ends it early.
"""

import io

import scenes

import jsg as sgl

DIMENSIONS = ("color", "shape", "place")
SUMMARY = r'\{"color": "[a-z]+", "shape": "[a-z]+", "place": "[a-z ]+"\}'
SHOWN = scenes.Scene((scenes.Shape("blue", "star", cell=2, shade=scenes.COLORS["blue"]),))
ESSAYS = ("I see a blue star in the top right.", "I see a red star in the top right.", "I see a red ring on the left.")


@sgl.function
def judge(s, picture, essay):
    s += sgl.user(sgl.image(picture) + "How many shapes are there?")
    s += sgl.assistant(sgl.select("count", choices=["One.", "Two.", "Three.", "Four."]))
    if s["count"] != "One.":
        return "F", None
    branches = s.fork(len(DIMENSIONS))
    for branch, dimension in zip(branches, DIMENSIONS, strict=True):
        branch += sgl.user(f"Essay: {essay} Compare the {dimension}.")
        branch += sgl.assistant(sgl.gen("compared", max_tokens=24, temperature=0))
    s += sgl.user("Write color, shape and place as JSON.")
    s += sgl.assistant(sgl.gen("summary", max_tokens=48, temperature=0, regex=SUMMARY))
    branches.join()  # the answers become a list
    return "ABCD"[sum(not agrees(answer) for answer in s["compared"])], s["summary"]


def agrees(answer: str) -> bool:
    """Whether "Essay: red. Picture: blue." has the same on both sides; an answer of another form has not."""
    told, between, seen = answer.removeprefix("Essay: ").partition(" Picture: ")
    return bool(between) and told == seen


def main() -> None:
    picture = io.BytesIO()
    scenes.draw(SHOWN, side=180).save(picture, "PNG")
    for essay in ESSAYS:
        state = judge.run(picture.getvalue(), essay)
        print(essay, "->", *state.ret_value)
        print("   ", *state["compared"])


if __name__ == "__main__":
    with sgl.Engine("tiny-vision") as engine:
        sgl.set_default_backend(engine)
        main()
