"""`examples/react_agent.py` with the client of the OpenAI API alone.

Only the completions endpoint lets a program begin an answer, so the turns are written by hand in the model's template.
"""


def agent(client, model, question, phone_book, look_up, max_steps=3):
    prompt = ""

    def ask(text, start=""):
        nonlocal prompt
        prompt += f"<|user|>{text}<|end|><|assistant|>{start}"
        done = client.completions.create(model=model, prompt=prompt, max_tokens=32, temperature=0)
        prompt += f"{done.choices[0].text}<|end|>"
        return done.choices[0].text

    thought = ask(question)
    for _ in range(max_steps - 1):
        if thought != "I do not know.":
            return thought
        action = ask(question, start="The phone number of ")
        names = [name for name in phone_book if action.startswith(name)]
        if not names:  # the API cannot restrict the answer to the choices
            return None
        thought = ask(look_up(names[0]))
    return thought if thought != "I do not know." else None
