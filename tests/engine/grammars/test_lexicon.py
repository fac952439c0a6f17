"""What grammars need of a model: special tokens around calls of tools, and models without a tokenizer."""

import pathlib

import pytest
import tokenizers

from jsg.constrained.compiler import compile_grammar
from jsg.engine.grammars.kernel_folder import KernelFolder
from jsg.engine.grammars.lexicon import LexiconLoader
from jsg.errors import JsgError, RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.speech.dialects import DIALECTS
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag
from jsg.types import GrammarSpec
from tests.server.byte_tokenizer import write_byte_tokenizer

SPECIAL = ("<s>", "<|im_end|>", "[TOOL_CALLS]")
CALL = '[{"name": "add", "arguments": {"a": 1}}]'


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    write_byte_tokenizer(tmp_path, None)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_marker_that_is_a_special_token_stands_as_one_where_the_grammar_names_it(directory, compile_cache_dir: str):
    lexicon = LexiconLoader(directory, 512, frozenset({257}), KernelFolder(pathlib.Path(compile_cache_dir))).get()
    tokenizer, vocabulary = load_tokenizer(directory), lexicon.vocabulary
    marker = tokenizer.token_id("[TOOL_CALLS]")
    assert marker in tokenizer.special_ids
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    masker = compile_grammar(call_of(Tool("add", None, schema)), vocabulary).new_masker()
    assert not masker.accept(tokenizer.encode("[", parse_special=False)[0]), "plain characters are not the token"
    assert masker.accept(marker)
    for token in tokenizer.encode(CALL, parse_special=False, add_special_tokens=False):
        assert masker.accept(token)
    assert masker.is_complete()
    text = compile_grammar(GrammarSpec("regex", "(?s:.*)"), vocabulary).new_masker()
    assert not text.accept(marker), "no text holds a special token"


def call_of(tool: Tool) -> GrammarSpec:
    return tools_to_structural_tag([tool], "required", DIALECTS["mistral"], parallel=False, special_tokens=SPECIAL)


def test_why_it_could_not_be_loaded_is_in_the_log_that_the_error_names(tmp_path: pathlib.Path, caplog):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(JsgError, match="see its log"):
        LexiconLoader(tmp_path, 512, frozenset(), KernelFolder(None)).get()
    assert "a vocabulary must have a token" in caplog.text


def test_a_model_without_a_tokenizer_refuses_grammars_and_says_why(tmp_path):
    loader = LexiconLoader(tmp_path, 512, frozenset(), KernelFolder(None))
    loader.wait()
    with pytest.raises(RequestError, match="needs the model's tokenizer"):
        loader.get()
