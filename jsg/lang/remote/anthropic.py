"""Programs on Anthropic's Messages API."""

from typing import Any, final

from jsg.lang.backend import OnUnsupported
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.remote_backend import RemoteBackend, connect, missing_package, options_of
from jsg.lang.remote.retry import RetryPolicy


@final
class Anthropic(RemoteBackend):
    """A backend: `sgl.set_default_backend(sgl.Anthropic("claude-..."))`.

    Args:
        model: Its name at the API.
        base_url: Of a server that speaks the same, such as `jsg serve`; Anthropic's own by default.
        api_key: By default what the `anthropic` package finds in ANTHROPIC_API_KEY; "none" with a `base_url`.
        prefill: The model goes on in a turn of the assistant that has begun. Newer models do not; with False, or where
            such a call is refused, a gen must be the first thing in its turn, or speculation must be on.
        sampling: The model takes temperature, top_p and top_k. Newer models do not.
        timeout_s: Longest silence of the server, in seconds.
        max_retries: Further attempts of a call that failed and may do better; the package itself makes none.
        retry: The waits between them, in place of `max_retries`.
        on_unsupported: What happens with an argument that the API cannot honour: "error" raises UnsupportedError,
            "warn" leaves it out with a warning, once per argument.
        **client_options: Further arguments of `anthropic.AsyncAnthropic`. A `http_client` of one's own works on one
            event loop only, which is that of programs.

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
        super().__init__(api, unsupported, policy, is_chat=True, model=model)
