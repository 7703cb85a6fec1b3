"""Routes whose endpoints' views are answered as they are.

FastAPI hands what an endpoint returns to another thread, to validate it against the declared model. A view was
validated when it was made.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, get_type_hints

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute

from api.views import View


class Route(APIRoute):
    """A route that turns a view into JSON in the thread that made it."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, status_code: int | None = None, **options: Any):
        super().__init__(path, _answering(endpoint, status_code or 200), status_code=status_code, **options)


def _answering(endpoint: Callable[..., Any], status_code: int) -> Callable[..., Any]:
    """`endpoint`, which gives a whole answer; as it is where it is asynchronous or has headers to add."""
    hints = get_type_hints(endpoint)
    made = hints.pop("return", None)
    is_view = isinstance(made, type) and issubclass(made, View)
    if inspect.iscoroutinefunction(endpoint) or not is_view or Response in hints.values():
        return endpoint

    @wraps(endpoint)
    def answer(*args: Any, **kwargs: Any) -> Any:
        view = endpoint(*args, **kwargs)
        if type(view) is not made:
            return view
        return Response(view.model_dump_json(by_alias=True), status_code, media_type="application/json")

    return answer


Router = partial(APIRouter, route_class=Route)
"""A router of such routes."""
