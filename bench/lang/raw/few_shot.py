"""`examples/few_shot.py` with the client of the OpenAI API alone."""

from concurrent.futures import ThreadPoolExecutor


def opposites(client, model, examples, words):
    prompt = "".join(f"{shown} -> {answer}\n" for shown, answer in examples.items())

    def opposite(word):
        done = client.completions.create(
            model=model, prompt=f"{prompt}{word} ->", max_tokens=8, stop=["\n"], temperature=0
        )
        return done.choices[0].text.strip()

    with ThreadPoolExecutor(len(words)) as pool:
        return dict(zip(words, pool.map(opposite, words), strict=True))
