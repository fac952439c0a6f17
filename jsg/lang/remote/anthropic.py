"""Programs on Anthropic's Messages API."""

from typing import Any, final

from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import MAX_CALLS
from jsg.lang.remote.remote_backend import RemoteBackend, connect, missing_package, options_of
from jsg.lang.remote.retry import RetryPolicy
from jsg.lang.words.backend import OnUnsupported


@final
class Anthropic(RemoteBackend):
    """A backend: `sgl.set_default_backend(sgl.Anthropic("claude-..."))`.

    Args:
        model: The name of the model at the API.
        base_url: The address of a server with the same API, such as `jsg serve`; Anthropic's by default.
        api_key: By default the key in ANTHROPIC_API_KEY; "none" with a `base_url`.
        prefill: Whether the model continues an open turn of the assistant, which newer models do not. With False a gen
            must be the first thing in its turn, or speculation must be on.
        sampling: Whether the model takes temperature, top_p and top_k, which newer models do not.
        timeout_s: Seconds for which the server may be silent.
        max_retries: Further attempts of a call after an error that may pass. The package itself makes none.
        max_calls: The calls that are under way at a time; others wait.
        retry: The number of attempts and the waits between them, in place of `max_retries`.
        on_unsupported: For an argument that the API cannot honour, "error" raises UnsupportedError and "warn" leaves it
            out with a warning, once per argument.
        **client_options: Further arguments of `anthropic.AsyncAnthropic`. An `http_client` given here works only on one
            event loop, that of programs.

    Raises:
        ConfigError: The package `anthropic` is missing, or it refuses the options.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        prefill: bool = True,
        sampling: bool = True,
        timeout_s: float = 600.0,
        max_retries: int = 3,
        max_calls: int = MAX_CALLS,
        retry: RetryPolicy | None = None,
        on_unsupported: OnUnsupported = "error",
        **client_options: Any,
    ):
        try:
            import anthropic

            from jsg.lang.remote.anthropic_wire import MessagesApi
        except ModuleNotFoundError as error:
            raise missing_package("anthropic") from error
        options = options_of(base_url, api_key, timeout_s, client_options)

        def new_client() -> anthropic.AsyncAnthropic:
            return anthropic.AsyncAnthropic(**options)

        clients = connect("anthropic", new_client, anthropic.AsyncAnthropic.close, anthropic.AnthropicError)
        unsupported = Unsupported(f"Anthropic({model!r})", on_unsupported)
        api = MessagesApi(clients, model, unsupported, prefill=prefill, sampling=sampling)
        policy = retry or RetryPolicy(max_retries=max_retries)
        super().__init__(api, unsupported, policy, is_chat=True, model=model, max_calls=max_calls)
