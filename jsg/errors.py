"""Every exception jsg raises on purpose.

    JsgError
    ├── ConfigError              a knob or a combination of knobs that cannot work
    ├── ModelError               the model directory: missing, truncated, of an unknown family
    ├── MemoryPlanError          weights and KV pool do not fit in the memory asked for
    ├── RequestError             the client's fault; HTTP 400
    │   ├── ContextLengthError   prompt and new tokens exceed the context
    │   └── GrammarError         a grammar that is wrong or not supported
    ├── NotFoundError            the client named something that is not here; HTTP 404
    ├── QueueFullError           too many requests wait; HTTP 503
    ├── ForbiddenCompileError    a compile after warm-up under --forbid-compile
    └── EngineDeadError          the engine process ended; HTTP 503

A message gives the rule, what was received, and what to do. It never carries a path of the server, an address or a
trace.
"""


class JsgError(Exception):
    """The root: catching it catches everything jsg raises on purpose."""


class ConfigError(JsgError):
    """A knob or a combination of knobs that cannot work."""


class ModelError(JsgError):
    """A model directory that is missing, damaged or of an unknown family."""


class MemoryPlanError(JsgError):
    """Weights and KV pool do not fit in the memory that was asked for."""


class RequestError(JsgError):
    """A request that breaks a rule.

    Attributes:
        param: The name of the offending field as the client wrote it, or None.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and new tokens exceed the context length."""


def check_length(num_prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Raises ContextLengthError when a request is longer than `limit` tokens, the most that can ever run."""
    if num_prompt_tokens + max_new_tokens > limit:
        raise ContextLengthError(
            f"prompt and new tokens together must be at most {limit}, but got {num_prompt_tokens} + {max_new_tokens}; "
            "shorten the prompt or lower max_new_tokens",
            param="max_new_tokens",
        )


class GrammarError(RequestError):
    """A grammar that is wrong or uses something that is not supported."""


class NotFoundError(JsgError):
    """The client named something (a model, a request) that is not here."""


class QueueFullError(JsgError):
    """More requests wait than `--max-queued-requests` allows."""


class ForbiddenCompileError(JsgError):
    """A trace or compile after warm-up while `--forbid-compile` is set."""


class EngineDeadError(JsgError):
    """The engine process ended; nothing can be generated any more."""
