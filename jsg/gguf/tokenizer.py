"""The tokenizer in the metadata of a GGUF file, as the files that a model directory has.

A vocabulary of `gpt2`, byte-level BPE, becomes a `tokenizer.json`, and one of `llama`, sentencepiece, a
`tokenizer.model`. So jsg reads both as it reads those of any other model.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jsg.errors import ModelError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
"""Kinds of tokens that are not of the text. Their numbers are sentencepiece's."""
_SPACE = "▁"
_APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*%s"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_WITH_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


class _Cut(NamedTuple):
    """How texts are cut into words.

    Attributes:
        pattern: The words; None for those of GPT-2.
        digits: Whether each digit is cut off first.
        is_composed: Whether texts become NFC.
        skips_merges: Whether a word that is a token is that token, without merges.
        adds_bos: Whether BOS comes first if the file does not say it.
    """

    pattern: str | None = None
    digits: bool = False
    is_composed: bool = False
    skips_merges: bool = False
    adds_bos: bool = False


_THREE_DIGITS = rf"{_APOSTROPHES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_CUTS = {
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0": _Cut(_THREE_DIGITS, skips_merges=True, adds_bos=True),
    "dbrx smaug-bpe": _Cut(_THREE_DIGITS),
    "qwen2 deepseek-r1-qwen megrez kormo": _Cut(rf"{_APOSTROPHES}|{_WORDS}|\p{{N}}|{_REST}", is_composed=True),
    "gpt-4o kanana2": _Cut(rf"{_CASED % (_APOSTROPHES + '?', _APOSTROPHES + '?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"),
    "tekken": _Cut(rf"{_CASED % ('', '')}|\p{{N}}|{_REST_WITH_SLASH}", skips_merges=True, adds_bos=True),
    "smollm starcoder refact": _Cut(digits=True),
    "gpt-2": _Cut(),
}
_CUT_OF = {name: cut for names, cut in _CUTS.items() for name in names.split()}
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> <|end_of_text|> <eos> "
    "<｜end▁of▁sentence｜>".split()
)
"""What ends an answer, whether the file says so or not: files name one such token only."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not take the spaces after them. No file has this, so llama.cpp lists them too."""


class Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens: Their written forms.
        kinds: The kind of each.
    """

    def __init__(self, entries: Mapping[str, Any]):
        """Raises ModelError if the metadata has no vocabulary that jsg reads."""
        self._entries = entries
        self.model = self.get("model")
        if self.model not in ("gpt2", "llama"):
            raise ModelError(
                "tokenizer.ggml.model of a GGUF file must be gpt2 or llama, but is "
                f"{self.model!r}; take the checkpoint in safetensors that it was made of"
            )
        listed = self._list("tokens")
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(listed)]
        self.kinds = [int(kind) for kind in self._list("token_type", [1] * len(listed))]
        if len(self.kinds) != len(listed) or len(set(self.tokens)) != len(listed):
            raise ModelError(
                "tokenizer.ggml.tokens of a GGUF file must have each token once, and tokenizer.ggml.token_type a "
                "number for each; download it again"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """An entry about the tokenizer."""
        return self._entries.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, default: Sequence[Any] | None = None) -> Sequence[Any]:
        value = self.get(key, default)
        if value is None or isinstance(value, str | int | float):
            raise ModelError(f"a GGUF file must have the list tokenizer.ggml.{key}; download it again")
        return value

    def token_id(self, name: str) -> int | None:
        """The id in an entry such as `bos_token_id`; None if it is absent or of no token."""
        token_id = self.get(f"{name}_token_id")
        return token_id if type(token_id) is int and 0 <= token_id < len(self.tokens) else None

    def special_ids(self) -> dict[str, Any]:
        """The fields of `config.json` that name tokens. A null says that there is none."""
        ends = [self.token_id(name) for name in ("eos", "eot", "eom")]
        ends += [i for i, token in enumerate(self.tokens) if token in _ENDS and self.kinds[i] == CONTROL]
        found = [token_id for token_id in dict.fromkeys(ends) if token_id is not None]
        return {"bos_token_id": self.token_id("bos"), "eos_token_id": found or None}

    def files(self, architecture: str) -> dict[str, bytes]:
        """The files of the tokenizer, by name. Raises ModelError for what jsg does not read."""
        cut = _Cut(adds_bos=True)
        if self.model == "gpt2":
            name = self.get("pre")
            if name not in _CUT_OF:
                raise ModelError(
                    f"tokenizer.ggml.pre of a GGUF file must be one of {', '.join(_CUT_OF)}, but is {name!r}; convert "
                    "the model again with a newer llama.cpp, or take the checkpoint in safetensors"
                )
            cut = _CUT_OF[name]
            files = {"tokenizer.json": json.dumps(self._byte_level(cut), ensure_ascii=False).encode()}
        else:
            files = {"tokenizer.model": self._sentencepiece(architecture == "gemma3")}
        bos, eos = (self.token_id(name) for name in ("bos", "eos"))
        config = {
            "bos_token": None if bos is None else self.tokens[bos],
            "eos_token": None if eos is None else self.tokens[eos],
            "add_bos_token": bool(self.get("add_bos_token", cut.adds_bos)),
            "add_eos_token": bool(self.get("add_eos_token", False)),
            "add_prefix_space": self._puts_space,
            "added_tokens_decoder": self._added(architecture == "phi3") if self.model == "llama" else {},
            "chat_template": self._entries.get("tokenizer.chat_template"),
        }
        return files | {"tokenizer_config.json": json.dumps(config).encode()}

    @property
    def _puts_space(self) -> bool:
        return bool(self.get("add_space_prefix", True))

    def _byte_level(self, cut: _Cut) -> dict[str, Any]:
        vocabulary = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] != UNUSED}
        merges = [merge.split(" ") if isinstance(merge, str) else [] for merge in self._list("merges")]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
                raise ModelError(
                    "tokenizer.ggml.merges of a GGUF file must be pairs of tokens that make a token, but has "
                    f"{' '.join(merge)[:40]!r}; download it again"
                )
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": not cut.pattern,
        }
        first = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
        steps = [first] if cut.pattern else [{"type": "Digits", "individual_digits": True}] * cut.digits
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": token, **flags, "special": self.kinds[i] == CONTROL}
                for i, token in enumerate(self.tokens)
                if self.kinds[i] in (CONTROL, USER_DEFINED)
            ],
            "normalizer": {"type": "NFC"} if cut.is_composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": cut.skips_merges},
        }

    def _added(self, strips: bool) -> dict[str, Any]:
        """The flags of special tokens, and of others that cut a text, so that the next part has a space again."""
        added = {}
        for i, token in enumerate(self.tokens):
            is_special = self.kinds[i] in (CONTROL, UNKNOWN)
            cuts = self.kinds[i] == USER_DEFINED and self._puts_space and _SPACE not in token
            if cuts or (strips and is_special):
                rstrip = strips and token not in _NOT_STRIPPED
                added[str(i)] = {"content": token, "special": is_special, "normalized": False, "rstrip": rstrip}
        return added

    def _sentencepiece(self, is_gemma: bool) -> bytes:
        """A model of sentencepiece. Gemma's merges are in the order of its tokens, whatever their scores."""
        scores = range(0, -len(self.tokens), -1) if is_gemma else self._list("scores")
        if len(scores) != len(self.tokens):
            raise ModelError(
                "tokenizer.ggml.scores of a GGUF file must have a number for each token; download it again"
            )
        pieces = []
        for token, score, kind in zip(self.tokens, scores, self.kinds, strict=True):
            spelled = token.replace(" ", _SPACE) if kind == USER_DEFINED else token
            piece = _field(1, spelled) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + _field(3, kind)
            pieces.append(_field(1, piece))
        roles = {45: self._one_unknown(), 46: self.token_id("bos"), 47: self.token_id("eos")}
        named = [_field(number, self.tokens[i]) for number, i in roles.items() if i is not None]
        trainer = b"".join([_field(3, 2), _field(35, 1), *named])  # BPE, whose unknown characters are bytes
        normalizer = _field(1, "identity") + _field(3, int(self._puts_space)) + _field(4, 0) + _field(5, 1)
        return b"".join([*pieces, _field(2, trainer), _field(3, normalizer)])

    def _one_unknown(self) -> int:
        unknown = [i for i, kind in enumerate(self.kinds) if kind == UNKNOWN]
        if len(unknown) != 1 or self.kinds.count(6) != 256:
            raise ModelError(
                "tokenizer.ggml.token_type of a GGUF file must mark one unknown token and 256 bytes, but marks "
                f"{len(unknown)} and {self.kinds.count(6)}; take the checkpoint in safetensors"
            )
        return unknown[0]


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of protobuf: an integer, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    encoded = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(encoded)) + encoded


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
