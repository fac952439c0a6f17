"""`examples/essay_judge.py` with the client of the OpenAI API alone."""

import re
from concurrent.futures import ThreadPoolExecutor


def judge(client, model, picture, shown, essay, cities, dimensions, form):
    def ask(messages, question, **options):
        done = client.chat.completions.create(
            model=model, messages=[*messages, {"role": "user", "content": question}], temperature=0, **options
        )
        return done.choices[0].message.content

    messages = [
        {"role": "user", "content": picture},
        {"role": "assistant", "content": "OK."},
        {"role": "user", "content": essay},
        {"role": "assistant", "content": "OK."},
    ]
    question = "Which city do I live in?"
    answer = ask(messages, question, max_tokens=16)
    named = [city for city in cities if city in answer]
    if len(named) != 1:  # the API cannot restrict the answer to the choices
        raise ValueError(f"the answer must name exactly one of the cities, but is {answer!r}")
    if named[0] != shown["city"]:
        return "F", None
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    with ThreadPoolExecutor(len(dimensions) + 1) as pool:
        judgments = [pool.submit(ask, messages, dimension, max_tokens=24) for dimension in dimensions.values()]
        extracted = pool.submit(ask, messages, f"{essay} Extract name, city and color as JSON.", max_tokens=64)
        told = [judgment.result() for judgment in judgments]
        summary = extracted.result()
    if re.fullmatch(form, summary) is None:
        raise ValueError(f"the summary must have the form that was asked for, but is {summary!r}")
    misses = [name for name, text in zip(dimensions, told, strict=True) if shown[name] not in text]
    return "ABCD"[len(misses)], summary
