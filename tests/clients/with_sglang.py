"""What SGLang's own tests ask of a server over HTTP: `/generate` and its neighbours, SGLang's fields of OpenAI's API.

The cases are ours. SGLang's package is not installed: it needs a GPU, and its tests of a server use `requests`.
"""

import concurrent.futures
import itertools
import json
import os
import re
import time

import openai
import pytest
import requests

EMBEDDED, SCRIPTED = os.environ.get("EMBEDDED", ""), os.environ.get("SCRIPTED", "")
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds or subtracts.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "sub")
]


def post(path, body, server=EMBEDDED, **options):
    return requests.post(f"{server}{path}", json=body, timeout=120, **options)


def generate(text=PROMPT, *, server=EMBEDDED, body=None, **sampling):
    answer = post("/generate", {"text": text, "sampling_params": GREEDY | sampling, **(body or {})}, server)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(**body):
    answer = post("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}, **body})
    assert answer.status_code == 400
    return answer.json()["error"]["message"]


def events(body, server=EMBEDDED):
    with post("/generate", body | {"stream": True}, server, stream=True) as answer:
        lines = [line.decode() for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat(**options):
    client = openai.OpenAI(base_url=f"{SCRIPTED}/v1", api_key="none", max_retries=0)
    return client.chat.completions.create(model="scripted", **options)


def says(script):
    return [{"role": "user", "content": f"SCRIPT {script}"}]


# Decoding.


def test_simple_decode():
    done = generate()
    assert "Paris" in done["text"]
    assert {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"} <= done["meta_info"].keys()


def test_parallel_decode():
    answers = generate(n=3, temperature=0.7)
    assert [len(answer["text"]) > 0 for answer in answers] == [True] * 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


def test_batch():
    answers = generate([PROMPT, "The capital of Italy is"])
    assert len(answers) == 2
    assert "Paris" in answers[0]["text"]


def test_batch_with_parameters_of_each():
    sampling = [{"temperature": 0, "max_new_tokens": length} for length in (1, 3)]
    answers = post("/generate", {"text": [PROMPT, "Italy is"], "sampling_params": sampling}).json()
    assert answers[0]["meta_info"]["completion_tokens"] == 1


def test_batch_and_parallel():
    assert len(generate([PROMPT, "Italy is"], n=2)) == 4


def test_stream():
    parts = events({"text": PROMPT, "sampling_params": GREEDY})
    texts = [part["text"] for part in parts]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == generate()["text"]


def test_stream_of_several():
    parts = events({"text": PROMPT, "sampling_params": GREEDY | {"n": 2}})
    assert {part["index"] for part in parts} == {0, 1}


def test_input_ids():
    ids = post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    done = post("/generate", {"input_ids": ids, "sampling_params": GREEDY}).json()
    assert (done["text"], done["meta_info"]["prompt_tokens"]) == (generate()["text"], len(ids))


def test_input_ids_of_a_batch():
    answers = post("/generate", {"input_ids": [[40, 41], [42]], "sampling_params": GREEDY}).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 1]


def test_rid():
    assert generate(body={"rid": "a-name"})["meta_info"]["id"] == "a-name"


def test_concurrent():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: generate(f"SCRIPT say {i}", server=SCRIPTED)["text"], range(32)))
    assert answers == [str(i) for i in range(32)]


# Ends.


def test_matched_stop_text():
    reason = generate("SCRIPT say one, two", server=SCRIPTED, stop=", two", max_new_tokens=50)
    assert reason["text"] == "one"
    assert reason["meta_info"]["finish_reason"] == {"type": "stop", "matched": ", two"}


