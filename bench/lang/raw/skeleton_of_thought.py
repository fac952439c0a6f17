"""`examples/skeleton_of_thought.py` with the client of the OpenAI API alone."""

import re
from concurrent.futures import ThreadPoolExecutor


def travel_guide(client, model, wish):
    def ask(question):
        done = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
        )
        return done.choices[0].message.content

    skeleton = ask(f"Repeat: {wish}")
    if re.fullmatch("[A-Z][a-z]+( [A-Z][a-z]+){0,5}", skeleton) is None:
        raise ValueError(f"the skeleton must have the form that was asked for, but is {skeleton!r}")
    points = skeleton.split()
    with ThreadPoolExecutor(len(points)) as pool:
        paragraphs = list(pool.map(ask, [f"What is the capital of {point}?" for point in points]))
    return "\n".join(f"{point}. {text}" for point, text in zip(points, paragraphs, strict=True))
