"""`examples/llm_judge.py` with the client of the OpenAI API alone.

The API gives the probability of an answer only if the completions endpoint echoes log-probabilities. So the turns must
be written by hand in the model's template, and one more request must find out where the answer begins.
"""

import math
from concurrent.futures import ThreadPoolExecutor


def judge(client, model, questions, answers):
    def echo(prompt):
        return client.completions.create(model=model, prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0)

    def beliefs(number, question):
        prompt = f"<|system|>You are a helpful assistant.<|end|><|user|>{question}<|end|><|assistant|>"
        start = echo(prompt).usage.prompt_tokens
        likelihoods = {}
        for pupil, given in answers.items():
            logprobs = echo(prompt + given[number]).choices[0].logprobs.token_logprobs
            likelihoods[pupil] = math.exp(sum(logprobs[start:]))
        return {pupil: likelihood / sum(likelihoods.values()) for pupil, likelihood in likelihoods.items()}

    with ThreadPoolExecutor(len(questions)) as pool:
        found = pool.map(beliefs, range(len(questions)), questions.values())
        return dict(zip(questions, found, strict=True))
