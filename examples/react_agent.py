"""A ReAct agent: the model thinks, acts when it does not know, and thinks again about what it observed."""

import common

import jsg as sgl

PHONE_BOOK = {"Anna": 47, "Oscar": 4711, "Clara": 8052, "Tom": 963}
QUESTIONS = ["What is the phone number of Clara?", "What is the capital of Peru?"]


def look_up(name: str) -> str:
    """The tool: what the phone book says, in the words that the embedded model was trained on."""
    return f"Notes: The code of {name} is {PHONE_BOOK[name]}. What is the code of {name}?"


@sgl.function
def agent(s, question, max_steps=3):
    s += sgl.user(question)
    for step in range(max_steps):
        s += sgl.assistant(sgl.gen(f"thought_{step}", max_tokens=32, temperature=0))
        thought = s[f"thought_{step}"]
        if thought != "I do not know.":
            return thought
        s += sgl.user(question)
        s += sgl.assistant("The phone number of " + sgl.select(f"action_{step}", choices=list(PHONE_BOOK)))
        s += sgl.user(look_up(s[f"action_{step}"]))
    return None


def main() -> None:
    for question in QUESTIONS:
        state = agent.run(question)
        for message in state.messages():
            print(f"{message['role']:>9}: {message['content']}")
        print("   answer:", state.ret_value, end="\n\n")


if __name__ == "__main__":
    common.run(main)
