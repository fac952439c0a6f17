"""Retrieval-augmented generation: the documents that share words with a question, then an answer from them."""

import re

import common

import jsg as sgl

DOCUMENTS = [
    "Anna lives in Oslo.",
    "Tom lives in Cairo.",
    "Clara lives in Lima.",
    "Oscar lives in Rome.",
    "Nina lives in Tokyo.",
    "Felix lives in Paris.",
    "Emma lives in Delhi.",
    "Hugo lives in Athens.",
]
QUESTIONS = ["Where does Tom live?", "In which city does Clara live?", "Where is the home of Hugo?"]


def words(text: str) -> set[str]:
    """Its words, without endings, so that "live" finds "lives"."""
    return {word.removesuffix("s") for word in re.findall(r"\w+", text.lower())} - {
        "i",
        "the",
        "a",
        "of",
        "in",
        "where",
    }


def retrieve(question: str, count: int = 3) -> list[str]:
    """The documents that share most words with the question, best first."""
    return sorted(DOCUMENTS, key=lambda text: len(words(text) & words(question)), reverse=True)[:count]


@sgl.function
def answer(s, question):
    s += sgl.user(" ".join(["Remember this:", *retrieve(question), question]))
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def answers(questions: list[str]) -> list[str]:
    """The answer to each question."""
    return [state["answer"] for state in answer.run_batch([{"question": question} for question in questions])]


def main() -> None:
    for question, text in zip(QUESTIONS, answers(QUESTIONS), strict=True):
        print(question, text)


if __name__ == "__main__":
    common.run(main)
