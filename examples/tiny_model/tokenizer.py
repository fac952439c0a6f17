"""Build the tokenizer of the tiny model and its Hugging Face files.

Byte-level BPE with one rule that a small model profits from: a space is glued to a word only for the short list of
common words in `GLUED`. Every other word (names, values, keys) is written with the same tokens wherever it stands,
after a space, a quote or a newline, so that copying it is copying tokens. Every digit is a token of its own.
"""

import json
import random
from pathlib import Path

from tasks import few_shot, lookup, training_completion, training_turn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import CAPITALS, KNOWN_WORDS, Values

VOCAB_SIZE = 1408
PAD, BEGIN, END, SYSTEM, USER, ASSISTANT = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
SPECIAL_TOKENS = [PAD, BEGIN, END, SYSTEM, USER, ASSISTANT]
GLUED = (
    "a an the is are am was of in on at to from and or for with as by that this it its my your you me I not do does "
    "did know what which who where how why when can could would should will have has like live lives value code "
    "capital number numbers count down up between called work job home color favorite list text keys JSON years old "
    "buy want one these greater than more bigger larger plus add sum help there"
).split()
PRE_TOKEN = r" (?:" + "|".join(GLUED) + r")(?![A-Za-z])|[A-Za-z]+|\d| ?[^A-Za-z\d\s]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def corpus(count: int, seed: int = 1):
    """Yield training texts, from the training side of the split only."""
    rng = random.Random(seed)
    known = [*sorted(KNOWN_WORDS), *CAPITALS, *CAPITALS.values()]
    yield from [" ".join(known)] * 200
    values = Values(rng, unseen=False)
    for _ in range(count):
        turn = training_turn(rng)
        yield turn.prompt + "\n" + turn.answer
        if rng.random() < 0.2:
            yield "".join(t.prompt + t.answer for t in few_shot(rng, False, 4).turns)
            sentence = training_completion(rng)
            yield sentence.prompt + sentence.answer
            yield lookup(rng, values, 12)[0].prompt


def build_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer; every byte is a token, so any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(30_000), trainer)
    return tokenizer


def render_chat(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """Return what `CHAT_TEMPLATE` renders, without Jinja."""
    text = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)
    return text + (ASSISTANT if add_generation_prompt else "")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
