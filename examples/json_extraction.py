"""Text to JSON: the answer must match a schema, so it always parses and always has the fields that were asked for."""

import json

import common

import jsg as sgl

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TEXTS = [
    "My name is Nina. I live in Oslo. I am 36 years old.",
    "I am 54 years old. I am Oscar. I live in Cairo.",
    "They call me Emma. My home is Lima. My age is 27.",
]


@sgl.function
def extract(s, text):
    s += sgl.user(f"{text} Extract name, age and city as JSON.")
    s += sgl.assistant(sgl.gen("record", max_tokens=64, temperature=0, json_schema=SCHEMA))


def records(texts: list[str]) -> list[dict]:
    """The record of each text."""
    return [json.loads(state["record"]) for state in extract.run_batch([{"text": text} for text in texts])]


def main() -> None:
    for record in records(TEXTS):
        print(record)


if __name__ == "__main__":
    common.run(main)
