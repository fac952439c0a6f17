"""The large bodies that `bench.gaps` sends."""

import base64
import io
import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}
BYTES = 4_000_000  # of a large body: the server's limit is a little more

Post = tuple[str, dict[str, Any]]
Make = Callable[[random.Random], Post]


def ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(3, 1400), k=count)


def words(rng: random.Random, num_chars: int) -> str:
    return "".join(rng.choices("abcdefgh     ", k=num_chars))


def answers(rng: random.Random) -> Post:
    """128 answers to a prompt of 65 000 ids."""
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": SAMPLING | {"n": 128}}


def long(rng: random.Random) -> Post:
    """One prompt of 131 000 ids."""
    return "/generate", {"input_ids": ids(rng, 131_000), "sampling_params": SAMPLING}


def prompts(rng: random.Random) -> Post:
    """A list of 1024 prompts of 700 ids."""
    return "/generate", {"input_ids": [ids(rng, 700) for _ in range(1024)], "sampling_params": SAMPLING}


def short_prompts(rng: random.Random) -> Post:
    """A list of 1024 prompts of three ids in OpenAI's form."""
    return "/v1/completions", {"prompt": [ids(rng, 3) for _ in range(1024)], "max_tokens": 4}


def texts(rng: random.Random) -> Post:
    """A list of 1024 texts of 3 500 characters."""
    return "/generate", {"text": [words(rng, 3500) for _ in range(1024)], "sampling_params": SAMPLING}


def text(rng: random.Random) -> Post:
    """A text of 80 000 characters."""
    return "/v1/completions", {"prompt": words(rng, 80_000), "max_tokens": 4}


def refused_text(rng: random.Random) -> Post:
    """A text of four million characters, which is too long."""
    return "/v1/completions", {"prompt": words(rng, BYTES), "max_tokens": 4}


def chat(rng: random.Random) -> Post:
    """32 answers to a chat of 80 000 characters."""
    message = {"role": "user", "content": words(rng, 80_000)}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 4, "n": 32}


def echoed(rng: random.Random) -> Post:
    """128 answers, each with its prompt of 8 000 ids in front."""
    return "/v1/completions", {"prompt": ids(rng, 8000), "max_tokens": 4, "n": 128, "echo": True}


def scored_echo(rng: random.Random) -> Post:
    """A prompt of 60 000 ids, echoed with five alternatives for each."""
    return "/v1/completions", {"prompt": ids(rng, 60_000), "max_tokens": 4, "echo": True, "logprobs": 5}


def scored(rng: random.Random) -> Post:
    """The log-probabilities of a prompt of 65 000 ids with five alternatives for each."""
    reports = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": SAMPLING, **reports}


def scored_answers(rng: random.Random) -> Post:
    """The log-probabilities of a prompt of 4 000 ids for 128 answers."""
    reports = {"return_logprob": True, "logprob_start_len": 0}
    return "/generate", {"input_ids": ids(rng, 4000), "sampling_params": SAMPLING | {"n": 128}, **reports}


def biased(rng: random.Random) -> Post:
    """128 answers to a prompt of 65 000 ids with penalties and a bias of 1 024 ids."""
    bias = {str(token): 1.0 for token in range(1024)}
    params = SAMPLING | {"n": 128, "repetition_penalty": 1.1, "logit_bias": bias}
    return "/generate", {"input_ids": ids(rng, 65_000), "sampling_params": params}


def score(rng: random.Random) -> Post:
    """A query of 8 000 ids before 1 000 items."""
    return "/v1/score", {"query": ids(rng, 8000), "items": [ids(rng, 8) for _ in range(1000)], "label_token_ids": [5]}


def score_texts(rng: random.Random) -> Post:
    """A query of 8 000 characters before 1 000 items."""
    query, items = words(rng, 8000), [words(rng, 50) for _ in range(1000)]
    return "/v1/score", {"query": query, "items": items, "label_token_ids": [5]}


def score_long_texts(rng: random.Random) -> Post:
    """A query of 100 000 characters before 80 items."""
    query, items = words(rng, 100_000), [words(rng, 50) for _ in range(80)]
    return "/v1/score", {"query": query, "items": items, "label_token_ids": [5]}


def scored_chat(_rng: random.Random) -> Post:
    """Eight answers of 3 000 tokens with 20 alternatives for each."""
    message = {"role": "user", "content": "hi"}
    asked = {"max_tokens": 3000, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
    return "/v1/chat/completions", {"messages": [message], **asked}


def tokenized(rng: random.Random) -> Post:
    """The tokens of 1024 texts of 3 500 characters."""
    return "/tokenize", {"prompt": [words(rng, 3500) for _ in range(1024)]}


def choices(rng: random.Random) -> Post:
    """A choice among 512 texts behind 10 000 characters."""
    return "/select", {"prompt": words(rng, 10_000), "choices": [f"choice {number}" for number in range(512)]}


def stops(rng: random.Random) -> Post:
    """1 000 prompts, each with 16 stop strings of 250 characters."""
    params = SAMPLING | {"stop": [words(rng, 250) for _ in range(16)]}
    return "/generate", {"text": [words(rng, 100) for _ in range(1000)], "sampling_params": params}


def wrong_ids(rng: random.Random) -> Post:
    """700 000 ids, of which the last is wrong."""
    return "/generate", {"input_ids": [*ids(rng, 700_000), -1], "sampling_params": SAMPLING}


def program(rng: random.Random) -> Post:
    """A program with 256 branches behind a text of 100 000 characters."""
    import jsg as sgl  # here: only this needs it

    @sgl.function
    def branches(s: Any) -> None:
        s += words(rng, 100_000)
        forks = s.fork(256)
        for number in range(256):
            forks[number] += f" {number}"
            forks[number] += sgl.gen("said", max_tokens=4)
        forks.join()

    return "/v1/programs", {"graph": json.loads(branches.compile().to_json())}


def pictures(rng: random.Random) -> Post:
    """64 pictures of 340 x 340 pixels in the body, 22 MB as files."""
    return _asked_about(_picture(340, 340, rng) for _ in range(64))


def large_pictures(rng: random.Random) -> Post:
    """Four pictures of 5 700 x 5 700 pixels in the body, of which little is a file."""
    return _asked_about(itertools.repeat(_picture(5700, 5700, None), 4))


def _asked_about(urls: Iterable[str]) -> Post:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 4}


