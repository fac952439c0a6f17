"""jsg: a JAX/XLA serving stack for language-model programs.

Public names are loaded when they are first read (PEP 562), so `import jsg` costs nothing and loads no JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Anthropic": "jsg.lang.remote.anthropic",
    "CompiledFunction": "jsg.lang.executor.compiled",
    "Engine": "jsg.engine.offline.engine",
    "OpenAI": "jsg.lang.remote.openai",
    "ProgramState": "jsg.lang.program.state",
    "ProgramStateGroup": "jsg.lang.program.branches",
    "REGEX_BOOL": "jsg.lang.words.patterns",
    "REGEX_FLOAT": "jsg.lang.words.patterns",
    "REGEX_INT": "jsg.lang.words.patterns",
    "REGEX_STR": "jsg.lang.words.patterns",
    "Runtime": "jsg.lang.http.runtime",
    "RuntimeEndpoint": "jsg.lang.http.endpoint",
    "SamplingParams": "jsg.types",
    "SglFunction": "jsg.lang.function",
    "all_of": "jsg.lang.control",
    "any_of": "jsg.lang.control",
    "assistant": "jsg.lang.program.primitives",
    "assistant_begin": "jsg.lang.program.primitives",
    "assistant_end": "jsg.lang.program.primitives",
    "cond": "jsg.lang.control",
    "contains": "jsg.lang.control",
    "decide": "jsg.lang.program.primitives",
    "equals": "jsg.lang.control",
    "flush_cache": "jsg.lang.program.defaults",
    "function": "jsg.lang.function",
    "gen": "jsg.lang.program.primitives",
    "gen_int": "jsg.lang.program.primitives",
    "gen_string": "jsg.lang.program.primitives",
    "get_server_info": "jsg.lang.program.defaults",
    "greedy_token_selection": "jsg.lang.tokens.choices",
    "image": "jsg.lang.program.primitives",
    "loop": "jsg.lang.control",
    "matches": "jsg.lang.control",
    "not_": "jsg.lang.control",
    "select": "jsg.lang.program.primitives",
    "separate_reasoning": "jsg.lang.program.primitives",
    "set_default_backend": "jsg.lang.program.defaults",
    "system": "jsg.lang.program.primitives",
    "system_begin": "jsg.lang.program.primitives",
    "system_end": "jsg.lang.program.primitives",
    "token_length_normalized": "jsg.lang.tokens.choices",
    "token_trie": "jsg.lang.tokens.choices",
    "trace_to_html": "jsg.lang.program.gantt",
    "unconditional_likelihood_normalized": "jsg.lang.tokens.choices",
    "unordered": "jsg.lang.control",
    "user": "jsg.lang.program.primitives",
    "user_begin": "jsg.lang.program.primitives",
    "user_end": "jsg.lang.program.primitives",
    "video": "jsg.lang.program.primitives",
}

__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jsg' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
