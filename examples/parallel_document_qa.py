"""Questions over documents that were read side by side: each is a branch, and the join puts their KV together.

No document sees another, so each is computed once whatever stands beside it; the question sees them all. Nothing of a
branch is computed again by the join.
"""

import common

import jsg as sgl

DOCUMENTS = {
    "Anna": " Anna lives in Oslo.",
    "Tom": " Tom lives in Cairo.",
    "Clara": " Clara lives in Lima.",
    "Oscar": " Oscar lives in Rome.",
}


@sgl.function
def ask(s, documents, question):
    s += sgl.user_begin()
    s += "Remember this:"
    branches = s.fork(len(documents))
    branches += documents
    branches.join("concate_and_append")
    s += " " + question
    s += sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    for name in DOCUMENTS:
        question = f"Where does {name} live?"
        state = ask.run(list(DOCUMENTS.values()), question)
        print(question, state["answer"], f"(cached: {state.get_meta_info('answer')['cached_tokens']} tokens)")


if __name__ == "__main__":
    common.run(main)
