"""The table of fields and values that are taken without an effect, because no answer is worse without them.

Clients send them to every server. An answer that had a field of this table says so in the header `x-jsg-warnings`, and
`/generate` also in `meta_info.warnings`; the log says it once. With `--strict-fields` all of them are refused. What
would change an answer is in no table here: bodies refuse it by name in `REFUSED`.
"""

from collections.abc import Mapping, Set
from typing import Any

from jsg.server.http.field_rules import FieldRules

NOT_READ = "the model's chat template does not read it; leave it out"
_CACHED_ANYWAY = "every prefix is cached, and the least recently used is evicted first; leave it out"
_ONE_TIER = "there is one tier; leave it out"
_NOT_ROUTED = "the server chooses the engine of each request; leave it out"

_FIELDS: Mapping[str, str] = {
    "custom_labels": "the options of the server say what is logged; leave it out",
    "guided_decoding_backend": "there is only one grammar backend; leave it out",
    "kv_router_hint": _NOT_ROUTED,
    "phase": "chat templates know no phases of an answer; leave it out",
    "prompt_cache_breakpoint": _CACHED_ANYWAY,
    "prompt_cache_options": _CACHED_ANYWAY,
    "reasoning": "thoughts are cut from answers in chats only; leave it out",
    "reasoning_effort": "there is no chat template that could read it; leave it out",
    "routing_key": _NOT_ROUTED,
    "service_tier": _ONE_TIER,
    "store": "completions are not stored; leave it out",
    "verbosity": "ask for it in a message",
}
"""Field that has no effect, whatever its value is → the reason, or what to do instead."""

_CLEARING = {"type": "clear_thinking_20251015"}

VALUES: Mapping[str, tuple[Any, ...]] = {
    "context": ("all_turns", "current_turn"),
    "context_management": ({"edits": [_CLEARING]}, {"edits": [{**_CLEARING, "keep": "all"}]}),
    "defer_loading": (True,),
    "mode": ("pro",),
    "prompt_cache_retention": ("24h", "in-memory"),
    "service_tier": ("flex", "priority", "scale", "standard", "standard_only"),
    "speed": ("fast",),
    "store": (True,),
    "thread": ({"type": "create"},),
    "truncation": ("auto",),
}
"""Field of which only these values have no effect, and others are supported or refused → the values."""

_RUN_ELSEWHERE = "the server runs no tools; the model calls functions of the client"
_RAN_ELSEWHERE = "another server ran it, and what came of it is in the answer behind it"
_NOT_OURS = "another server wrote it, and only that can read it; send the conversation itself"

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
            "image_generation",
        ),
        _RUN_ELSEWHERE,
    ),
    "tool_search": "the model sees every tool of the request",
    **dict.fromkeys(("web_search_call", "image_generation_call", "tool_search_call"), _RAN_ELSEWHERE),
    "tool_search_output": "the model sees every tool of the request",
    **dict.fromkeys(("compaction", "compaction_summary", "context_compaction"), _NOT_OURS),
}
"""Type of a tool or an input item of `/v1/responses` that is left out → the reason."""

_VARIABLES = frozenset(("enable_thinking", "thinking", "reasoning_effort"))
"""Variables of a chat template that have no effect where the template does not read them."""


def harmless(*names: str) -> dict[str, str]:
    """The part of the table for a body that has these fields."""
    return {name: _FIELDS[name] for name in names}


def template_variables(given: Mapping[str, Any] | None, readable: Set[str], rules: FieldRules) -> dict[str, Any]:
    """The variables of a chat template that a client chose, without those that have no effect on this template."""
    kwargs = dict(given or {})
    for name in sorted(_VARIABLES & kwargs.keys() - readable):
        if not rules.is_strict:  # what is left is refused with all variables that the template does not read
            rules.pass_over(f"chat_template_kwargs.{name}", NOT_READ)
            del kwargs[name]
    return kwargs
