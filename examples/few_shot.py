"""Few-shot learning: one list of examples in front of many questions, so that its tokens are computed once."""

import common

import jsg as sgl

EXAMPLES = {"hot": "cold", "big": "small", "day": "night", "rich": "poor", "dry": "wet"}
WORDS = ["up", "fast", "happy", "early", "strong", "wide"]


@sgl.function
def opposite(s, word):
    for shown, answer in EXAMPLES.items():
        s += f"{shown} -> {answer}\n"
    s += word + " ->" + sgl.gen("answer", max_tokens=8, stop="\n", temperature=0)


def opposites(words: list[str]) -> dict[str, str]:
    """The opposite of each word."""
    states = opposite.run_batch([{"word": word} for word in words])
    return {word: state["answer"].strip() for word, state in zip(words, states, strict=True)}


def main() -> None:
    for word, answer in opposites(WORDS).items():
        print(f"{word:>8} -> {answer}")


if __name__ == "__main__":
    common.run(main)
