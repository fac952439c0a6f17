"""Programs on Anthropic's Messages API."""

from typing import Any, Self, final

from jsg.errors import ConfigError
from jsg.lang.backend import OnUnsupported, Session
from jsg.lang.per_loop import PerLoop
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.openai import missing_package
from jsg.lang.remote.remote_backend import RemoteBackend
from jsg.lang.remote.retry import RetryPolicy
from jsg.lang.remote.usage import Usage


@final
class Anthropic:
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
        options = {
            "base_url": base_url,
            "api_key": api_key or (None if base_url is None else "none"),
            "timeout": timeout_s,
            "max_retries": 0,
            **client_options,
        }

        def new_client() -> anthropic.AsyncAnthropic:
            return anthropic.AsyncAnthropic(**options)

        try:
            new_client()
        except (anthropic.AnthropicError, TypeError) as error:
            raise ConfigError(f"the anthropic package cannot be used like this: {error}") from error
        clients = PerLoop(new_client, anthropic.AsyncAnthropic.close)
        unsupported = Unsupported(f"Anthropic({model!r})", on_unsupported)
        api = MessagesApi(clients, model, unsupported, prefill=prefill, sampling=sampling)
        policy = retry or RetryPolicy(max_retries=max_retries)
        self._remote = RemoteBackend(api, unsupported, policy, is_chat=True, model=model)

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """As `Backend.open`."""
        return self._remote.open(num_api_spec_tokens)

    def usage(self) -> Usage:
        """What all calls cost so far, and what speculation saved."""
        return self._remote.usage()

    async def flush_cache(self) -> bool:
        """Raises UnsupportedError: the API gives no access to its cache."""
        return await self._remote.flush_cache()

    async def server_info(self) -> dict[str, Any]:
        """The model, and the models on offer."""
        return await self._remote.server_info()

    async def close(self) -> None:
        """Closes all connections, those of programs too, on whatever loop they are. A second time does nothing.

        Not the end: what is asked of it afterwards connects again.
        """
        await self._remote.close()

    def shutdown(self) -> None:
        """`close` for code that is no coroutine. A `with` block ends with it."""
        self._remote.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
