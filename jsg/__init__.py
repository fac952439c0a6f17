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
    "ProgramState": "jsg.lang.state",
    "ProgramStateGroup": "jsg.lang.branches",
    "REGEX_BOOL": "jsg.lang.patterns",
    "REGEX_FLOAT": "jsg.lang.patterns",
    "REGEX_INT": "jsg.lang.patterns",
    "REGEX_STR": "jsg.lang.patterns",
    "Runtime": "jsg.lang.http.runtime",
    "RuntimeEndpoint": "jsg.lang.http.endpoint",
    "SamplingParams": "jsg.types",
    "SglFunction": "jsg.lang.function",
    "all_of": "jsg.lang.control",
    "any_of": "jsg.lang.control",
    "assistant": "jsg.lang.primitives",
    "assistant_begin": "jsg.lang.primitives",
    "assistant_end": "jsg.lang.primitives",
    "cond": "jsg.lang.control",
    "contains": "jsg.lang.control",
    "decide": "jsg.lang.primitives",
    "equals": "jsg.lang.control",
    "flush_cache": "jsg.lang.defaults",
    "function": "jsg.lang.function",
    "gen": "jsg.lang.primitives",
    "gen_int": "jsg.lang.primitives",
    "gen_string": "jsg.lang.primitives",
    "get_server_info": "jsg.lang.defaults",
    "greedy_token_selection": "jsg.lang.choices",
    "image": "jsg.lang.primitives",
    "loop": "jsg.lang.control",
    "matches": "jsg.lang.control",
    "not_": "jsg.lang.control",
    "select": "jsg.lang.primitives",
    "separate_reasoning": "jsg.lang.primitives",
    "set_default_backend": "jsg.lang.defaults",
    "system": "jsg.lang.primitives",
    "system_begin": "jsg.lang.primitives",
    "system_end": "jsg.lang.primitives",
    "token_length_normalized": "jsg.lang.choices",
    "token_trie": "jsg.lang.choices",
    "trace_to_html": "jsg.lang.gantt",
    "unconditional_likelihood_normalized": "jsg.lang.choices",
    "unordered": "jsg.lang.control",
    "user": "jsg.lang.primitives",
    "user_begin": "jsg.lang.primitives",
    "user_end": "jsg.lang.primitives",
    "video": "jsg.lang.primitives",
}

__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jsg' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
