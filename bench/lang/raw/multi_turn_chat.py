"""`examples/multi_turn_chat.py` with the client of the OpenAI API alone."""


def chat(client, model, turns):
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        done = client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
        messages.append({"role": "assistant", "content": done.choices[0].message.content})
    return messages
