"""A model as judge: two pupils answer the same questions, and the judge says which answer it believes, and how much.

Branch, solve, merge: each question is a branch of its own, `select` gives calibrated probabilities, and the merge is a
table of points. No answer of the judge has to be parsed, because it can only be one of the two.
"""

import common

import jsg as sgl

QUESTIONS = {
    "geography": "What is the capital of Japan?",
    "arithmetic": "What is 7 + 8?",
    "counting": "Count from 3 to 6.",
    "manners": "Thank you very much!",
}
ANSWERS = {
    "Anna": ["The capital of Japan is Tokyo.", "7 + 8 = 15", "3, 4, 6", "You are welcome!"],
    "Ben": ["The capital of Japan is Kyoto.", "7 + 8 = 16", "3, 4, 5, 6", "Hello, Ben! How can I help you?"],
}


@sgl.function
def judge(s, answers):
    s += sgl.system("You are a helpful assistant.")
    branches = s.fork(len(QUESTIONS))
    for branch, question, pair in zip(branches, QUESTIONS.values(), zip(*answers.values(), strict=True), strict=True):
        branch += sgl.user(question)
        branch += sgl.assistant(sgl.select("believed", choices=list(pair)))
    report = {}
    for branch, topic in zip(branches, QUESTIONS, strict=True):
        report[topic] = dict(zip(answers, branch.get_meta_info("believed")["probabilities"], strict=True))
    return report


def main() -> None:
    report = judge.run(ANSWERS).ret_value
    for topic, beliefs in report.items():
        print(f"{topic:>10}:", ", ".join(f"{pupil} {belief:.3f}" for pupil, belief in beliefs.items()))
    points = {pupil: sum(beliefs[pupil] for beliefs in report.values()) for pupil in ANSWERS}
    print("points:", ", ".join(f"{pupil} {value:.2f}" for pupil, value in points.items()))


if __name__ == "__main__":
    common.run(main)
