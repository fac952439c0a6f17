"""The running example of the SGLang paper: an essay about a picture is judged, one branch for each dimension.

Early exit by `select`, parallel branches by `fork`, and a summary whose form a regex decides. The questions are
those that the embedded model can answer. It sees no pictures, so a text stands in for one; with a model that does, give
`sgl.image(path)` as the picture, as in `tiny_vision/picture_judge.py`.
"""

import common

import jsg as sgl

CITIES = ["Oslo", "Rome", "Cairo", "Lima"]
DIMENSIONS = {"color": "Which color do I like?", "thing": "What did I buy?", "name": "What is my name?"}
SUMMARY = r'\{"name": "[A-Za-z]+", "city": "[A-Za-z]+", "color": "[a-z]+"\}'
PICTURE = "city: Oslo\ncolor: red\nthing: lamp"
SHOWN = {"city": "Oslo", "color": "red", "thing": "lamp", "name": "Nina"}
ESSAY = "My name is Nina. I live in Oslo. My favorite color is red. I bought a lamp."


@sgl.function
def judge(s, picture, shown, essay):
    s += sgl.user(picture) + sgl.assistant("OK.")
    s += sgl.user(essay) + sgl.assistant("OK.")
    s += sgl.user("Which city do I live in?")
    s += sgl.assistant("You live in " + sgl.select("city", choices=CITIES))
    if s["city"] != shown["city"]:  # not about this picture: nothing more is asked
        return "F", None
    branches = s.fork(len(DIMENSIONS))
    for branch, question in zip(branches, DIMENSIONS.values(), strict=True):
        branch += sgl.user(question)
        branch += sgl.assistant(sgl.gen("judgment", max_tokens=24, temperature=0))
    s += sgl.user(f"{essay} Extract name, city and color as JSON.")
    s += sgl.assistant(sgl.gen("summary", max_tokens=64, temperature=0, regex=SUMMARY))
    branches.join()  # the judgments become a list
    misses = [name for name, told in zip(DIMENSIONS, s["judgment"], strict=True) if shown[name] not in told]
    return "ABCD"[len(misses)], s["summary"]


def main() -> None:
    state = judge.run(PICTURE, SHOWN, ESSAY)
    print("judgments:", *state["judgment"])
    print("grade and summary:", *state.ret_value)
    print("of another city:", *judge.run(PICTURE, SHOWN, ESSAY.replace("Oslo", "Rome")).ret_value)


if __name__ == "__main__":
    common.run(main)
