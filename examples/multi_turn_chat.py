"""A conversation of several turns: what was said is in the state, and its tokens are in the cache."""

import common

import jsg as sgl

TURNS = ["My name is Nina.", "I live in Oslo.", "I bought a lamp.", "Where do I live?", "What is my name?", "Thanks!"]


@sgl.function
def chat(s, turns):
    s += sgl.system("You are a helpful assistant.")
    for number, turn in enumerate(turns):
        s += sgl.user(turn)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=48, temperature=0))


def main() -> None:
    state = chat.run(TURNS)
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content']}")
    cached = [state.get_meta_info(f"answer_{number}")["cached_tokens"] for number in range(len(TURNS))]
    print("prompt tokens that were cached, turn by turn:", *cached)


if __name__ == "__main__":
    common.run(main)
