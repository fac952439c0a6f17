"""A small interface for every engine. Only its own class imports an engine, because they are in different Pythons."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.constrained.cases import Case


class Unsupported(Exception):
    """The engine has no such grammar."""


class Adapter(Protocol):
    """The interface to one engine. Compiled grammars and matchers are the engine's own objects."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None: ...

    def compile(self, case: Case) -> Any:
        """Compiles a grammar, without the engine's caches where they can be switched off."""
        ...

    def matcher(self, compiled: Any) -> Any:
        """A matcher at the beginning of a text."""
        ...

    def fill(self, matcher: Any) -> None:
        """Writes the mask of allowed tokens into `self.mask`."""
        ...

    def accept(self, matcher: Any, token: int) -> None:
        """Advances by a token."""
        ...

    def is_allowed(self, token: int) -> bool:
        """Whether the last mask allows the token."""
        ...


def _bit(words: np.ndarray, token: int) -> bool:
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


class Jsg:
    """This project."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        from jsg.constrained.compiler import compile_grammar
        from jsg.constrained.run.vocab import Vocabulary
        from jsg.types import GrammarSpec

        self._compile, self._spec = compile_grammar, GrammarSpec
        self._vocabulary = Vocabulary(tokens, special_ids, [eos_id])
        self.mask = np.zeros(self._vocabulary.num_words, np.uint32)

    def compile(self, case: Case) -> Any:
        if case.kind == "json":
            return self._compile(self._spec("json_schema", "true"), self._vocabulary)
        return self._compile(self._spec(case.kind, case.text), self._vocabulary)  # pyright: ignore[reportArgumentType]

    def matcher(self, compiled: Any) -> Any:
        return compiled.new_masker()

    def fill(self, matcher: Any) -> None:
        if not matcher.fill_mask(self.mask):
            self.mask.fill(0xFFFFFFFF)

    def accept(self, matcher: Any, token: int) -> None:
        assert matcher.accept(token)

    def is_allowed(self, token: int) -> bool:
        return _bit(self.mask, token)


class LlGuidance:
    """llguidance, with separators fixed for JSON Schema."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        import llguidance
        import llguidance.numpy
        import mistral_common
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        # Inside forced text llguidance allows only the tokens that the tokenizer would write, so it needs the real one.
        tekken = Tekkenizer.from_file(str(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"))

        class Described:
            """The attributes of a tokenizer that `TokenizerWrapper` reads."""

            eos_token_id, bos_token_id = eos_id, None

            def __init__(self) -> None:
                self.tokens, self.special_token_ids = list(tokens), list(special_ids)

            def __call__(self, text: bytes) -> list[int]:
                return tekken.encode(text.decode(errors="replace"), bos=False, eos=False)

        self._module, self._fill = llguidance, llguidance.numpy.fill_next_token_bitmask
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Described()), n_vocab=len(tokens))
        self.mask = llguidance.numpy.allocate_token_bitmask(1, len(tokens))

    def _grammar(self, case: Case) -> str:
        matcher = self._module.LLMatcher
        if case.kind == "json":
            return matcher.grammar_from_lark('start: %json {"x-guidance": ' + _SEPARATORS + "}")
        if case.kind == "json_schema":
            schema = json.loads(case.text) | {"x-guidance": json.loads(_SEPARATORS)}
            return matcher.grammar_from_json_schema(json.dumps(schema))
        return matcher.grammar_from_regex(case.text) if case.kind == "regex" else matcher.grammar_from_lark(case.lark)

    def compile(self, case: Case) -> Any:
        matcher = self._module.LLMatcher(self._tokenizer, self._grammar(case))
        if matcher.is_error():
            raise Unsupported(matcher.get_error())
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any) -> None:
        self._fill(matcher, self.mask, 0)

    def accept(self, matcher: Any, token: int) -> None:
        assert matcher.consume_token(token), matcher.get_error()

    def is_allowed(self, token: int) -> bool:
        return _bit(self.mask[0].view(np.uint32), token)


_SEPARATORS = '{"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}'


class XGrammar:
    """xgrammar, with separators fixed for JSON Schema, one thread, nothing cached."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        import xgrammar  # pyright: ignore[reportMissingImports]

        self._module = xgrammar
        info = xgrammar.TokenizerInfo(
            [b"" if i in set(special_ids) else token for i, token in enumerate(tokens)]
            if len(special_ids) < 100
            else list(tokens),
            vocab_type=xgrammar.VocabType.RAW,
            stop_token_ids=[eos_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, len(tokens))
        self._words = self.mask.numpy()[0].view(np.uint32)

    def compile(self, case: Case) -> Any:
        compiler = self._compiler
        if case.kind == "json":
            return compiler.compile_builtin_json_grammar()
        if case.kind == "json_schema":
            return compiler.compile_json_schema(case.text, any_whitespace=False, separators=(", ", ": "))
        if case.kind == "regex":
            return compiler.compile_regex(case.text)
        return compiler.compile_grammar(case.text)

    def matcher(self, compiled: Any) -> Any:
        return self._module.GrammarMatcher(compiled)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self.mask)

    def accept(self, matcher: Any, token: int) -> None:
        assert matcher.accept_token(token)

    def is_allowed(self, token: int) -> bool:
        return _bit(self._words, token)


class Outlines:
    """outlines_core. Its index has one entry for each state and token, so large grammars take minutes and gigabytes."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        import outlines_core  # pyright: ignore[reportMissingImports]

        self._module = outlines_core
        ids: dict[bytes, list[int]] = {}
        for i, token in enumerate(tokens):
            if token and i != eos_id:
                ids.setdefault(token, []).append(i)
        self._vocabulary = outlines_core.Vocabulary(eos_id, ids)
        self._eos_id = eos_id
        self.mask = np.zeros((len(tokens) + 31) // 32, np.uint32)

    def compile(self, case: Case) -> Any:
        if case.kind == "regex":
            return self._module.Index(case.text, self._vocabulary)
        if case.kind == "json_schema":
            from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports]

            return self._module.Index(build_regex_from_schema(case.text), self._vocabulary)
        raise Unsupported("regular languages only")

    def matcher(self, compiled: Any) -> Any:
        return self._module.Guide(compiled)

    def fill(self, matcher: Any) -> None:
        matcher.write_mask_into(self.mask.ctypes.data, len(self.mask), 4)

    def accept(self, matcher: Any, token: int) -> None:
        matcher.advance(token, return_tokens=False)  # otherwise it would list every token that may follow

    def is_allowed(self, token: int) -> bool:
        return _bit(self.mask, token)


ENGINES: dict[str, type[Adapter]] = {
    "jsg": Jsg,
    "llguidance": LlGuidance,
    "xgrammar": XGrammar,
    "outlines_core": Outlines,
}
PACKAGES = {"jsg": "jsg", "llguidance": "llguidance", "xgrammar": "xgrammar", "outlines_core": "outlines_core"}
