"""`examples/json_extraction.py` with the client of the OpenAI API alone."""

import json
from concurrent.futures import ThreadPoolExecutor


def records(client, model, schema, texts):
    def record(text):
        done = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"{text} Extract name, age and city as JSON."}],
            max_tokens=64,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "record", "schema": schema, "strict": True},
            },
        )
        return json.loads(done.choices[0].message.content)

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(record, texts))
