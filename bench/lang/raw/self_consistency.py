"""`examples/self_consistency.py` with the client of the OpenAI API alone."""

import collections


def vote(client, model, question, num_samples=7):
    done = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0.8, n=num_samples
    )
    answers = [choice.message.content for choice in done.choices]
    results = collections.Counter(answer.rpartition("=")[2].strip() for answer in answers)
    return results.most_common(1)[0][0], dict(results)
