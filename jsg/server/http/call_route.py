"""Endpoints that are called without FastAPI's way of finding their arguments, which takes longer than many answers."""

from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class CallRoute(APIRoute):
    """A route that finds the arguments of its endpoint itself, where they are its body and what depends on the request.

    Such an endpoint gives a `Response`. The others, which have parameters in the path or the query, are FastAPI's.
    """

    @property
    def is_direct(self) -> bool:
        """Whether the route finds the arguments itself."""
        asked = self.dependant
        is_of_request = all(
            not each.dependencies and each.request_param_name is not None for each in asked.dependencies
        )
        return len(asked.body_params) == 1 and is_of_request and not (asked.path_params or asked.query_params)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request of this route."""
        if not self.is_direct:
            return super().get_route_handler()
        asked = self.dependant
        [body] = asked.body_params
        needs = [(str(each.name), cast(Any, each.call)) for each in asked.dependencies]

        async def answer(request: Request) -> Response:
            arguments: dict[str, Any] = {name: await call(request) for name, call in needs}
            if asked.request_param_name is not None:
                arguments[asked.request_param_name] = request
            arguments[body.name] = await request.json() if await request.body() else body.field_info.get_default()
            return await self.endpoint(**arguments)

        return answer
