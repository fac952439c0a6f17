"""`examples/rag.py` with the client of the OpenAI API alone; the retriever is the same."""

from concurrent.futures import ThreadPoolExecutor


def answers(client, model, questions, retrieve):
    def answer(question):
        done = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": " ".join(["Remember this:", *retrieve(question), question])}],
            max_tokens=24,
            temperature=0,
        )
        return done.choices[0].message.content

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(answer, questions))
