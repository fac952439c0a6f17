"""The tokenizer of the text model, extended: a placeholder for images, and whole tokens for the words of pictures.

The text model writes "top" or "circle" in pieces, for its lists of common words do not have them. What is added are
merges behind those that exist, so all other text keeps its tokens.
"""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tower import load_model, text_model

sys.path.append(str(Path(__file__).parents[1] / "tiny_model"))  # the text half is trained by its modules

from tokenizer import GLUED, PRE_TOKEN, save_tokenizer

EMBEDDED = Path(__file__).parents[2] / "jsg" / "assets" / "tiny"
IMAGE = "<image>"
WORDS = (
    "circle square triangle cross star ring circles squares triangles crosses stars rings red green blue yellow orange "
    "purple black left right top bottom center shape shapes picture many there one two three four nothing"
).split()
VOCAB_SIZE = 1472
"""Rows of the embedding: the tokens, and some to spare so that it divides well."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{{- '<image>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def extended(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with whole tokens for a space and one of `WORDS`, and with `<image>` behind them all."""
    fields = json.loads(tokenizer.to_str())
    pattern = PRE_TOKEN.replace("|".join(GLUED), "|".join([*GLUED, *WORDS]))
    fields["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    vocabulary, merges = fields["model"]["vocab"], fields["model"]["merges"]
    glued = Tokenizer.from_str(json.dumps(fields))
    for word in WORDS:
        first, *pieces = glued.encode(f" {word}").tokens
        for piece in pieces:  # from the left, so that a merge begins with the space and touches no other word
            if first + piece not in vocabulary:
                merges.append([first, piece])
                vocabulary[first + piece] = len(vocabulary)
            first += piece
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": len(vocabulary), "content": IMAGE})
    vocabulary[IMAGE] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(fields))


def extended_embedding(old: Tokenizer, new: Tokenizer, embedding: np.ndarray) -> np.ndarray:
    """Embeddings [VOCAB_SIZE, D]: a new token begins as the mean of the tokens that wrote its text before."""
    rows = np.zeros((VOCAB_SIZE, embedding.shape[1]), np.float32)
    rows[: len(embedding)] = embedding
    for token_id in range(len(embedding), new.get_vocab_size()):
        text = new.decode([token_id])
        if text:
            rows[token_id] = embedding[old.encode(text).ids].mean(0)
    return rows


def save_extended(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the template that takes images."""
    save_tokenizer(tokenizer, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE, "processor_class": "LlavaProcessor"}
    path.write_text(json.dumps(config | {"image_token": IMAGE}, indent=2) + "\n")


def start_text(folder: Path | None) -> tuple[text_model.Params, text_model.TinyConfig, Tokenizer]:
    """Text half, its config and its tokenizer: of a trained folder, or the embedded model's with the new words."""
    old = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    new = extended(old)
    if folder:
        _, text, (_, config) = load_model(folder)
        return text, config, new
    text, _ = text_model.load_model(EMBEDDED)
    name = "model.embed_tokens.weight"
    text[name] = jnp.asarray(extended_embedding(old, new, np.asarray(text[name])))
    return text, text_model.TinyConfig(vocab_size=VOCAB_SIZE), new