def test_matched_stop_token():
    first = generate()["output_ids"][1]
    done = generate(stop_token_ids=[first])
    assert done["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_matched_end_of_text():
    assert generate()["meta_info"]["finish_reason"]["type"] == "stop"


def test_length():
    assert generate(max_new_tokens=1)["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def test_ignore_eos():
    assert generate(ignore_eos=True, max_new_tokens=30)["meta_info"]["completion_tokens"] == 30


def test_min_new_tokens():
    assert generate(min_new_tokens=12, max_new_tokens=20)["meta_info"]["completion_tokens"] >= 12


def test_no_stop_trim():
    done = generate("SCRIPT say one, two", server=SCRIPTED, stop=", two", no_stop_trim=True, max_new_tokens=50)
    assert done["text"] == "one, two"


def test_no_new_tokens():
    assert generate(max_new_tokens=0)["meta_info"]["completion_tokens"] == 0


def test_abort():
    body = {"text": f"SCRIPT say {'long ' * 1000}", "sampling_params": {"max_new_tokens": 5000}, "rid": "to-abort"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, "/generate", body, SCRIPTED)
        while not answer.done():
            post("/abort_request", {"rid": "to-abort"}, SCRIPTED)
            time.sleep(0.1)
    assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


# Log-probabilities.


def test_logprob():
    meta = generate(body={"return_logprob": True, "logprob_start_len": 0})["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert meta["input_token_logprobs"][0][0] is None


def test_logprob_start():
    meta = generate(body={"return_logprob": True, "logprob_start_len": 2})["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 2


def test_logprob_of_the_output_only():
    meta = generate(body={"return_logprob": True})["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert len(meta.get("input_token_logprobs") or []) <= 1


def test_top_logprobs():
    body = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = generate(body=body)["meta_info"]
    for token, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 5
        assert top[0] == token
        assert isinstance(token[2], str)


def test_logprob_of_named_tokens():
    meta = generate(body={"return_logprob": True, "token_ids_logprob": [40, 41]})["meta_info"]
    assert [token for _, token, _ in meta["output_token_ids_logprobs"][0]] == [40, 41]


def test_logprobs_match_when_scored_again():
    asked = {"return_logprob": True, "logprob_start_len": 0}
    first = post("/generate", {"input_ids": [40, 41, 42], "sampling_params": GREEDY, **asked}).json()
    ids = [40, 41, 42, *first["output_ids"]]
    again = post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, **asked}).json()
    made = [logprob for logprob, _, _ in first["meta_info"]["output_token_logprobs"]]
    scored = [logprob for logprob, _, _ in again["meta_info"]["input_token_logprobs"]][3:]
    assert made == pytest.approx(scored, abs=1e-3)


def test_logprobs_mixed_in_a_batch():
    body = {"text": [PROMPT, "Italy is"], "sampling_params": GREEDY, "return_logprob": [True, False]}
    answers = post("/generate", body).json()
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


def test_logprob_of_a_long_prompt():
    done = generate("a " * 1500, body={"return_logprob": True, "logprob_start_len": 0}, max_new_tokens=2)
    assert len(done["meta_info"]["input_token_logprobs"]) == done["meta_info"]["prompt_tokens"]


def test_logprob_under_a_grammar():
    done = generate(body={"return_logprob": True, "top_logprobs_num": 3}, regex="(yes|no)")
    assert len(done["meta_info"]["output_top_logprobs"]) == done["meta_info"]["completion_tokens"]


# Penalties and sampling.


def test_frequency_penalty():
    plain, penalised = (generate("a a a a", ignore_eos=True, max_new_tokens=30, frequency_penalty=p) for p in (0, 2))
    assert len(set(penalised["output_ids"])) > len(set(plain["output_ids"]))


def test_presence_penalty():
    plain, penalised = (generate("a a a a", ignore_eos=True, max_new_tokens=30, presence_penalty=p) for p in (0, 2))
    assert penalised["output_ids"] != plain["output_ids"]  # a token that is likely enough may come again all the same


def test_repetition_penalty():
    plain, penalised = (generate("a a a a", ignore_eos=True, max_new_tokens=30, repetition_penalty=p) for p in (1, 2))
    assert len(set(penalised["output_ids"])) > len(set(plain["output_ids"]))


def test_top_k_of_one_is_greedy():
    assert generate(temperature=1, top_k=1)["text"] == generate()["text"]


def test_top_p_min_p():
    assert generate(temperature=1, top_p=0.01)["text"] == generate()["text"]
    assert generate(temperature=1, min_p=0.999)["text"] == generate()["text"]


def test_seed():
    texts = {generate(temperature=1.5, sampling_seed=7, max_new_tokens=12)["text"] for _ in range(2)}
    assert len(texts) == 1


def test_logit_bias():
    first = generate()["output_ids"][0]
    assert generate(logit_bias={str(first): -100})["output_ids"][0] != first


# Grammars.


def test_regex():
    text = generate("The year is ", regex="[12][0-9]{3}", max_new_tokens=10)["text"]
    assert re.fullmatch("[12][0-9]{3}", text)


def test_regex_of_a_batch():
    sampling = [GREEDY | {"regex": f"{letter}{{3}}"} for letter in "ab"]
    answers = post("/generate", {"text": ["x", "y"], "sampling_params": sampling}).json()
    assert [answer["text"] for answer in answers] == ["aaa", "bbb"]


def test_json_schema():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "population": {"type": "integer", "maximum": 9}},
        "required": ["name", "population"],
        "additionalProperties": False,
    }
    value = json.loads(generate(json_schema=json.dumps(schema), max_new_tokens=100)["text"])
    assert isinstance(value["population"], int)


def test_ebnf():
    text = generate(ebnf='root ::= "city is " ("Paris" | "Rome")', max_new_tokens=20)["text"]
    assert text in ("city is Paris", "city is Rome")


def test_structural_tag():
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    text = "take <f>17</f> now"
    sampling = {"structural_tag": json.dumps(tag), "max_new_tokens": 50}
    assert generate(f"SCRIPT say {text}", server=SCRIPTED, **sampling)["text"] == text


def test_grammar_that_is_wrong():
    answer = post("/generate", {"text": PROMPT, "sampling_params": {"regex": "[a"}})
    assert answer.status_code == 400


def test_grammars_at_once():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: generate(regex=f"{i}[0-9]", temperature=1)["text"], range(8)))
    assert [text[0] for text in texts] == [str(i) for i in range(8)]


