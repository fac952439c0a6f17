"""`examples/tree_of_thought.py` with the client of the OpenAI API alone."""

import re
from concurrent.futures import ThreadPoolExecutor


def search(client, model, numbers, target, breadth, depth):
    def think(thought):
        messages, total, path, number = thought
        messages = [*messages, {"role": "user", "content": f"What is {total} + {number}?"}]
        done = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
        answer = done.choices[0].message.content
        found = re.fullmatch(r".*= ([0-9]+)", answer)
        if found is None:  # the API cannot begin the answer, so the program must check its form
            return None
        return [*messages, {"role": "assistant", "content": answer}], int(found[1]), (*path, number)

    frontier = [([{"role": "system", "content": "You are a helpful assistant."}], 0, ())]
    with ThreadPoolExecutor(breadth * len(numbers)) as pool:
        for _ in range(depth):
            thoughts = [(*state, number) for state in frontier for number in numbers]
            valued = [thought for thought in pool.map(think, thoughts) if thought is not None]
            frontier = sorted(valued, key=lambda thought: abs(target - thought[1]))[:breadth]
            if not frontier:
                return None
            _, total, path = frontier[0]
            if total == target:
                return path
    return None
