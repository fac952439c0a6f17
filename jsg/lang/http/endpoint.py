"""`jsg.RuntimeEndpoint`: programs on a jsg server.

Prompts are sent as the tokens that they became, so that a continuation or a fork finds them all in the server's cache.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Self, final

from jsg.errors import BackendError, ConfigError, NotFoundError, RequestError
from jsg.lang.http.client import HttpClient
from jsg.lang.http.model import HttpModel
from jsg.lang.program.reading import is_in_notebook
from jsg.lang.streams.loop import shared_loop, wait_for
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.backend import Backend, Session

TIMEOUT_S = 600.0
MAX_RETRIES = 4
PROGRAMS_PATH = "/v1/programs"


@final
class RuntimeEndpoint:
    """A jsg server as the backend of programs.

    Attributes:
        base_url: The address of the server.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        verify: bool | str = True,
        cache_salt: str | None = None,
    ) -> None:
        """Makes no connection yet.

        Args:
            base_url: The address, such as "http://127.0.0.1:30000".
            api_key: A key of the server's `--api-key`.
            timeout_s: Seconds for which the server may be silent during an answer.
            max_retries: How often a call is tried again when the server cannot be reached or is too busy. A call whose
                answer has begun is never tried again.
            verify: For https a file with the certificates to trust; False trusts any.
            cache_salt: Programs share cached prefixes only with programs of the same salt.

        Raises:
            ConfigError: An argument cannot work.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be larger than 0, but got {timeout_s!r}")
        if max_retries < 0:
            raise ConfigError(f"max_retries must be 0 or more, but got {max_retries!r}")
        self._http = HttpClient(base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries, verify=verify)
        self._model = HttpModel(self._http, cache_salt=cache_salt)
        self._common = {} if cache_salt is None else {"cache_salt": cache_salt}
        self.base_url = self._http.base_url

    def as_backend(self) -> Backend:
        """Gives itself."""
        return self

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """Opens an empty session. It ignores the hint, because the prompt is cached anyway."""
        return TokenSession(self._model)

    async def run_graph(
        self,
        graph: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        stream: bool = False,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a whole compiled program, which the server runs. Closing the iterator early cancels the program.

        Args:
            graph: The result of `Graph.to_dict`.
            arguments: The arguments of the program.
            stream: Whether the server sends variables and the text as they grow.
            sampling_params: The defaults of its gens: fields of `ir.SamplingArgs`.

        Yields:
            With `stream` the events {"variable": name, "delta": text}, {"variable": name, "done": True},
            {"text": text} and {"index": i, "call": entry of the timeline}; at the end {"result": ...}, with the answer
            of `POST /v1/programs`.

        Raises:
            JsgError: The program is refused, or the server failed. Errors within the program are in the result.
        """
        body = {"graph": graph, "arguments": arguments, "stream": stream} | self._common
        if sampling_params:
            body["sampling_params"] = dict(sampling_params)
        with self._posting():
            if not stream:
                yield {"result": await self._http.post(PROGRAMS_PATH, body)}
                return
            async with contextlib.aclosing(self._http.events(PROGRAMS_PATH, body)) as events:
                async for event in events:
                    yield event

    async def run_graphs(
        self,
        graph: Mapping[str, Any],
        batch: Sequence[Mapping[str, Any]],
        *,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a whole compiled program once, for many runs. Closing the iterator early cancels those under way.

        Args:
            graph, sampling_params: As in `run_graph`.
            batch: The arguments of each run.

        Yields:
            {"item": i, "result": ...}, as `run_graph` gives it, or {"item": i, "failure": ...}, as each run ends.

        Raises:
            JsgError: All of it is refused, or the server failed.
        """
        body = {"graph": graph, "batch": list(batch), "stream": True} | self._common
        if sampling_params:
            body["sampling_params"] = dict(sampling_params)
        with self._posting():
            async with contextlib.aclosing(self._http.events(PROGRAMS_PATH, body)) as events:
                async for event in events:
                    if "item" in event:
                        yield event

    @contextlib.contextmanager
    def _posting(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            raise BackendError(
                f"{self.base_url} must be a jsg server to run programs that are sent whole, but it has no "
                f"{PROGRAMS_PATH}; run the program call by call, with where='here'",
                404,
            ) from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Posts to any endpoint of the server; gives the JSON of the answer. Raises JsgError."""
        return await self._http.post(path, body)

    def flush_cache(self) -> Any:
        """Forgets cached prefixes; gives False while requests run. Blocks, but in a coroutine it must be awaited.

        Raises:
            JsgError: The server failed, or the key may not do it.
        """
        flushing = self._flush()
        if asyncio._get_running_loop() is not None and not is_in_notebook():
            return flushing
        return wait_for(shared_loop().submit(flushing))

    async def _flush(self) -> bool:
        try:
            await self._http.post("/flush_cache", {})
        except RequestError:
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        """Gives the options of the server, its model and its counters. Raises JsgError."""
        return await self._http.get("/get_server_info")

    def get_server_info(self) -> dict[str, Any]:
        """Does what `server_info` says. Blocks."""
        return wait_for(shared_loop().submit(self.server_info()))

    @property
    def model_info(self) -> dict[str, Any]:
        """The model of the server: `model_path`, `tokenizer_path` and its sizes. Blocks; raises JsgError."""
        return wait_for(shared_loop().submit(self._http.get("/get_model_info")))

    def get_model_name(self) -> str:
        """Gives the `model_path` of `model_info`. Blocks; raises JsgError."""
        return self.model_info["model_path"]

    async def close(self) -> None:
        """Closes all connections, of all event loops, those of programs too. A second call does nothing.

        A later call connects again.
        """
        await self._http.close()

    def shutdown(self) -> None:
        """Does the same as `close`, for code that is no coroutine. A `with` block ends with it."""
        self._http.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