# Function calls and thoughts.


def test_function_call():
    call = chat(messages=says('call add {"a": 3, "b": 4}'), tools=TOOLS).choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})


def test_function_call_streamed():
    chunks = chat(messages=says('call add {"a": 3, "b": 4}'), tools=TOOLS, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"a": 3, "b": 4}
    assert choices[-1].finish_reason == "tool_calls"


def test_function_call_required():
    done = chat(messages=says('call sub {"a": 3, "b": 4}'), tools=TOOLS, tool_choice="required")
    assert done.choices[0].message.tool_calls[0].function.name == "sub"


def test_function_call_of_a_name():
    choice = {"type": "function", "function": {"name": "sub"}}
    done = chat(messages=says('call sub {"a": 3, "b": 4}'), tools=TOOLS, tool_choice=choice)
    assert done.choices[0].message.tool_calls[0].function.name == "sub"


def test_function_calls_in_a_row():
    done = chat(messages=says('call add {"a": 1, "b": 2} && call sub {"a": 3, "b": 4}'), tools=TOOLS)
    assert [call.function.name for call in done.choices[0].message.tool_calls] == ["add", "sub"]


def test_separate_reasoning_of_a_model_without_thoughts():
    extra = {"separate_reasoning": True, "stream_reasoning": True}
    done = chat(messages=says("say plain"), extra_body=extra)
    assert done.choices[0].message.content == "plain"
    assert not getattr(done.choices[0].message, "reasoning_content", None)


def test_fields_of_sampling_in_chat():
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": False, "regex": "[a-z]+"}
    assert chat(messages=says("say letters"), extra_body=extra).choices[0].message.content == "letters"


# The server.


def test_cache_is_used_and_flushed():
    text = "A sentence that no other case of this suite begins with, so that it is cached once."
    assert generate(text)["meta_info"]["cached_tokens"] < generate(text)["meta_info"]["cached_tokens"]
    assert post("/flush_cache", {}).status_code == 200
    assert generate(text)["meta_info"]["cached_tokens"] == 0


def test_server_info():
    info = requests.get(f"{EMBEDDED}/get_server_info", timeout=60).json()
    assert info["internal_states"][0]["num_steps"] > 0
    assert info["version"]


def test_model_info():
    info = requests.get(f"{EMBEDDED}/get_model_info", timeout=60).json()
    assert (info["model_path"], info["is_generation"]) == ("tiny", True)


def test_health():
    for path in ("/health", "/health_generate"):
        assert requests.get(f"{EMBEDDED}{path}", timeout=60).status_code == 200


def test_load():
    assert requests.get(f"{EMBEDDED}/get_load", timeout=60).json()[0]["dp_rank"] == 0


def test_tokenize_and_back():
    ids = post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()
    assert ids["count"] == len(ids["tokens"])
    assert post("/detokenize", {"tokens": ids["tokens"]}).json()["text"] == PROMPT


def test_score():
    body = {"query": "Is it so? ", "items": ["yes", "no"], "label_token_ids": [40, 41], "apply_softmax": True}
    assert [sum(scores) for scores in post("/v1/score", body).json()["scores"]] == pytest.approx([1, 1])


def test_a_request_that_is_too_long():
    answer = post("/generate", {"text": "a " * 9000, "sampling_params": GREEDY})
    assert answer.status_code == 400
    assert "4096" in answer.json()["error"]["message"]


def test_metrics():
    assert "jsg:" in requests.get(f"{EMBEDDED}/metrics", timeout=60).text


# What SGLang has and jsg refuses, by name and with the reason.


def test_custom_logit_processor_is_refused():
    assert "never runs code of clients" in refusal(custom_logit_processor="x")


def test_hidden_states_are_refused():
    assert "inner values" in refusal(return_hidden_states=True)


def test_adapters_are_refused():
    assert "adapters" in refusal(lora_path="x")


def test_sessions_are_refused():
    assert "no sessions" in refusal(session_params={"id": "x"})


def test_embeddings_of_inputs_are_refused():
    assert "input_embeds" in refusal(input_embeds=[[0.0]])
