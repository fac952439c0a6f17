"""Self-consistency: ask several times with some chance in it, and believe the answer that comes most often."""

import collections

import common

import jsg as sgl

QUESTIONS = ["What is 7 + 8?", "How much is 12 + 5?", "Add 9 and 6."]


@sgl.function
def vote(s, question, num_samples=7):
    s += sgl.user(question)
    forks = s.fork(num_samples)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0.8))
    forks.join()
    # `join` has made a list of the answers; what stands behind "=" in an answer is its result
    results = collections.Counter(answer.rpartition("=")[2].strip() for answer in s["answer"])
    return results.most_common(1)[0][0], dict(results)


def main() -> None:
    for question in QUESTIONS:
        answer, votes = vote.run(question).ret_value
        print(f"{question} {answer}  (votes: {votes})")


if __name__ == "__main__":
    common.run(main)
