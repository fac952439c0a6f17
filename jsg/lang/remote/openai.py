"""Programs on OpenAI's APIs, and on every server that offers them."""

from typing import Any, Literal, final

from jsg.errors import ConfigError
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import MAX_CALLS
from jsg.lang.remote.choosing import Encoder
from jsg.lang.remote.dialects import Dialect, dialect_of
from jsg.lang.remote.remote_backend import RemoteBackend, connect, missing_package, options_of
from jsg.lang.remote.retry import RetryPolicy
from jsg.lang.words.backend import OnUnsupported

TEXT_MODELS = frozenset({"gpt-3.5-turbo-instruct", "gpt-3.5-turbo-instruct-0914", "davinci-002", "babbage-002"})
"""Models of OpenAI's own that have no chat API."""


@final
class OpenAI(RemoteBackend):
    """A backend: `sgl.set_default_backend(sgl.OpenAI("gpt-4o-mini"))`.

    Args:
        model: The name of the model at the API.
        base_url: The address of a server with the same API, such as `http://127.0.0.1:30000/v1`; OpenAI's by default.
        api_key: By default the key in OPENAI_API_KEY; "none" with a `base_url`.
        api: "chat" or "completions"; by default "completions" for those models of OpenAI that have no chat API.
        is_chat_model: The same choice under the name that SGLang gives it.
        dialect: The fields that the server takes beyond OpenAI's: "openai", "compatible" (the default with a
            `base_url`), "jsg", "sglang", "vllm", or a `jsg.lang.remote.dialects.Dialect`.
        tokenizer: The tokenizer of the model, with `encode(text)`. With it `select` on a completions API finds choices
            that are not among the likeliest tokens.
        timeout_s: Seconds for which the server may be silent.
        max_retries: Further attempts of a call after an error that may pass. The package itself makes none.
        max_calls: The calls that are under way at a time; others wait.
        retry: The number of attempts and the waits between them, in place of `max_retries`.
        on_unsupported: For an argument that the API cannot honour, "error" raises UnsupportedError and "warn" leaves it
            out with a warning, once per argument.
        **client_options: Further arguments of `openai.AsyncOpenAI`. With a `base_url` OPENAI_ORG_ID and
            OPENAI_PROJECT_ID are not sent; `organization` and `project` are, if given here. An `http_client` given here
            works only on one event loop, that of programs.

    Raises:
        ConfigError: The package `openai` is missing, or it refuses the options (no key, ...).
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api: Literal["chat", "completions"] | None = None,
        is_chat_model: bool | None = None,
        dialect: Dialect | str | None = None,
        tokenizer: Encoder | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 3,
        max_calls: int = MAX_CALLS,
        retry: RetryPolicy | None = None,
        on_unsupported: OnUnsupported = "error",
        **client_options: Any,
    ):
        if api not in (None, "chat", "completions"):
            raise ConfigError(
                f'api must be "chat" or "completions", but got {api!r}; leave it out to choose by the model'
            )
        if is_chat_model is not None:
            api = api or ("chat" if is_chat_model else "completions")
        is_chat = api == "chat" or (api is None and model not in TEXT_MODELS)
        try:
            import openai

            from jsg.lang.remote.openai_wire import ChatApi, TextApi
        except ModuleNotFoundError as error:
            raise missing_package("openai") from error
        options = options_of(base_url, api_key, timeout_s, client_options)

        def new_client() -> openai.AsyncOpenAI:
            client = openai.AsyncOpenAI(**options)
            if base_url is not None:  # another server must not see the account at OpenAI
                client.organization = client_options.get("organization")
                client.project = client_options.get("project")
            return client

        clients = connect("openai", new_client, openai.AsyncOpenAI.close, openai.OpenAIError)
        unsupported = Unsupported(f"OpenAI({model!r})", on_unsupported)
        made = (ChatApi if is_chat else TextApi)(clients, model, dialect_of(dialect, base_url), unsupported)
        policy = retry or RetryPolicy(max_retries=max_retries)
        super().__init__(
            made, unsupported, policy, is_chat=is_chat, model=model, encoder=tokenizer, max_calls=max_calls
        )
