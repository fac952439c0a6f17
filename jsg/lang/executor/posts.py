"""Runs of a batch that go to a server together: those that begin at about the same time are one post."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, cast, final

from jsg.errors import AbortedError, BackendError, RateLimitError
from jsg.lang.executor.runs import RemoteState
from jsg.lang.words.backend import Backend

MAX_RUNS = 256  # of one post
AT_ONCE = 512  # runs of a batch that are under way at a time, unless its caller says otherwise
COLLECTED_S = 0.002  # in which runs come together


class BatchBackend(Protocol):
    """A backend that runs a graph many times."""

    def run_graphs(
        self,
        graph: Mapping[str, Any],
        batch: Sequence[Mapping[str, Any]],
        *,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a graph once; gives {"item": index, "result" or "failure": ...} as each run ends."""
        ...


@final
class Posts:
    """Sends the runs of one batch. All methods are called on the loop of the backend."""

    def __init__(self, backend: Backend, graph: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> None:
        self._backend = cast(BatchBackend, backend)
        self._graph = graph
        self._sampling_params = sampling_params
        self._waiting: list[tuple[RemoteState, Mapping[str, Any]]] = []
        self._sent: set[asyncio.Task[None]] = set()

    def add(self, state: RemoteState, arguments: Mapping[str, Any]) -> None:
        """Sends a run with the others that come in the next moment."""
        state.join_post(lambda: None)
        self._waiting.append((state, arguments))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(COLLECTED_S, self._send_all)

    def _send_all(self) -> None:
        waiting = [(state, arguments) for state, arguments in self._waiting if not state.ended.is_done]
        self._waiting = []
        for start in range(0, len(waiting), MAX_RUNS):
            task = asyncio.get_running_loop().create_task(self._send(waiting[start : start + MAX_RUNS]))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _send(self, runs: Sequence[tuple[RemoteState, Mapping[str, Any]]]) -> None:
        states = [state for state, _ in runs]
        task = asyncio.current_task()
        assert task is not None

        def leave() -> None:
            if all(state.ended.is_done for state in states):
                task.cancel()

        for state in states:
            state.join_post(leave)
        error: BaseException = BackendError("the server ended its answer without the program's result")
        try:
            leave()  # those that were cancelled meanwhile
            while True:
                try:
                    await self._post(runs)
                    break
                except RateLimitError:  # the key has no room for so many posts
                    others = self._sent - {task}
                    if not others:
                        raise
                    await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            error = AbortedError("the program was cancelled")
        except Exception as failure:
            error = failure
        finally:
            for state in states:
                state.end_with(error)

    async def _post(self, runs: Sequence[tuple[RemoteState, Mapping[str, Any]]]) -> None:
        batch = [arguments for _, arguments in runs]
        answers = self._backend.run_graphs(self._graph, batch, sampling_params=self._sampling_params)
        async with contextlib.aclosing(answers) as events:
            async for event in events:
                runs[event["item"]][0].end_with(event)
