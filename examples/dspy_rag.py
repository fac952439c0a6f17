"""Answers from retrieved passages with DSPy, and an optimiser that finds worked examples to show the model first.

It needs `pip install '.[dspy]'` in a checkout of jsg. Without `--url` it starts `jsg serve` with the embedded model.
"""

import argparse
import os
import re

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # LiteLLM would ask the network for prices
import dspy

import jsg

JOBS = "Anna baker, Tom farmer, Lena doctor, Paul painter, Maria teacher, Oscar driver, Nina singer, Felix pilot"
PASSAGES = ["{} is a {}.".format(*pair.split()) for pair in JOBS.split(", ")]


class Plain(dspy.Adapter):
    """Plain turns, which a model of two million parameters knows; larger models follow DSPy's own adapters."""

    def format(self, signature, demos, inputs):
        def asked(fields):
            return {"role": "user", "content": " ".join([*fields["context"], fields["question"]])}

        shown = [turn for d in demos for turn in (asked(d), {"role": "assistant", "content": d["answer"]})]
        return [*shown, asked(inputs)]

    def parse(self, signature, completion):
        return {"answer": completion.strip()}


class Rag(dspy.Module):
    def __init__(self):
        super().__init__()
        self.respond = dspy.Predict("context: list[str], question -> answer")

    def forward(self, question):
        words = set(re.findall(r"\w+", question))  # the retriever: passages that share the most words
        passages = sorted(PASSAGES, key=lambda passage: -len(words & set(re.findall(r"\w+", passage))))
        return self.respond(context=passages[:3], question=question)


def main(url):
    dspy.configure(lm=dspy.LM("openai/tiny", api_base=f"{url}/v1", api_key="none", temperature=0), adapter=Plain())
    known = [dspy.Example(question=f"What does {text.split()[0]} do?", answer=text) for text in PASSAGES]
    train, test = ([example.with_inputs("question") for example in part] for part in (known[:4], known[4:]))
    optimiser = dspy.BootstrapFewShot(lambda example, said, _: said.answer == example.answer, max_labeled_demos=0)
    program = optimiser.compile(Rag(), trainset=train)
    print(f"{len(program.respond.demos)} worked examples were found")
    for example in test:
        print(example.question, program(question=example.question).answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server")
    url = parser.parse_args().url
    runtime = None if url else jsg.Runtime()  # ends with this program
    main(url or runtime.url)