def _picture(width: int, height: int, rng: random.Random | None) -> str:
    """A picture as a data: URL, of noise or of one colour."""
    from PIL import Image  # here: only these kinds need it

    size = width * height * 3
    raw = bytes(size) if rng is None else rng.randbytes(size)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), raw).save(file, "png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def embeddings(rng: random.Random) -> Post:
    """1 024 texts of 3 500 characters, whose vectors have 4 096 numbers."""
    return "/v1/embeddings", {"input": [words(rng, 3500) for _ in range(1024)]}


def short_embeddings(rng: random.Random) -> Post:
    """1 024 inputs of three ids, whose vectors are sent as base64."""
    return "/v1/embeddings", {"input": [ids(rng, 3) for _ in range(1024)], "encoding_format": "base64"}


def rerank(rng: random.Random) -> Post:
    """A query of 4 000 characters and 1 000 documents of 3 500."""
    return "/v1/rerank", {"query": words(rng, 4000), "documents": [words(rng, 3500) for _ in range(1000)]}


def large_text(rng: random.Random) -> Post:
    """The tokens of a text of four million characters."""
    return "/tokenize", {"prompt": words(rng, BYTES)}


def token_texts(rng: random.Random) -> Post:
    """The tokens of a text of four million characters, with the text of each."""
    return "/tokenize", {"prompt": words(rng, BYTES), "return_token_strs": True}


def detokenized(rng: random.Random) -> Post:
    """The text of 700 000 ids."""
    return "/detokenize", {"tokens": ids(rng, 700_000)}


def rendered(rng: random.Random) -> Post:
    """1024 texts of 3 500 characters as prompts that nobody answers."""
    return "/v1/completions/render", {"prompt": [words(rng, 3500) for _ in range(1024)]}


def streamed_echo(rng: random.Random) -> Post:
    """As `scored_echo`, as events: the first has the prompt."""
    path, body = scored_echo(rng)
    return path, body | {"stream": True}


def streamed_scores(rng: random.Random) -> Post:
    """As `scored`, as events: two have the prompt."""
    path, body = scored(rng)
    return path, body | {"stream": True}


def streamed_chat(rng: random.Random) -> Post:
    """As `scored_chat`, as events."""
    path, body = scored_chat(rng)
    return path, body | {"stream": True}


def scored_completions(_rng: random.Random) -> Post:
    """Eight answers of 3 000 tokens with 20 alternatives for each, in four lists."""
    return "/v1/completions", {"prompt": [5], "max_tokens": 3000, "ignore_eos": True, "n": 8, "logprobs": 20}


def scored_long_chat(rng: random.Random) -> Post:
    """An answer of 24 000 tokens with 20 alternatives for each."""
    path, body = scored_chat(rng)
    return path, body | {"max_tokens": 24_000, "n": 1}


def scored_response(_rng: random.Random) -> Post:
    """A stored response of at most 20 000 tokens with 20 alternatives for each."""
    asked = {"max_output_tokens": 20_000, "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    return "/v1/responses", {"input": "hi", **asked}


def stop_patterns(rng: random.Random) -> Post:
    """1 000 prompts, each with eight stop patterns of its own."""
    params = [SAMPLING | {"stop_regex": [words(rng, 50) for _ in range(8)]} for _ in range(1000)]
    return "/generate", {"text": [words(rng, 100) for _ in params], "sampling_params": params}


def schema(_rng: random.Random) -> Post:
    """A schema with 6 000 properties, which must all be there."""
    names = [f"name{number}" for number in range(6000)]
    properties = {name: {"type": "string", "description": "d" * 100} for name in names}
    shown = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": shown}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "response_format": asked}


def counted(rng: random.Random) -> Post:
    """32 answers of 3 000 tokens under a pattern that counts their characters."""
    params = {"regex": "[a-z ]{300000,300001}", "max_new_tokens": 3000, "n": 32}
    return "/generate", {"text": words(rng, 100), "sampling_params": params}


def id_embeddings(rng: random.Random) -> Post:
    """1 024 inputs of 700 ids, whose vectors have 4 096 numbers."""
    return "/v1/embeddings", {"input": [ids(rng, 700) for _ in range(1024)]}


GENERATES, EMBEDS, JUDGES, SEES = "generates", "embeds", "judges", "sees"
FLAVOURS: dict[str, tuple[Make, ...]] = {
    GENERATES: (
        *(answers, long, prompts, short_prompts, texts, text, refused_text, chat, echoed, scored_echo, scored),
        *(scored_answers, scored_chat, biased, score, score_texts, score_long_texts, tokenized, choices, stops),
        *(wrong_ids, program, large_text, token_texts, detokenized, rendered, streamed_echo, streamed_scores),
        *(streamed_chat, scored_completions, scored_long_chat, scored_response, stop_patterns, schema, counted),
    ),
    EMBEDS: (embeddings, short_embeddings, id_embeddings),
    JUDGES: (rerank,),
    SEES: (pictures, large_pictures),
}
"""The kinds of bodies, by the model that answers them."""
KINDS = {make.__name__: make for makes in FLAVOURS.values() for make in makes}
